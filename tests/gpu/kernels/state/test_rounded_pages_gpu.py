"""Pools in 8 bits on CUDA: what is written is the reference's, bit for bit, and every kernel over pages has the results
that it has over plain pools which hold what the rows stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strata.kernels.attention import batch_invariant, cuda
from strata.kernels.attention.decode_cuda import Unfinished, decode
from strata.kernels.attention.decode_tile import DecodeTile, decode_tile
from strata.kernels.attention.spec import AttentionCall, Sequences
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.kernels.state.quantized_rows import round_rows, widen_rows
from strata.kernels.state.quantized_triton import write_quantized
from tests.gpu.kernels.test_decode_attention_gpu import Step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

KINDS = [torch.float8_e4m3fn, torch.int8]
TILE = DecodeTile(keys=32, warps=4, stages=2, split=64, splits=8)


def rounded(pages: PagedKV, kind: torch.dtype) -> tuple[PagedKV, PagedKV]:
    """The pages in 8 bits, and plain ones of what these stand for."""
    both = [round_rows(one[0].nan_to_num(1.0), kind) for one in (pages.keys, pages.values)]
    exponents = [powers.transpose(1, 2).contiguous() for _, powers in both]
    packed = replace(
        pages,
        keys=(both[0][0],),
        values=(both[1][0],),
        key_exponents=(exponents[0],),
        value_exponents=(exponents[1],),
    )
    wide = [widen_rows(*one, pages.keys[0].dtype) for one in both]
    return packed, replace(pages, keys=(wide[0],), values=(wide[1],))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_written_as_by_the_reference(kind: torch.dtype, dtype: torch.dtype) -> None:
    step = Step([5, 0, 16, 300, 17], 12, 3, 80, dtype)
    packed, _ = rounded(step.pages, kind)
    k, v = (torch.randn(5, 3, 200, device="cuda").mul(10).to(dtype)[..., 60:140] for _ in "kv")
    k[0, 1, 7], k[1, 0, 3], v[3, 2] = torch.nan, torch.inf, 0.0
    k[2] *= 1e-30
    ours, theirs = (replace(packed, **{name: (getattr(packed, name)[0].clone(),) for name in FIELDS}) for _ in range(2))
    found, wanted = write_quantized(k, v, ours, 0), kv_write.reference(k, v, theirs, 0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    for name in FIELDS:
        assert torch.equal(*(getattr(pages, name)[0].view(torch.uint8) for pages in (ours, theirs))), name


FIELDS = ("keys", "values", "key_exponents", "value_exponents")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 4, 128), (14, 2, 80), (8, 1, 256)])
def test_decoding_reads_what_plain_pools_hold(
    kind: torch.dtype, window: int | None, heads: int, kv_heads: int, head_dim: int
) -> None:
    step = Step([5, 0, 16, 1000, 17, 64, 333], heads, kv_heads, head_dim, window=window, normed=True)
    packed, plain = rounded(step.pages, kind)
    q = torch.randn(7, heads * head_dim, device="cuda").bfloat16()
    found, wanted = (decode(q, heads, head_dim, pages, step.spec(), tile=TILE) for pages in (packed, plain))
    held = step.pages.lengths > 0
    exact = step.exact(q.view(7, heads, head_dim), plain)
    # Weights are float16 here and bfloat16 there.
    assert (found - exact)[held].norm() <= 1.02 * (wanted - exact)[held].norm()
    # From the product on: the new row is rounded, too, so the plain pools get it first.
    unfinished = Unfinished(*step.weights, 1e-6, step.cos, step.sin)
    result = decode(step.product, heads, head_dim, packed, step.spec(), unfinished, TILE)
    plain = widened(packed)
    assert plain.keys[0].isfinite().all()
    assert plain.values[0].isfinite().all()
    exact = step.exact(step_queries(step), plain)
    torch.testing.assert_close(result[held].double(), exact[held], rtol=1.5e-2, atol=1.5e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [1, 8, 32, 64, 128])
def test_decoding_over_rows_of_any_size(kind: torch.dtype, sequences: int) -> None:
    """Values from 2^-60 to 2^60 in one sequence, where the largest are met first, last, and never; large and small
    queries; and a sequence with a row that is not finite, which the others do not notice."""
    step = Step([900, 900, 900, 40, 900, 900], 16, 4, 128)
    tables = step.pages.tables
    sizes = torch.exp2(torch.linspace(-60, 60, 900, device="cuda")).repeat(16)[: 57 * 16].view(57, 16, 1, 1)
    for row, size in ((0, sizes), (1, sizes.flip(0)), (2, sizes * 0 + 2.0**100), (4, sizes * 0 + 2.0**-100)):
        step.pages.values[0][tables[row].long()] *= size.bfloat16()
    packed, plain = rounded(step.pages, kind)
    broken = tables[3, 1].long()
    packed.value_exponents[0][broken, 2, 5] = 255
    q = torch.randn(6, 16, 128, device="cuda").bfloat16()
    q[1] *= 2.0**40
    plain.keys[0][tables[1].long()] *= 2.0**-40
    packed.key_exponents[0][tables[1].long()] -= 40
    q[5] *= 2.0**-70
    tile = decode_tile(16, 4, 128, torch.bfloat16, sequences, 900, rounded=True)
    found = decode(q.flatten(1), 16, 128, packed, step.spec(), tile=tile).double()
    exact = step.exact(q, plain)
    of_head = torch.tensor([2], device="cuda").repeat_interleave(4) * 4 + torch.arange(4, device="cuda")
    assert found[3, of_head].isnan().all()
    whole = [0, 1, 2, 4, 5]
    assert ((found - exact)[whole].norm(dim=-1) <= 1e-2 * exact[whole].norm(dim=-1)).all()
    others = [head for head in range(16) if head not in of_head.tolist()]
    assert ((found - exact)[3, others].norm(dim=-1) <= 1e-2 * exact[3, others].norm(dim=-1)).all()


def widened(pages: PagedKV) -> PagedKV:
    wide = [
        widen_rows(rows[0], powers[0].transpose(1, 2), torch.bfloat16)
        for rows, powers in ((pages.keys, pages.key_exponents), (pages.values, pages.value_exponents))
    ]
    return replace(pages, keys=(wide[0],), values=(wide[1],), key_exponents=(), value_exponents=())


def step_queries(step: Step) -> Tensor:
    """Of the step's product, normalized and rotated by the reference."""
    nowhere = replace(step.pages, slot_mapping=torch.full_like(step.pages.slot_mapping, -1))
    q, _, _ = qk_rope_kv_write.reference(*step.finishing(nowhere))
    return q


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 4, 128), (14, 2, 80)])
def test_prompts_have_the_bits_of_plain_pools(
    kind: torch.dtype, window: int | None, heads: int, kv_heads: int, head_dim: int
) -> None:
    lengths, news = [5, 700, 16, 300], [5, 100, 1, 33]
    step = Step(lengths, heads, kv_heads, head_dim, window=window)
    packed, plain = rounded(step.pages, kind)
    offsets = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    q = torch.randn(sum(news), heads, head_dim, device="cuda").bfloat16()
    k = torch.randn(sum(news), kv_heads, head_dim, device="cuda").bfloat16()
    for attend in (cuda.attend, batch_invariant.attend):
        found, wanted = (
            attend(AttentionCall(q, k, k, Sequences(offsets, max(news), pages), step.spec()))
            for pages in (packed, plain)
        )
        assert torch.equal(found, wanted)


def test_a_recorded_step_reads_and_writes_what_an_eager_one_does() -> None:
    step = Step([5, 16, 300, 17], 16, 4, 128)
    packed, _ = rounded(step.pages, torch.float8_e4m3fn)
    unfinished = Unfinished(None, None, 0.0, step.cos, step.sin)
    first = decode(step.product, 16, 128, packed, step.spec(), unfinished, TILE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = decode(step.product, 16, 128, packed, step.spec(), unfinished, TILE)
    graph.replay()
    assert torch.equal(first, again)
