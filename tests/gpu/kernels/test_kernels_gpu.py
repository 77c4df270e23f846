"""The CUDA kernels against float64, and bit for bit against themselves in other company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear import batch_invariant as gemm_fixed
from strata.kernels.linear.batch_invariant import InvariantTile
from strata.kernels.linear.embedding import embedding, vocabulary_embedding
from strata.kernels.linear.linear import linear, sliced_linear
from strata.kernels.loss.loss import linear_cross_entropy
from strata.kernels.norm.norm import rms_norm
from strata.kernels.pairwise import pairwise_sum
from strata.kernels.rotary.rope import partial_rope, rope, rope_angles
from strata.kernels.sampling.sampling import gumbel_noise, gumbel_sample, logprobs, token_logprobs
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from tests.gpu.tensors import draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = (1, 2, 7, 16, 64, 65, 128, 300)
TILES = {
    "64x32": gemm_fixed._NARROW,
    "64x64": gemm_fixed._SHORT,
    "128x64": gemm_fixed._SMALL,
    "128x128": gemm_fixed._MIDDLE,
    "128x256": gemm_fixed._LARGE,
}


def strided(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows inside a wider projection, at an offset that is no multiple of 16 bytes."""
    return draw(rows, 2 * width + 5, dtype=dtype)[:, 3 : 3 + width]


def assert_close_to_exact(result: torch.Tensor, exact: torch.Tensor) -> None:
    """Two roundings to the dtype, beside what float32 sums lose."""
    assert result.isfinite().all()
    rtol = max(1.1 * torch.finfo(result.dtype).eps, 4e-6)
    torch.testing.assert_close(result.double(), exact, rtol=rtol, atol=2e-6 * exact.abs().max().item())


def assert_rows_stand_alone(run: Callable[[torch.Tensor], torch.Tensor], rows: int = 1024) -> None:
    together = run(torch.arange(rows, device="cuda"))
    for count in COUNTS:
        chosen = torch.randint(0, rows, (count,), device="cuda")
        assert torch.equal(run(chosen), together[chosen]), f"rows have other bits in a batch of {count}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 64, 80, 255, 2048, 4096, 5000, 16384])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = draw(width, dtype=dtype)
    run = rms_norm.bind("cuda", deterministic=True)
    for x in (strided(37, width, dtype), draw(3, width, dtype=dtype), draw(0, width, dtype=dtype)):
        wide = x.double()
        exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        if x.numel():
            assert_close_to_exact(run(x, weight, 1e-5), exact)
        assert run(x, weight, 1e-5).shape == x.shape
    x = draw(1024, width, dtype=dtype)
    assert_rows_stand_alone(lambda rows: run(x[rows], weight, 1e-5))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rms_norm_of_heads_in_a_merged_projection(head_dim: int) -> None:
    heads = draw(19, 11 * head_dim)[:, head_dim : 6 * head_dim].unflatten(-1, (-1, head_dim))
    weight = draw(head_dim)
    wide = heads.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert_close_to_exact(rms_norm.bind("cuda")(heads, weight, 1e-6), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 255, 1024, 14336])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate, up = strided(33, width, dtype), strided(33, width, dtype)
    gate[0, 0] = -200
    run = silu_mul.bind("cuda", deterministic=True)
    assert_close_to_exact(run(gate, up), F.silu(gate.double()) * up.double())
    gate, up = draw(1024, width, dtype=dtype), draw(1024, width, dtype=dtype)
    assert_rows_stand_alone(lambda rows: run(gate[rows], up[rows]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (5, 80), (32, 128), (7, 96), (40, 256)])
def test_rope(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x = strided(29, heads * head_dim, dtype).unflatten(-1, (-1, head_dim))
    table = torch.randn(5000, head_dim, device="cuda")
    positions = torch.randint(0, 5000, (29,), device="cuda", dtype=torch.int32)
    angles, run = rope_angles.bind("cuda", deterministic=True), rope.bind("cuda", deterministic=True)
    exact = rope.reference(x.double(), *rope_angles.reference(positions, table.double()))
    for found, wanted in zip(angles(positions, table), rope_angles.reference(positions, table), strict=True):
        assert torch.equal(found, wanted)
    assert_close_to_exact(run(x, *angles(positions, table)), exact)
    many = draw(1024, heads, head_dim, dtype=dtype)
    assert_rows_stand_alone(lambda rows: run(many[rows], *angles(rows.int(), table)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dims", "head_dim"), [(1, 48, 64), (16, 64, 256), (24, 96, 128), (7, 2, 20)])
def test_partial_rope(heads: int, dims: int, head_dim: int, dtype: torch.dtype) -> None:
    """Of heads beside something else, as a gate stands beside each query."""
    x = draw(29, heads, 2 * head_dim, dtype=dtype)[..., :head_dim]
    positions = torch.randint(0, 50, (29,), device="cuda", dtype=torch.int32)
    table, run = torch.randn(50, dims, device="cuda"), partial_rope.bind("cuda", deterministic=True)
    cos, sin = rope_angles.bind("cuda", deterministic=True)(positions, table)
    found = run(x, cos, sin)
    exact = partial_rope.reference(x.double(), *rope_angles.reference(positions, table.double()))
    assert_close_to_exact(found, exact)
    assert torch.equal(found[..., dims:], x[..., dims:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 80), (8, 128)])
@pytest.mark.parametrize("tokens", [1, 70, 601])
def test_kv_write(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    pages, size = 40, 16
    k, v = (strided(tokens, heads * head_dim, dtype).unflatten(-1, (-1, head_dim)) for _ in range(2))
    slots = torch.randperm(pages * size, device="cuda")[:tokens].int()
    slots[::9] = -1
    pools = [tuple(draw(pages, size, heads, head_dim, dtype=dtype) for _ in range(2)) for _ in range(2)]
    expected = [[pool.clone() for pool in pair] for pair in pools]
    for new, pair in ((k, expected[0]), (v, expected[1])):
        pair[1].view(-1, heads, head_dim)[slots[slots >= 0].long()] = new[slots >= 0]
    kv_write.bind("cuda", deterministic=True)(k, v, PagedKV(pools[0], pools[1], slots, slots, slots), 1)
    for pair, wanted in zip(pools, expected, strict=True):
        assert all(torch.equal(pool, want) for pool, want in zip(pair, wanted, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 96, 255, 1024, 4096, 5000])
def test_embedding(width: int, dtype: torch.dtype) -> None:
    run = embedding.bind("cuda", deterministic=True)
    for weight in (draw(1000, width, dtype=dtype), strided(1000, width, dtype)):
        for tokens in (0, 1, 3, 33, 600):
            ids = torch.randint(0, 1000, (tokens,), device="cuda", dtype=torch.int32)
            assert torch.equal(run(ids, weight), weight[ids.long()])
            assert torch.equal(run(ids.long(), weight), weight[ids.long()])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 255, 1024, 5000])
def test_embeddings_by_parts_of_the_table_add_up(width: int, dtype: torch.dtype) -> None:
    run = vocabulary_embedding.bind("cuda", deterministic=True)
    weight = strided(1000, width, dtype)
    for tokens in (0, 1, 33, 600):
        ids = torch.randint(0, 1000, (tokens,), device="cuda", dtype=torch.int32)
        parts = [run(ids, weight[first:end], first) for first, end in ((0, 300), (300, 301), (301, 1000))]
        assert torch.equal(parts[0] + parts[1] + parts[2], weight[ids.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(64, 1), (255, 4099), (1000, 96), (4096, 4096)])
def test_deterministic_linear_is_the_product(width: int, out: int, dtype: torch.dtype) -> None:
    weight, bias = draw(out, width, dtype=dtype) / width**0.5, draw(out, dtype=dtype)
    run = linear.bind("cuda", deterministic=True)
    for rows, shift in ((0, None), (1, bias), (65, None), (200, bias), (1500, None)):
        x = strided(rows, width, dtype)
        result = run(x, weight, shift)
        assert result.shape == (rows, out)
        exact = x.double() @ weight.double().t() + (0 if shift is None else shift.double())
        # A sum of `width` products in float32 loses a little in each addition.
        loss = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2e-6 * width**0.5}
        torch.testing.assert_close(result.double(), exact, **loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "out"), [(4096, 4096), (4096, 6144), (14336, 4096), (1024, 12288), (255, 4099)])
def test_deterministic_linear_gives_a_row_the_same_bits_in_any_batch(width: int, out: int, dtype: torch.dtype) -> None:
    x, weight = draw(1024, width, dtype=dtype), draw(out, width, dtype=dtype)
    run = linear.bind("cuda", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(x[rows], weight, None))


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("width", "out"), [(4096, 4096), (255, 4099)])
def test_every_tile_gives_the_same_bits(width: int, out: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(300, width), draw(out, width)
    results = []
    for tile in (gemm_fixed._MIDDLE, TILES[name]):

        def always(*_: object, tile: InvariantTile = tile) -> InvariantTile:
            return tile

        monkeypatch.setattr(gemm_fixed, "choose_tile", always)
        results.append(linear.bind("cuda", deterministic=True)(x, weight, None))
    assert torch.equal(*results)


@pytest.mark.parametrize("vocab", [50, 4096, 151937])
def test_gumbel_sample_is_its_reference(vocab: int) -> None:
    rows = 40
    logits = torch.randn(rows, vocab + 3, device="cuda")[:, :vocab] * 3
    logits[:, ::7] = -torch.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device="cuda")
    steps = torch.randint(0, 10000, (rows,), device="cuda", dtype=torch.int32)
    greedy = torch.rand(rows, device="cuda") < 0.3
    temperatures = (~greedy).float()
    ids = gumbel_sample.bind("cuda", deterministic=True)(logits, temperatures, seeds, steps)
    # The logarithms may differ in the last bit between processors, so a near tie may fall otherwise.
    scores = logits.cpu() + gumbel_noise(seeds.cpu(), steps.cpu(), vocab).masked_fill(greedy.cpu()[:, None], 0)
    reached = scores.gather(1, ids.long().cpu()[:, None]).squeeze(1)
    torch.testing.assert_close(reached, scores.amax(-1), rtol=0, atol=2e-5)
    assert torch.equal(ids[greedy], logits[greedy].argmax(-1).int())
    torch.testing.assert_close(gumbel_noise(seeds, steps, vocab).cpu(), gumbel_noise(seeds.cpu(), steps.cpu(), vocab))


def test_sampled_ids_do_not_depend_on_the_batch() -> None:
    logits, steps = torch.randn(1024, 5001, device="cuda"), torch.arange(1024, device="cuda")
    seeds, temperatures = torch.randint(-(2**63), 2**63 - 1, (1024,), device="cuda"), (steps % 3) / 2
    run = gumbel_sample.bind("cuda", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(logits[rows], temperatures[rows], seeds[rows], steps[rows]))


@pytest.mark.parametrize("vocab", [50, 4099, 151936])
def test_logprobs(vocab: int) -> None:
    logits = torch.randn(30, vocab, device="cuda") * 4
    logits[:, 3] = -torch.inf
    ids = logits.topk(7).indices[:, 6].int()
    chosen, ranks, top_ids, top = logprobs(logits, ids, 5)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), exact.gather(1, ids.long()[:, None])[:, 0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(top.double(), exact.topk(5).values, rtol=1e-6, atol=2e-6)
    assert (ranks == 7).all()
    assert torch.equal(top_ids, logits.topk(5).indices.int())
    many, wanted = torch.randn(1024, vocab, device="cuda"), torch.randint(0, vocab, (1024, 3), device="cuda")
    run = token_logprobs.bind("cuda", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(many[rows], wanted[rows]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_cross_entropy(dtype: torch.dtype) -> None:
    hidden, weight = draw(700, 96, dtype=dtype), draw(5001, 96, dtype=dtype) / 10
    targets = torch.randint(0, 5001, (700,), device="cuda")
    targets[::5] = -100
    narrow = [x.clone().requires_grad_() for x in (hidden, weight)]
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*narrow, targets)
    exact = F.cross_entropy(wide[0] @ wide[1].t(), targets, reduction="none")
    loss.mean().backward()
    exact.mean().backward()
    scale = 2e-2 if dtype == torch.bfloat16 else 2e-5
    assert (loss.double() - exact).norm() < scale * exact.norm()
    for mine, theirs in zip(narrow, wide, strict=True):
        assert (mine.grad.double() - theirs.grad).norm() < scale * theirs.grad.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("out", "width"), [(64, 128), (1000, 1016), (4096, 14336), (100, 40)])
def test_sliced_products(out: int, width: int, dtype: torch.dtype) -> None:
    """Near float64, the same bits in any company, and branches of the sum with the bits of the whole."""
    run = sliced_linear.bind("cuda", deterministic=True)
    x = torch.randn(300, width, device="cuda").to(dtype)
    weight = (torch.randn(out, width, device="cuda") / width**0.5).to(dtype)
    exact = x.double() @ weight.double().T
    for slices in (1, 2, 4, 8):
        wide = run(x, weight, slices, True)
        torch.testing.assert_close(wide.double(), exact, rtol=1e-4, atol=1e-4)
        assert torch.equal(run(x, weight, slices, False), wide.to(dtype))
        for rows in (slice(0, 1), slice(5, 30), slice(200, 300)):
            assert torch.equal(run(x[rows], weight, slices, True), wide[rows])
    for ranks in (2, 4, 8):
        parts = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
        sums = [run(some.contiguous(), own.contiguous(), 8 // ranks, True) for some, own in parts]
        assert torch.equal(pairwise_sum(sums), run(x, weight, 8, True)), ranks
