"""Kernels by which ranks exchange words through symmetric memory: all get those of all, or sums of theirs come back.

They speak as `strata.kernels.collective.all_reduce` does in one shot, in the same regions, and count the same calls.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.collective.all_reduce import (
    PACKETS,
    addresses,
    as_words,
    inbox_of,
    joined,
    received,
    received_sum,
    region_of,
    send_packets,
    start_early,
)
from strata.kernels.triton_import import HAS_TRITON, jit, tl

_PACKETS = tl.constexpr(PACKETS) if HAS_TRITON else PACKETS


@partial(jit, unspecialized=("rank",))
def gather_rows_kernel(
    x,
    result,
    inbox,
    peers,
    counters,
    words,
    part,
    rank,
    WORLD: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [words / BLOCK]. x [words / part, part] of 4 bytes; result [words / part, WORLD, part], all ranks' parts
    of each row side by side. With parts of all words these are one rank's after another's."""
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    at = program * BLOCK + lane
    boxes = addresses(peers, WORLD)
    start_early(EARLY)
    epoch = tl.load(counters + program) + 1
    given = tl.load(as_words(x) + at, mask=at < words, other=0)
    region = region_of(program, epoch, WORLD)
    send_packets(given, lane, at < words, boxes, rank, epoch, region + rank * _PACKETS, WORLD)
    own = tl.multiple_of(inbox.to(tl.pointer_type(tl.int64), bitcast=True), 16) + region
    place = at // part * (WORLD * part) + at % part
    for source in range(WORLD):
        found = received(own + source * _PACKETS, lane, at < words, epoch)
        tl.store(as_words(result) + source * part + place, found, mask=at < words)
    tl.store(counters + program, epoch)


@partial(jit, unspecialized=("rank",))
def scatter_sums_kernel(
    x,
    result,
    inbox,
    peers,
    counters,
    words,
    rank,
    WORLD: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [words / BLOCK]. x [WORLD * words] of 4 bytes, a part for each rank; result [words], the sum over the
    ranks of what they have for this one."""
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    at = program * BLOCK + lane
    held = at < words
    boxes = addresses(peers, WORLD)
    start_early(EARLY)
    epoch = tl.load(counters + program) + 1
    region = region_of(program, epoch, WORLD)
    for step in range(1, WORLD + 1):
        peer = (rank + step) % WORLD
        given = tl.load(as_words(x) + peer * words + at, mask=held, other=0)
        packets = (given.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
        box = tl.multiple_of(inbox_of(boxes, peer, WORLD).to(tl.pointer_type(tl.int64)), 16)
        tl.store(box + region + rank * _PACKETS + lane, packets, mask=held)
    dtype: tl.constexpr = x.dtype.element_ty
    low, high = received_sum(lane, held, epoch, inbox, region, WORLD, BLOCK, dtype)
    tl.store(counters + program, epoch)
    tl.store(as_words(result) + at, joined(low, high, dtype), mask=held)
