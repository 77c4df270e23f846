"""Latent attention over pages: all implementations against float64, and the bits of the one of deterministic mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.kernels.attention.spec import Sequences
from strata.kernels.latent.attention import PROMPTS_EXPANDED, latent_attention
from strata.kernels.latent.forms import Dims
from tests.kernels.latent.cases import Call, make_call, with_parts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
LITE = Dims(heads=16, nope=128, rope=64, rank=512, value=128)
MANY = Dims(heads=80, nope=24, rope=8, rank=72, value=40)


def on_gpu(call: Call) -> Call:
    q, row, weight, batch, spec = call
    pages = batch.pages
    assert pages is not None
    names = ("tables", "lengths", "slot_mapping")
    moved = replace(pages, keys=(pages.keys[0].cuda(),), values=(), **{n: getattr(pages, n).cuda() for n in names})
    if pages.parts is not None:
        names = ("decode_lengths", "starts", "bounds")
        moved = replace(moved, parts=replace(pages.parts, **{n: getattr(pages.parts, n).cuda() for n in names}))
    return q.cuda(), row.cuda(), weight.cuda(), Sequences(batch.offsets.cuda(), batch.longest, moved), spec


@pytest.mark.parametrize("dims", [LITE, MANY])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("new", "total", "decodes"),
    [
        ((1,), (5000,), None),
        ((1,) * 70, (*range(1, 71),), None),
        ((1, 1, 90, 33), (700, 3, 400, 33), 2),
        ((1, 300, 1, 140), (700, 300, 1, 140), 1),
        ((129, 1, 70), (129, 1, 71), 0),
        ((129, 1, 70), (129, 1, 71), None),
    ],
)
def test_results_are_near_float64(
    dims: Dims, dtype: torch.dtype, new: tuple, total: tuple, decodes: int | None
) -> None:
    call = make_call(dims, new, total, dtype)
    q, row, weight, batch, spec = call
    pages = batch.pages
    assert pages is not None
    wide = replace(pages, keys=(pages.keys[0].double(),))
    exact = latent_attention.reference(q.double(), row.double(), weight.double(), batch._replace(pages=wide), spec)
    calls = [call] if decodes is None else [with_parts(call, decodes, captured=captured) for captured in (False, True)]
    for given in calls:
        for deterministic in (False, True):
            found = latent_attention.bind("cuda", deterministic=deterministic)(*on_gpu(given)).cpu()
            assert (found - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


def test_long_prompts_are_expanded_beside_decodes() -> None:
    """Several tiles of queries and many blocks of keys; what nobody may read is not a number."""
    new, total = (1, 1, 1100, 517), (900, 3, 1100, 517)
    call = make_call(LITE, new, total, torch.bfloat16)
    q, row, weight, batch, spec = call
    unread = row.clone()
    unread[:2] = float("nan")
    exact = latent_attention.reference(*on_gpu((q.float(), row.float(), weight.float(), widened(batch), spec)))
    for captured in (False, True):
        given = on_gpu(with_parts((q, unread, weight, batch, spec), 2, captured=captured))
        bound = latent_attention.bind("cuda")
        assert bound.choose(*given).name == PROMPTS_EXPANDED
        difference = (bound(*given) - exact).abs().max()
        assert difference <= TOLERANCE[torch.bfloat16] * exact.abs().max()


def test_a_recording_attends_for_prompts_that_begin_and_others() -> None:
    """Only the device knows which do when it is replayed."""
    first = on_gpu(with_parts(make_call(LITE, (1, 130, 69), (40, 130, 69), torch.bfloat16), 1, captured=True))
    other = on_gpu(with_parts(make_call(LITE, (1, 60, 139), (9, 93, 139), torch.bfloat16), 1, captured=True))
    most = max(call[3].pages.tables.shape[1] for call in (first, other))
    first, other = (wide_tables(call, most) for call in (first, other))
    bound, graph = latent_attention.bind("cuda"), torch.cuda.CUDAGraph()
    wanted = [bound(*call) for call in (first, other)]
    with torch.cuda.graph(graph):
        found = bound(*first)
    for call, expected in zip((first, other), wanted, strict=True):
        for held, own in zip(tensors_of(first), tensors_of(call), strict=True):
            held[: len(own)] = own
        graph.replay()
        assert torch.equal(found, expected)


def widened(batch: Sequences) -> Sequences:
    assert batch.pages is not None
    return batch._replace(pages=replace(batch.pages, keys=(batch.pages.keys[0].float(),)))


def wide_tables(call: Call, most: int) -> Call:
    """With tables and pools of one size, as a CUDA graph has them."""
    q, row, weight, batch, spec = call
    pages = batch.pages
    assert pages is not None
    tables = torch.zeros(len(pages.tables), most, dtype=torch.int32, device="cuda")
    tables[:, : pages.tables.shape[1]] = pages.tables
    pool = torch.zeros(len(pages.tables) * most, *pages.keys[0].shape[1:], dtype=q.dtype, device="cuda")
    pool[: len(pages.keys[0])] = pages.keys[0]
    return q, row, weight, batch._replace(pages=replace(pages, tables=tables, keys=(pool,))), spec


def tensors_of(call: Call) -> list[torch.Tensor]:
    """What differs between two steps that replay one CUDA graph."""
    q, row, weight, batch, _ = call
    pages = batch.pages
    assert pages is not None
    assert pages.parts is not None
    parts = pages.parts.decode_lengths, pages.parts.starts, pages.parts.bounds
    return [q, row, weight, batch.offsets, pages.keys[0], pages.tables, pages.lengths, *parts]


def test_bits_depend_on_the_sequence_alone() -> None:
    attend = latent_attention.bind("cuda", deterministic=True)
    call = on_gpu(make_call(LITE, (300, 9), (300, 140), torch.bfloat16))
    q, row, weight, batch, spec = call
    pages = batch.pages
    assert pages is not None
    wanted = attend(*call)
    for first, last in ((0, 7), (7, 300), (299, 300)):
        lengths, offsets = (torch.tensor(x, dtype=torch.int32).cuda() for x in ([last], [0, last - first]))
        step = Sequences(offsets, last - first, replace(pages, tables=pages.tables[:1], lengths=lengths))
        assert torch.equal(attend(q[first:last], row[first:last], weight, step, spec), wanted[first:last])


def test_a_step_of_many_tokens_is_as_its_halves() -> None:
    """More tiles than a second dimension of programs has, and more elements than 32 bits count."""
    dims, new = Dims(heads=64, nope=8, rope=8, rank=512, value=8), (64,) * 1041
    q, row, weight, batch, spec = on_gpu(make_call(dims, new, new, torch.bfloat16))
    pages = batch.pages
    assert pages is not None
    assert (dims.heads - 1) * len(q) * dims.rank > 1 << 31
    attend = latent_attention.bind("cuda")
    found = attend(q, row, weight, batch, spec)
    for first, last in ((0, 520), (520, 1041)):
        tokens = slice(64 * first, 64 * last)
        offsets = batch.offsets[first : last + 1] - 64 * first
        kept = replace(pages, tables=pages.tables[first:last], lengths=pages.lengths[first:last])
        half = attend(q[tokens], row[tokens], weight, Sequences(offsets, 64, kept), spec)
        assert (found[tokens] - half).abs().max() <= TOLERANCE[torch.bfloat16] * half.abs().max()
