"""Kernels by which ranks exchange rows through symmetric memory: all get those of all, or sums of theirs come back.

They speak as `strata.kernels.collective.all_reduce` does in one shot, in the same regions, and count the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from strata.kernels.collective.all_reduce import (
    ONE_SHOT_TILES,
    PACKETS,
    PROGRAMS,
    addresses,
    as_words,
    high_half,
    inbox_of,
    joined,
    low_half,
    received,
    send_packets,
    start_early,
)
from strata.kernels.compile_case import CompileCase, by_type
from strata.kernels.triton_import import HAS_TRITON, jit, tl

_PROGRAMS, _PACKETS = (tl.constexpr(number) if HAS_TRITON else number for number in (PROGRAMS, PACKETS))


@partial(jit, unspecialized=("rank",))
def gather_rows_kernel(
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
    """Programs [words / BLOCK]. x [words] of 4 bytes; result [WORLD * words], the words of one rank after another's."""
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    at = program * BLOCK + lane
    boxes = addresses(peers, WORLD)
    start_early(EARLY)
    epoch = tl.load(counters + program) + 1
    given = tl.load(as_words(x) + at, mask=at < words, other=0)
    region = ((epoch & 1) * _PROGRAMS + program) * (WORLD * _PACKETS)
    send_packets(given, lane, at < words, boxes, rank, epoch, region + rank * _PACKETS, WORLD)
    own = tl.multiple_of(inbox.to(tl.pointer_type(tl.int64), bitcast=True), 16) + region
    for source in range(WORLD):
        found = received(own + source * _PACKETS, lane, at < words, epoch)
        tl.store(as_words(result) + source * words + at, found, mask=at < words)
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
    region = ((epoch & 1) * _PROGRAMS + program) * (WORLD * _PACKETS)
    for step in range(1, WORLD + 1):
        peer = (rank + step) % WORLD
        given = tl.load(as_words(x) + peer * words + at, mask=held, other=0)
        packets = (given.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
        box = tl.multiple_of(inbox_of(boxes, peer, WORLD).to(tl.pointer_type(tl.int64)), 16)
        tl.store(box + region + rank * _PACKETS + lane, packets, mask=held)
    dtype: tl.constexpr = x.dtype.element_ty
    low = tl.zeros([BLOCK], tl.float32)
    high = low
    own = tl.multiple_of(inbox.to(tl.pointer_type(tl.int64), bitcast=True), 16) + region
    for source in range(WORLD):
        found = received(own + source * _PACKETS, lane, held, epoch)
        low += low_half(found, dtype)
        high += high_half(found, dtype)
    tl.store(counters + program, epoch)
    tl.store(as_words(result) + at, joined(low, high, dtype), mask=held)


def compile_cases() -> list[CompileCase]:
    return [case for dtype, ranks in (("bf16", 2), ("fp32", 2), ("bf16", 8)) for case in _cases(dtype, ranks)]


def _cases(dtype: str, ranks: int) -> Iterator[CompileCase]:
    types = {"*i32:16": "inbox counters", "*i64:16": "peers", "i32": "rank", "i32:16": "words"}
    signature = by_type(types | {f"*{dtype}:16": "x result"})
    contained = ("ld.volatile.global.v2.b64", "st.global.v2.b64", "griddepcontrol.wait")
    for kernel in (gather_rows_kernel, scatter_sums_kernel):
        for block, warps in ONE_SHOT_TILES:
            name = f"{kernel.__name__} of {block} words, {dtype}, {ranks} ranks"
            constants = {"WORLD": ranks, "EARLY": True, "BLOCK": block}
            yield CompileCase(name, kernel, signature, constants, warps, 1, contained)
