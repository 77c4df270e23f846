"""What ranks add up and the norm behind it in one shot, for messages too large to travel in packets.

As in `strata.kernels.collective.all_reduce`, a rank writes its numbers into the memory of all others, of which each
adds up what has arrived. Here they travel as they are, half the bytes of packets, and a flag tells that all of a
program's rows are there. Against two shots one wait for the others is saved; the more ranks, the more bytes that costs.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.collective.all_reduce import (
    addresses,
    as_words,
    hear,
    high_half,
    inbox_of,
    low_half,
    start_early,
    store_normed,
    tell,
)
from strata.kernels.triton_import import constant, jit, tl

# How many programs may wait at once: two on each multiprocessor of a device, of whose threads they take a quarter.
FLAG_PROGRAMS = 256
# Words of the largest message; a program has an equal part of the room.
FLAG_WORDS = 1 << 20
_PROGRAMS, _ROOM = map(constant, (FLAG_PROGRAMS, FLAG_WORDS // FLAG_PROGRAMS))


@partial(jit, unspecialized=("rank", "rows"))
def flag_norm_kernel(
    x,
    residual,
    weight,
    total,
    result,
    inbox,
    peers,
    counters,
    x_stride,
    residual_stride,
    rows,
    words,
    width,
    first,
    flags,
    eps,
    rank,
    WORLD: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs that take the rows in turn. As `one_shot_norm_kernel`; first, flags: where they begin in an inbox."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    held = lane < words
    dtype: tl.constexpr = x.dtype.element_ty
    boxes = addresses(peers, WORLD)
    factor = tl.load(as_words(weight) + lane, mask=held, other=0)
    start_early(EARLY)
    epoch = tl.load(counters + program) + 1
    turn = first + (epoch & 1) * (WORLD * _PROGRAMS * _ROOM) + program * _ROOM
    own = tl.multiple_of(inbox, 16)
    for row in range(program, rows, programs):
        given = tl.load(as_words(x) + row * x_stride + lane, mask=held, other=0)
        place = turn + rank * (_PROGRAMS * _ROOM) + row // programs * words
        for step in range(1, WORLD):
            box = inbox_of(boxes, (rank + step) % WORLD, WORLD).to(tl.pointer_type(tl.int32))
            tl.store(tl.multiple_of(box, 16) + place + lane, given, mask=held)
    tell(peers, flags + program * WORLD, epoch, rank, WORLD)
    hear(own + flags + program * WORLD, epoch, WORLD)
    for row in range(program, rows, programs):
        others = tl.load(as_words(residual) + row * residual_stride + lane, mask=held, other=0)
        given = tl.load(as_words(x) + row * x_stride + lane, mask=held, other=0)
        low = tl.zeros([BLOCK], dtype=tl.float32)
        high = low
        for source in range(WORLD):
            place = own + turn + source * (_PROGRAMS * _ROOM) + row // programs * words
            found = tl.load(place + lane, mask=held & (source != rank), other=0, volatile=True)
            found = tl.where(source == rank, given, found)
            low += low_half(found, dtype)
            high += high_half(found, dtype)
        store_normed(low, high, others, factor, total, result, row * words + lane, held, width, eps, dtype)
    tl.store(counters + program, epoch)


def fits_inbox(rows: int, words: int) -> bool:
    """Whether the rows of each program fit where the others write them. words: of 4 bytes in a row."""
    return -(-rows // FLAG_PROGRAMS) * words <= FLAG_WORDS // FLAG_PROGRAMS
