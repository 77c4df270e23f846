"""The kernels of latent attention in Triton's interpreter, against the reference: run by `test_interpreted`."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strata.kernels.latent import cuda, expanded_cuda
from strata.kernels.latent.attention import latent_attention
from strata.kernels.latent.dcp import dcp_latent_attention
from strata.kernels.latent.forms import Dims, LatentCall
from strata.kernels.rotary.rope import rope_angles, tail_rope
from strata.kernels.state.latent_write import latent_write

from .cases import Call, by_ranks, make_call, with_parts

DIMS = Dims(heads=5, nope=10, rope=6, rank=24, value=14)
MANY = Dims(heads=19, nope=8, rope=4, rank=16, value=8)
SMALL = Dims(heads=2, nope=10, rope=6, rank=24, value=14)
MAP_NORESERVE = 0x4000  # of Linux


def exactly(call: Call) -> Tensor:
    """The reference in float64."""
    q, row, weight, batch, spec = call
    pages = batch.pages
    assert pages is not None
    wide = pages.__class__((pages.keys[0].double(),), (), pages.tables, pages.lengths, pages.slot_mapping)
    exact: Tensor = latent_attention.reference(
        q.double(), row.double(), weight.double(), batch._replace(pages=wide), spec
    )
    return exact


def check(call: Call) -> None:
    """In float32 it is near; nothing that a launch leaves out may be a number by chance."""
    exact = exactly(call)
    for attend in (cuda.attend, cuda.attend_batch_invariant, expanded_cuda.attend):
        assert (attend(LatentCall(*call)) - exact).abs().max() < 2e-5
    by_kernels = dcp_latent_attention.of_arguments(cuda.attend_dcp)
    for ranks in (1, 2, 3):
        assert (by_ranks(call, ranks, by_kernels) - exact).abs().max() < 2e-5


def test_fixed_bits() -> None:
    """A token's result is the same in a whole prompt, in a chunk of it, and decoded beside others."""
    whole = make_call(DIMS, (19,), (19,))
    q, row, weight, batch, spec = whole
    pages = batch.pages
    assert pages is not None
    wanted = cuda.attend_batch_invariant(LatentCall(*whole))
    for first, last in ((0, 7), (7, 19), (18, 19)):
        part = pages.__class__(
            pages.keys, (), pages.tables, torch.tensor([last], dtype=torch.int32), pages.slot_mapping
        )
        offsets = torch.tensor([0, last - first], dtype=torch.int32)
        step = batch._replace(offsets=offsets, longest=last - first, pages=part)
        found = cuda.attend_batch_invariant(LatentCall(q[first:last], row[first:last], weight, step, spec))
        assert torch.equal(found, wanted[first:last])


def test_what_is_read() -> None:
    """Prompts that begin read the step's rows and no pages, the others pages and no rows of the step."""
    whole = make_call(SMALL, (1, 35, 1, 4), (1, 35, 1, 4))
    exact = exactly(whole)
    q, row, weight, batch, spec = with_parts(whole, 0, captured=False)
    pages = batch.pages
    assert pages is not None
    nothing = torch.full_like(pages.keys[0], float("nan"))
    empty = batch._replace(pages=replace(pages, keys=(nothing,)))
    assert (expanded_cuda.attend(LatentCall(q, row, weight, empty, spec)) - exact).abs().max() < 2e-5
    call = make_call(SMALL, (1, 6, 11, 5), (40, 20, 11, 33))
    exact = exactly(call)
    for captured in (False, True):
        q, row, weight, batch, spec = with_parts(call, 1, captured=captured)
        unread = row.clone()
        unread[:7] = unread[18:] = float("nan")
        assert (expanded_cuda.attend(LatentCall(q, unread, weight, batch, spec)) - exact).abs().max() < 2e-5


def test_rows_that_stay() -> None:
    """Each form's kernel leaves the rows of the other's prompts as they are."""
    call = make_call(SMALL, (5, 34, 7), (20, 34, 7))
    q, row, weight, batch, spec = call
    pages, begun = batch.pages, slice(5, None)
    assert pages is not None
    absorbed = torch.full((len(q), SMALL.heads, SMALL.rank), -7.0)
    cuda.prompts(absorbed, absorbed.clone(), q, batch, pages, spec, SMALL, batch.offsets, None, continued=True)
    assert (absorbed[begun] == -7).all()
    assert (absorbed[:5] != -7).all()
    found = torch.full((len(q), SMALL.heads, SMALL.value), -7.0)
    made = row[:, : SMALL.rank] @ weight.T
    expanded_cuda.expanded_prompts(found, q, made, row, batch, pages, spec, SMALL, batch.offsets, None)
    assert (found[:5] == -7).all()
    assert (found - exactly(call))[begun].abs().max() < 2e-5


def test_padding() -> None:
    """Rows of a sequence of length 0, to which padding belongs, are zeros beside prompts of every kind."""
    for total in ((1, 40, 7), (9, 50, 7)):
        q, row, weight, batch, spec = make_call(SMALL, (1, 40, 7), total)
        pages = batch.pages
        assert pages is not None
        lengths = pages.lengths.clone()
        lengths[2] = 0
        call = q, row, weight, batch._replace(pages=replace(pages, lengths=lengths)), spec
        exact = exactly(call)
        for captured in (False, True):
            given = with_parts(call, 1, captured=captured)
            assert given[3].pages is not None
            assert given[3].pages.parts is not None
            if not captured:  # what the host knows of sequences it does not know of padding
                parts = replace(given[3].pages.parts, begin=total[1] == 40)
                given = (*given[:3], given[3]._replace(pages=replace(given[3].pages, parts=parts)), given[4])
            found = expanded_cuda.attend(LatentCall(*given))
            assert not found[41:].any()
            assert (found - exact).abs().max() < 2e-5


def test_rows() -> None:
    """Both rotations and the write, against what runs on a CPU."""
    on_cuda = (one for one in latent_write.implementations if one.device == "cuda")
    implementations = {one.name: latent_write.of_arguments(one.run) for one in on_cuda}
    rotate = next(one.run for one in tail_rope.implementations if one.name == "triton")
    angles = rope_angles.reference(torch.arange(7, dtype=torch.int32), torch.randn(9, 6))
    for paired in (False, True):
        x = torch.randn(7, 3, 16)
        assert (rotate(x, *angles, paired) - tail_rope.reference(x, *angles, paired)).abs().max() < 1e-6
        call = make_call(DIMS, (1, 6), (9, 6))
        pages = call[3].pages
        assert pages is not None
        slots = pages.slot_mapping.clone()
        slots[2] = -1
        product, weight = torch.randn(7, 40)[:, 5:35], torch.randn(24)
        found = []
        for run in (implementations["triton"], latent_write.reference):
            own = pages.__class__((pages.keys[0].clone(),), (), pages.tables, pages.lengths, slots)
            found.append((run(product, weight, 1e-6, *angles, own, 0, paired), own.keys[0]))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-6, equal_nan=True)


def test_far_heads() -> None:
    """Heads of a long step are so far apart that 32 bits do not count the elements between them. The memory between
    them is never touched."""
    dims = Dims(heads=3, nope=4, rope=2, rank=16, value=4)
    q, _, _, batch, spec = make_call(dims, (1, 3), (5, 7), torch.float16)
    pages = batch.pages
    assert pages is not None
    far, near = 1 << 30, torch.randn(4, dims.heads, dims.rank).half()
    reserved = mmap.mmap(-1, 2 * (2 * far + 128), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    space = torch.frombuffer(reserved, dtype=torch.float16)
    latent, out = (space.as_strided(near.shape, (dims.rank, far, 1), first) for first in (0, 64))
    latent.copy_(near)
    expected = torch.empty_like(near)
    for given, found in ((near, expected), (latent, out)):
        cuda.prompts(found, given, q, batch, pages, spec, dims, batch.offsets, None)
        cuda.decode(found, given, q, pages, pages.lengths[:1], spec, dims)
    assert torch.equal(out, expected)


def parted(dims: Dims, new: tuple[int, ...], total: tuple[int, ...], decodes: int, captured: bool) -> Call:
    return with_parts(make_call(dims, new, total), decodes, captured=captured)


STEPS = [
    make_call(DIMS, (1, 1), (1, 77)),
    make_call(MANY, (1,), (37,)),
    make_call(DIMS, (9, 1, 5), (20, 33, 5)),
    parted(MANY, (1, 1, 3), (40, 9, 20), 2, False),
    parted(DIMS, (1, 1, 5), (40, 9, 20), 2, True),
]
# Longer than a tile of queries, begun before and now, and a prompt of one token.
EXPANDED = [make_call(SMALL, (70, 1, 33), (70, 1, 34))]
EXPANDED += [parted(SMALL, (1, 67, 1, 8), (9, 67, 1, 8), 1, captured) for captured in (False, True)]
EXPANDED += [parted(SMALL, (1, 1, 35, 9), (40, 9, 35, 20), 2, captured) for captured in (False, True)]


@pytest.mark.parametrize("call", STEPS)
def test_every_kernel(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("call", EXPANDED)
def test_expanded_prompts(call: Call) -> None:
    assert (expanded_cuda.attend(LatentCall(*call)) - exactly(call)).abs().max() < 2e-5


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_SPLIT_ROWS", 32)  # so that short sequences are divided
