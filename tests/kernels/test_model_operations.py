"""Operations of models against transformers and plain twins, rounded as they round; fused ones against their parts."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig, Qwen3NextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_a_part
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from strata.kernels.activation.scale import scale
from strata.kernels.activation.sigmoid_gate import sigmoid_gate
from strata.kernels.activation.silu_mul import Clamp, gelu_mul, silu_mul
from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.linear.embedding import embedding, vocabulary_embedding
from strata.kernels.linear.linear import linear
from strata.kernels.moe.experts import biased_experts, by_library
from strata.kernels.norm.norm import add_rms_norm, mean_square, rms_norm, row_tile, sharded_rms_norm, wide_rms_norm
from strata.kernels.recurrent.deinterleave import deinterleave
from strata.kernels.rotary.rope import partial_rope, rope, rope_angles
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from tests.kernels.compiled_for import CompileCase, compile_for
from tests.kernels.launches.norm import ROWS, norm
from tests.kernels.launches.noted import empty
from tests.kernels.launches.state import finished_heads

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
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (37, 255), (300, 64), (5, 4096), (0, 8)])
def test_norms_have_the_bits_of_transformers(rows: int, width: int, dtype: torch.dtype, way: dict) -> None:
    x, residual, _ = merged(rows, width, width, 3, dtype=dtype)
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(width).to(dtype)
    with torch.no_grad():
        assert torch.equal(rms_norm.bind("cpu", **way)(x, norm.weight, 1e-5), norm(x))
        total, normed = add_rms_norm.bind("cpu", **way)(x, residual, norm.weight, 1e-5)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, norm(x + residual))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("theirs", "offset"), [(Olmo2RMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
def test_wide_norms_have_the_bits_of_transformers(theirs: type, offset: float, dtype: torch.dtype) -> None:
    norm = theirs(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(17, 96).to(dtype)
    assert torch.equal(wide_rms_norm(x, norm.weight, 1e-5, offset), norm(x))


def test_a_divided_norm_is_the_norm_of_the_whole_row() -> None:
    """Four ranks, of which two and two hold the same columns."""
    x, weight = torch.randn(5, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    wanted = wide_rms_norm(x, weight, 1e-5, 1.0).chunk(2, -1)
    parts = [part for part in x.chunk(2, -1) for _ in range(2)]
    total = torch.stack([mean_square(part) for part in parts]).sum(0)
    for rank, part in enumerate(parts):
        own = weight.chunk(2)[rank // 2]
        assert torch.allclose(sharded_rms_norm(part, total, 4, own, 1e-5, 1.0), wanted[rank // 2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul_rounds_like_transformers(dtype: torch.dtype) -> None:
    mlp = Gemma3MLP(Gemma3TextConfig(hidden_size=8, intermediate_size=8))
    gate, up = (torch.randn(9, 65).to(dtype) for _ in range(2))
    assert torch.equal(gelu_mul(gate, up), mlp.act_fn(gate) * up)


CLAMP = Clamp(1.702, 0.7)


def test_experts_within_bounds_are_those_of_transformers() -> None:
    """On every path, and each rank's part of their width: together they make the whole, the last biases added once."""
    theirs = GptOssExperts(GptOssConfig(hidden_size=24, intermediate_size=12, num_local_experts=5, swiglu_limit=0.7))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    x, weights, chosen = torch.randn(9, 24), torch.rand(9, 2), torch.rand(9, 5).topk(2).indices
    chosen[:, 0].masked_fill_(chosen[:, 0] == 3, 4)  # an expert without rows, perhaps
    with torch.no_grad():
        wanted = GptOssExperts.forward.__wrapped__(theirs, x, chosen, weights)
        # Gate rows before those of up, outputs before inputs.
        gate_up = torch.cat((theirs.gate_up_proj[..., ::2], theirs.gate_up_proj[..., 1::2]), -1).transpose(1, 2)
        bias = torch.cat((theirs.gate_up_proj_bias[:, ::2], theirs.gate_up_proj_bias[:, 1::2]), 1)
        down, last = theirs.down_proj.transpose(1, 2).contiguous(), theirs.down_proj_bias
        given = x, weights, chosen, gate_up.contiguous(), down, bias, last, CLAMP
        for name in ("cpu", "fixed", "library"):
            if name == "library":
                found = biased_experts.of_arguments(by_library)(*given)
            else:
                found = biased_experts.bind("cpu", deterministic=name == "fixed")(*given)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=name)
        halves = []
        for rank in range(2):
            own = slice(6 * rank, 6 * rank + 6)
            rows = torch.cat((torch.arange(12)[own], 12 + torch.arange(12)[own]))
            part = gate_up[:, rows], down[..., own], bias[:, rows], last
            halves.append(biased_experts(x, weights, chosen, *part, CLAMP, rank == 0))
        torch.testing.assert_close(halves[0] + halves[1], wanted, rtol=1e-5, atol=1e-5)


def test_the_scale_of_embeddings_is_rounded_first() -> None:
    embedding = Gemma3TextScaledWordEmbedding(11, 3072, 0, embed_scale=3072**0.5).to(torch.bfloat16)
    tokens = torch.arange(11)
    assert torch.equal(scale(embedding.weight[tokens], 3072**0.5), embedding(tokens))
    assert scale(torch.ones(1, dtype=torch.bfloat16), 3072**0.5).item() == 55.5


def test_partial_rope_rotates_like_transformers() -> None:
    q, k, table = torch.randn(7, 3, 10), torch.randn(7, 1, 10), torch.randn(20, 6)
    positions = torch.tensor([3, 0, 19, 1, 2, 5, 4], dtype=torch.int32)
    cos, sin = (torch.cat((half, half), -1) for half in table[positions.long()].chunk(2, -1))
    wanted = rotate_a_part(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    for x, turned in zip((q, k), wanted, strict=True):
        found = partial_rope(x, *rope_angles(positions, table))
        assert torch.allclose(found, turned[0].transpose(0, 1), rtol=0, atol=1e-6)
        assert torch.equal(found[..., 6:], x[..., 6:])


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("width", [1, 65])
def test_sigmoid_gates_let_through_what_a_wide_sigmoid_does(width: int, dtype: torch.dtype) -> None:
    """A gate of each column, as a part of a wider product has it, or one for all; within a rounding of either step."""
    x, gate = torch.randn(9, 65).to(dtype), torch.randn(9, 3 * width).to(dtype)[:, width : 2 * width]
    wanted = x.double() / (1 + (-gate.double()).exp())
    for found in (sigmoid_gate(x, gate), sigmoid_gate.bind("cpu", deterministic=True)(x, gate)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=3 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("heads", [3, 6])
def test_columns_are_brought_together_as_transformers_does(heads: int) -> None:
    sizes = {"linear_num_key_heads": 3, "linear_num_value_heads": heads, "linear_key_head_dim": 5}
    theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=8, linear_value_head_dim=7, **sizes), 0)
    products, gates = torch.randn(2, 4, 2 * 15 + 2 * 7 * heads), torch.randn(2, 4, 2 * heads)
    q, k, v, z, b, a = theirs.fix_query_key_value_ordering(products, gates)
    served = heads // 3
    parts = deinterleave(products.flatten(0, 1).unflatten(-1, (3, -1)), (5, 5, 7 * served, 7 * served))
    assert torch.equal(parts, torch.cat([one.flatten(2) for one in (q, k, v, z)], -1).flatten(0, 1))
    parts = deinterleave(gates.flatten(0, 1).unflatten(-1, (3, -1)), (served, served))
    assert torch.equal(parts, torch.cat((b, a), -1).flatten(0, 1))


LENGTH = 40


def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def poisoned_pools(kv_heads: int, head_dim: int, dtype: torch.dtype, slots: list[int]) -> PagedKV:
    keys, values = (tuple(torch.full((4, 8, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in "ab") for _ in "kv")
    index = torch.zeros(1, 4, dtype=torch.int32)
    return PagedKV(keys, values, index, index[0], torch.tensor(slots, dtype=torch.int32))


@pytest.mark.parametrize("way", [{}, {"deterministic": True}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 10), (7, 1, 12), (3, 3, 16)])
@pytest.mark.parametrize("slots", [[5, 31, 0, 17, 8], [-1, 9, -1, 2, 3], [], None])
def test_qk_rope_kv_write_has_the_bits_of_its_parts(
    slots: list[int] | None, heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype, way: dict
) -> None:
    tokens = 5 if slots is None else len(slots)
    product = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim + 3).to(dtype)[:, 3:]
    weights = [torch.randn(head_dim).to(dtype) for _ in "qk"] if normed else [None, None]
    cos, sin = rope_angles(torch.randint(0, LENGTH, (tokens,)).int(), torch.randn(LENGTH, head_dim))
    mine, parts = (None if slots is None else poisoned_pools(kv_heads, head_dim, dtype, slots) for _ in range(2))
    run = qk_rope_kv_write.bind("cpu", **way)
    found = run(product, *weights, cos, sin, mine, HeadsSpec(1, heads, kv_heads, 1e-5))
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in product.split(sizes, -1))
    if normed:
        q, k = (rms_norm.bind("cpu", **way)(x, weight, 1e-5) for x, weight in zip((q, k), weights, strict=True))
    q, k = (rope.bind("cpu", **way)(x, cos, sin) for x in (q, k))
    expected = (q, *kv_write.bind("cpu", **way)(k, v, parts, 1))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[2].data_ptr() == v.data_ptr()
    if mine is not None and parts is not None:
        for one, other in zip((*mine.keys, *mine.values), (*parts.keys, *parts.values), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


STRIDES = ("width", "head_dim", "token_stride", "head_stride", "x_stride", "residual_stride")


def summation(case: CompileCase, width: int, aligned: bool) -> list[str]:
    """The floating-point instructions of a kernel from the first square to the inverse root, for rows of `width`.

    Heads are summed in tiles with twice the rows and warps of those of `rms_norm`: as many elements for each thread.
    """
    tile, warps = row_tile(width)
    if "HEAD_DIM" in case.constants:
        tile, warps = {"HEAD_DIM": width, "ROWS": 2 * tile["ROWS"], "WIDTH": tile["WIDTH"]}, 2 * warps
    signature = {name: kind if aligned or name not in STRIDES else "i32" for name, kind in case.signature.items()}
    made = CompileCase(case.name, case.kernel, signature, case.constants | tile, warps, case.num_stages)
    ptx = compile_for(made).ptx
    found: list[str] = re.findall(r"^\s*((?:mul|fma|add|div|rsqrt|shfl)\.\S*(?:f32|b32))\s", ptx, re.MULTILINE)
    return found[: found.index("rsqrt.approx.ftz.f32") + 1]


# Other compilers order the sum of the widest rows otherwise; what then holds is what tests/gpu finds on the device.
@pytest.mark.skipif(not triton_version().startswith("3.6."), reason="the instructions are those of Triton 3.6")
@pytest.mark.parametrize(("width", "aligned"), [(12, False), (80, True), (128, True), (5000, False), (4096, True)])
def test_fused_kernels_sum_a_row_like_rms_norm(width: int, aligned: bool, tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    residual = empty(ROWS, width)
    (plain,), (fused,) = norm("rows", width), norm("sum", width, residual=residual)
    expected = summation(plain, width, aligned)
    assert expected[-1].startswith("rsqrt")
    assert summation(fused, width, aligned) == expected
    (rounded,) = norm("sum to int8", width, residual=residual, rounding=("int8", 0, None))
    assert summation(rounded, width, aligned) == expected
    if width <= 256:
        (heads,) = finished_heads(width, norm=True)
        assert summation(heads, width, aligned) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_are_those_that_the_parts_have(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads with norms have no gradients of their own as a whole on any device; a norm that has some is used."""
    given = []

    def norm_with_gradients(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        given.append(tuple(x.shape))
        return rms_norm.reference(x, weight, eps)

    known = [*rms_norm.implementations]
    monkeypatch.setattr(rms_norm, "implementations", known)
    monkeypatch.setattr(rms_norm, "_bound", {})
    rms_norm.implement("with gradients", "cpu", differentiable=True)(norm_with_gradients)
    product = torch.randn(9, (4 + 2 * 2) * 8, requires_grad=True)
    weights = [torch.randn(8, requires_grad=True) for _ in "qk"]
    cos, sin = rope_angles(torch.arange(9, dtype=torch.int32), torch.randn(9, 8))
    arguments = (product, *weights, cos, sin, None, HeadsSpec(0, 4, 2, 1e-5))
    chosen = qk_rope_kv_write.bind(device, differentiable=True).choose(*arguments)
    assert chosen.name == "parts"
    results = chosen.run(*qk_rope_kv_write.call_args(*arguments))
    assert given == [(9, 4, 8), (9, 2, 8)]
    exact = [one.detach().double().requires_grad_() for one in (product, *weights)]
    wanted = qk_rope_kv_write.reference(*exact, cos.double(), sin.double(), None, arguments[-1])
    upstream = [torch.randn_like(one) for one in results]
    torch.autograd.backward(results, upstream)
    torch.autograd.backward(wanted, [one.double() for one in upstream])
    for found, one in zip((product, *weights), exact, strict=True):
        torch.testing.assert_close(found.grad.double(), one.grad, rtol=1e-4, atol=1e-5)
