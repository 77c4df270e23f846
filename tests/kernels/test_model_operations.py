"""The model operations against transformers and plain twins, and their counted cost against hand counts."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear.embedding import embedding, vocabulary_embedding
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm
from strata.kernels.op import Operation
from strata.kernels.rotary.rope import rope, rope_angles
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV

DTYPES = [torch.float32, torch.bfloat16]
EVERY_WAY = [{}, {"deterministic": True}, {"differentiable": True}]


def merged(tokens: int, *widths: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Strided views into one projection, as the merge pass makes them."""
    return list(torch.randn(tokens, sum(widths)).to(dtype).split(widths, -1))


def pages_of(slots: list[int], heads: int = 3, head_dim: int = 10, layers: int = 2) -> PagedKV:
    def pools() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(4, 8, heads, head_dim) for _ in range(layers))

    index = torch.zeros(1, 4, dtype=torch.int32)
    return PagedKV(pools(), pools(), index, index[0], torch.tensor(slots, dtype=torch.int32))


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (37, 255), (300, 64), (5, 4096)])
def test_rms_norm_has_the_bits_of_transformers(rows: int, width: int, dtype: torch.dtype, way: dict) -> None:
    x, _ = merged(rows, width, 3, dtype=dtype)
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(width).to(dtype)
    with torch.no_grad():
        assert torch.equal(rms_norm.bind("cpu", **way)(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("way", EVERY_WAY)
def test_rms_norm_of_heads_and_of_a_large_epsilon(way: dict) -> None:
    _, x = merged(6, 7, 4 * 20)
    heads = x.unflatten(-1, (-1, 20))
    weight = torch.randn(20)
    expected = heads / (heads.pow(2).sum(-1, keepdim=True) / 20 + 0.5).sqrt() * weight
    torch.testing.assert_close(rms_norm.bind("cpu", **way)(heads, weight, 0.5), expected)


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_rope_rotates_like_transformers(tokens: int, dtype: torch.dtype, way: dict) -> None:
    head_dim = 12
    _, flat = merged(tokens, 5, 7 * head_dim, dtype=dtype)
    x = flat.unflatten(-1, (-1, head_dim))
    angles = torch.outer(torch.arange(50.0), 100 ** (-torch.arange(6) / 6))
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    cos, sin = (torch.cat((half, half), -1)[None] for half in table[positions].chunk(2, -1))
    expected, _ = apply_rotary_pos_emb(x.float()[None], x.float()[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(
        rope.bind("cpu", **way)(x, *rope_angles.bind("cpu", **way)(positions, table)), expected[0].to(dtype)
    )


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 256, 20000])
def test_silu_mul_rounds_like_transformers(width: int, dtype: torch.dtype, way: dict) -> None:
    gate, up = merged(3, width, width, dtype=dtype)
    wide = gate.double()
    expected = (wide * wide.sigmoid()).to(dtype) * up
    result = silu_mul.bind("cpu", **way)(gate, up)
    # An error in the last bit of silu before the product is one in the last bit or two after it.
    torch.testing.assert_close(result, expected, rtol=4e-7 if dtype == torch.float32 else 1.6e-2, atol=1e-30)
    if dtype == torch.bfloat16 and width > 200:
        assert (result == expected).float().mean() > 0.99


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_the_product(dtype: torch.dtype, bias: bool, way: dict) -> None:
    for shape, width, out in (((1,), 5, 3), ((33,), 255, 41), ((2, 50), 64, 7), ((0,), 4, 4)):
        x = torch.randn(*shape, 2 * width).to(dtype)[..., :width]
        weight, shift = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype) if bias else None
        expected = torch.einsum("...k,nk->...n", x.double(), weight.double())
        if shift is not None:
            expected = expected + shift
        loose = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 2e-2}
        torch.testing.assert_close(linear.bind("cpu", **way)(x, weight, shift), expected.to(dtype), **loose)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_embedding_picks_rows(way: dict) -> None:
    weight = torch.randn(11, 6)
    tokens = torch.tensor([3, 0, 10, 3], dtype=torch.int32)
    assert torch.equal(embedding.bind("cpu", **way)(tokens, weight), torch.stack([weight[i] for i in (3, 0, 10, 3)]))


@pytest.mark.parametrize("way", [{}, {"deterministic": True}])
def test_embeddings_by_parts_of_the_table_add_up(way: dict) -> None:
    weight = torch.randn(11, 6)
    tokens = torch.tensor([3, 0, 10, 3, 4], dtype=torch.int32)
    run = vocabulary_embedding.bind("cpu", **way)
    first, second = run(tokens, weight[:4], 0), run(tokens, weight[4:], 4)
    assert torch.equal(first + second, weight[tokens])
    assert torch.equal(second[[0, 1, 3]], torch.zeros(3, 6))
    assert torch.equal(run(tokens, torch.full((3, 6), torch.nan), 20), torch.zeros(5, 6))


@pytest.mark.parametrize("way", [{}, {"deterministic": True}])
@pytest.mark.parametrize("slots", [[5, 31, 0, 17], [-1, 9, -1, 2], [-1, -1, -1, -1], []])
def test_kv_write_fills_its_slots_and_nothing_else(slots: list[int], way: dict) -> None:
    pages = pages_of(slots)
    k, v, _ = merged(len(slots), 30, 30, 4)
    k, v = k.unflatten(-1, (3, 10)), v.unflatten(-1, (3, 10))
    expected = [[pool.clone() for pool in pools] for pools in (pages.keys, pages.values)]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0][1][slot // 8, slot % 8] = k[token]
            expected[1][1][slot // 8, slot % 8] = v[token]
    for run in (kv_write.bind("cpu", **way), kv_write.reference):
        same_k, same_v = run(k, v, pages, 1)
        assert same_k is k
        assert same_v is v
        for pools, wanted in zip((pages.keys, pages.values), expected, strict=True):
            assert all(torch.equal(pool, want) for pool, want in zip(pools, wanted, strict=True))


def test_kv_write_says_what_it_mutates_and_passes_through_without_pages() -> None:
    k = torch.randn(2, 3, 10)
    assert kv_write.mutates == ("pages",)
    assert kv_write(k, k, None, 0) == (k, k)


def test_gradients_of_the_operations_are_those_of_finite_differences() -> None:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    positions = torch.tensor([2, 0, 1], dtype=torch.int32)
    table = torch.randn(4, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (some(3, 5), some(5)))
    assert torch.autograd.gradcheck(linear, (some(3, 5), some(4, 5), some(4)))
    assert torch.autograd.gradcheck(silu_mul, (some(3, 5), some(3, 5)))
    assert torch.autograd.gradcheck(lambda x: rope(x, *rope_angles(positions, table)), (some(3, 2, 6),))
    assert torch.autograd.gradcheck(lambda w: embedding(positions, w), (some(4, 5),))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def meta_pages(tokens: int) -> PagedKV:
    pool, index = (meta(9, 16, 8, 128),), meta(tokens, dtype=torch.int32)
    return PagedKV(pool, pool, meta(1, 9, dtype=torch.int32), index, index)


# Seven tokens; two bytes an element, four an index or an angle.
HAND_COUNTS = [
    (embedding, (meta(7, dtype=torch.int32), meta(100, 64)), Cost(0, 7 * 4 + 7 * 128, 7 * 128, 7 * 128)),
    # No more rows are read than there are.
    (embedding, (meta(7, dtype=torch.int32), meta(5, 64)), Cost(0, 7 * 4 + 5 * 128, 7 * 128, 5 * 128)),
    (vocabulary_embedding, (meta(7, dtype=torch.int32), meta(50, 64), 50), Cost(0, 28 + 7 * 128, 7 * 128, 7 * 128)),
    (rms_norm, (meta(7, 64), meta(64), 1e-5), Cost(7 * 64 * 4, 7 * 128 + 128, 7 * 128, 128)),
    (linear, (meta(7, 64), meta(96, 64), None), Cost(7 * 64 * 96 * 2, 896 + 12288, 7 * 192, 12288)),
    (linear, (meta(7, 64), meta(96, 64), meta(96)), Cost(86016 + 672, 896 + 12288 + 192, 7 * 192, 12288 + 192)),
    (silu_mul, (meta(7, 64), meta(7, 64)), Cost(7 * 64 * 5, 2 * 896, 896)),
    # Eight signs a token are changed; 16 angles a token are read, and written twice.
    (rope_angles, (meta(7, dtype=torch.int32), meta(50, 16, dtype=torch.float32)), Cost(7 * 8, 28 + 448, 896)),
    (rope, (meta(7, 4, 16), *(meta(7, 1, 16, dtype=torch.float32),) * 2), Cost(1344, 896 + 448, 896)),
    (kv_write, (meta(7, 8, 128), meta(7, 8, 128), meta_pages(7), 0), Cost(0, 2 * 14336 + 28, 2 * 14336)),
    (kv_write, (meta(7, 8, 128), meta(7, 8, 128), None, 0), Cost()),
]


@pytest.mark.parametrize(("operation", "arguments", "expected"), HAND_COUNTS)
def test_costs_are_the_hand_counts(operation: Operation, arguments: tuple, expected: Cost) -> None:
    assert operation.cost(*arguments, workload=Workload((7,), (7,))) == expected


def as_tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_meta_results_have_the_shape_and_dtype_of_real_ones() -> None:
    for operation, arguments, _ in HAND_COUNTS[:-2]:
        real = [torch.zeros_like(a, device="cpu") if isinstance(a, torch.Tensor) else a for a in arguments]
        promised, result = operation(*arguments), operation(*real)
        for empty, full in zip(as_tuple(promised), as_tuple(result), strict=True):
            assert empty.is_meta
            assert (empty.shape, empty.dtype) == (full.shape, full.dtype), operation.name


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(50, 64))
        self.norm = torch.nn.Parameter(torch.randn(64))
        self.weight = torch.nn.Parameter(torch.randn(128, 64))
        self.register_buffer("table", torch.randn(32, 16))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = linear(rms_norm(embedding(tokens, self.embed), self.norm, 1e-5), self.weight, None)
        cos, sin = rope_angles(positions, self.table)
        q = rope(x.unflatten(-1, (-1, 16)), cos, sin)
        k, v = kv_write(q, q, None, 0)
        return silu_mul(k.flatten(-2), v.flatten(-2))


@pytest.mark.parametrize("grad", [False, True])
def test_operations_trace_under_torch_compile_without_a_break(grad: bool) -> None:
    layer, tokens = Layer(), torch.randint(0, 50, (7,), dtype=torch.int32)
    positions = torch.arange(7, dtype=torch.int32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(compiled(tokens, positions), layer(tokens, positions))
