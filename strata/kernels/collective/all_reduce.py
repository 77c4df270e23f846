"""Kernels that add up over the ranks of an axis through symmetric memory: what each sends lies in the others' memory.

Small messages go in one shot: a rank writes its numbers into the memory of all, and each adds up what has arrived. A
word of 4 bytes travels in a packet with the number of the call (its epoch), as in NCCL's protocol LL, so what can be
seen has arrived: no flag, no fence. Larger ones go in two shots, which send less: each rank adds up a part and sends
the sum to all; flags tell that numbers have arrived.

Programs of one index on all ranks speak with one another alone. Each has a region in every inbox, twice: in turns by
epoch, since who writes a region again has heard from its reader in the call between, and so that one has read it. A
program counts its calls itself, in device memory, so a replayed CUDA graph goes on counting. It needs its peers to run
while it waits, so there are no more programs than a device runs at once.

All add up in the order of the ranks in float32 and round once: all ranks have the same bits, those of the reference.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.triton_import import constant, gdc_launch_dependents, gdc_wait, jit, tl

# How many programs may wait at once: less than the multiprocessors of a device.
PROGRAMS = 128
# Words that a program sends to a rank in one shot.
PACKETS = 4096
# Words of the largest message in two shots.
TWO_SHOT_WORDS = 2 << 20
# Words of a program in one shot, and its warps.
ONE_SHOT_TILES = ((1024, 4), (4096, 8))
TWO_SHOT_TILE = (2048, 8)
_PROGRAMS, _PACKETS, _TWO_SHOT_WORDS = map(constant, (PROGRAMS, PACKETS, TWO_SHOT_WORDS))


@jit
def as_words(pointer):
    """A pointer to numbers of 2 or 4 bytes as one to words of 4."""
    return tl.multiple_of(pointer.to(tl.pointer_type(tl.int32), bitcast=True), 16)


@jit
def low_half(words, DTYPE: tl.constexpr):
    """The first number of each word in float32; the only one of 4 bytes."""
    return words.to(tl.float32, bitcast=True) if DTYPE.primitive_bitwidth == 32 else _number(words & 0xFFFF, DTYPE)


@jit
def high_half(words, DTYPE: tl.constexpr):
    """The second number of each word in float32; zeros where there is none."""
    return tl.zeros_like(words).to(tl.float32) if DTYPE.primitive_bitwidth == 32 else _number(words >> 16, DTYPE)


@jit
def joined(low, high, DTYPE: tl.constexpr):
    """The words of numbers in float32, rounded to DTYPE."""
    return low.to(tl.int32, bitcast=True) if DTYPE.primitive_bitwidth == 32 else _pairs(low, high, DTYPE)


@jit
def _pairs(low, high, DTYPE: tl.constexpr):
    return (_bits(low, DTYPE) & 0xFFFF) | (_bits(high, DTYPE) << 16)


@jit
def _number(bits, DTYPE: tl.constexpr):
    return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@jit
def _bits(number, DTYPE: tl.constexpr):
    return number.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)


@jit
def addresses(peers, WORLD: tl.constexpr):
    """The addresses of all inboxes, loaded once, before they are needed."""
    return tl.load(peers + tl.arange(0, WORLD))


@jit
def inbox_of(boxes, peer, WORLD: tl.constexpr):
    """One of the addresses."""
    return tl.sum(tl.where(tl.arange(0, WORLD) == peer, boxes, 0), 0)


@jit
def start_early(EARLY: tl.constexpr):
    """Wait for the kernel ahead, which this one was launched beside, and let the one behind come beside this one.

    What precedes it may read what the step does not write. All programs run when the last of them is here, so the
    kernel behind takes no room from one that others wait for.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@jit
def send_packets(words, lane, held, boxes, rank, epoch, place, WORLD: tl.constexpr):
    """Words beside their epoch into the region `place` of all inboxes, the next rank's first."""
    packets = (words.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
    for step in range(1, WORLD + 1):
        box = inbox_of(boxes, (rank + step) % WORLD, WORLD).to(tl.pointer_type(tl.int64))
        tl.store(tl.multiple_of(box, 16) + place + lane, packets, mask=held)


@jit
def received(inbox, lane, held, epoch):
    """The words of a region once all have arrived."""
    packets = tl.load(inbox + lane, mask=held, other=0, volatile=True)
    while tl.max(tl.where(held & ((packets >> 32).to(tl.int32) != epoch), 1, 0), 0) > 0:
        packets = tl.load(inbox + lane, mask=held, other=0, volatile=True)
    return packets.to(tl.int32)


@jit
def region_of(program, epoch, WORLD: tl.constexpr):
    """Where the region of a program begins in all inboxes, in packets; PACKETS of each rank lie there."""
    return ((epoch & 1) * _PROGRAMS + program) * (WORLD * _PACKETS)


@jit
def received_sum(lane, held, epoch, inbox, region, WORLD: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of what all ranks send into a region: the words' first numbers and their second, float32 [BLOCK]."""
    low = tl.zeros([BLOCK], dtype=tl.float32)
    high = low
    own = tl.multiple_of(inbox.to(tl.pointer_type(tl.int64), bitcast=True), 16) + region
    for source in range(WORLD):
        found = received(own + source * _PACKETS, lane, held, epoch)
        low += low_half(found, DTYPE)
        high += high_half(found, DTYPE)
    return low, high


@jit
def _summed(
    words,
    lane,
    held,
    epoch,
    inbox,
    boxes,
    counters,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The sum over the ranks of a program's words, in one shot, as `received_sum` gives it."""
    region = region_of(tl.program_id(0), epoch, WORLD)
    send_packets(words, lane, held, boxes, rank, epoch, region + rank * _PACKETS, WORLD)
    low, high = received_sum(lane, held, epoch, inbox, region, WORLD, BLOCK, DTYPE)
    tl.store(counters + tl.program_id(0), epoch)
    return low, high


@partial(jit, unspecialized=("rank",))
def one_shot_kernel(
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
    SCATTERED: tl.constexpr = False,
):
    """Programs [words / BLOCK]. x, result [words] of 4 bytes; inbox: this rank's; peers [WORLD]: addresses of all.

    SCATTERED: x [WORLD * words] has a part for each rank, and the result is the sum of what all have for this one.
    """
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + lane
    boxes = addresses(peers, WORLD)
    start_early(EARLY)
    epoch = tl.load(counters + tl.program_id(0)) + 1
    dtype: tl.constexpr = x.dtype.element_ty
    if SCATTERED:
        held = at < words
        region = region_of(tl.program_id(0), epoch, WORLD)
        for step in range(1, WORLD + 1):
            peer = (rank + step) % WORLD
            given = tl.load(as_words(x) + peer * words + at, mask=held, other=0)
            packets = (given.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
            box = tl.multiple_of(inbox_of(boxes, peer, WORLD).to(tl.pointer_type(tl.int64)), 16)
            tl.store(box + region + rank * _PACKETS + lane, packets, mask=held)
        low, high = received_sum(lane, held, epoch, inbox, region, WORLD, BLOCK, dtype)
        tl.store(counters + tl.program_id(0), epoch)
    else:
        given = tl.load(as_words(x) + at, mask=at < words, other=0)
        low, high = _summed(given, lane, at < words, epoch, inbox, boxes, counters, rank, WORLD, BLOCK, dtype)
    tl.store(as_words(result) + at, joined(low, high, dtype), mask=at < words)


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
def one_shot_norm_kernel(
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
    words,
    width,
    eps,
    rank,
    WORLD: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [rows]. The sum over the ranks of a row of x [rows, width], plus residual, and the norm of that.

    words: of 4 bytes in a row; strides are counted in them too.
    """
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    held = lane < words
    boxes = addresses(peers, WORLD)
    factor = tl.load(as_words(weight) + lane, mask=held, other=0)
    start_early(EARLY)
    epoch = tl.load(counters + tl.program_id(0)) + 1
    given = tl.load(as_words(x) + row * x_stride + lane, mask=held, other=0)
    dtype: tl.constexpr = x.dtype.element_ty
    # It does not wait for others, so its memory's latency passes beside the messages'.
    others = tl.load(as_words(residual) + row * residual_stride + lane, mask=held, other=0)
    low, high = _summed(given, lane, held, epoch, inbox, boxes, counters, rank, WORLD, BLOCK, dtype)
    store_normed(low, high, others, factor, total, result, row * words + lane, held, width, eps, dtype)


@jit
def store_normed(low, high, others, factor, total, result, place, held, width, eps, DTYPE: tl.constexpr):
    """What one row's sums over the ranks (float32) and the residual's words make: the total, and its norm."""
    low = (low.to(DTYPE).to(tl.float32) + low_half(others, DTYPE)).to(DTYPE).to(tl.float32)
    high = (high.to(DTYPE).to(tl.float32) + high_half(others, DTYPE)).to(DTYPE).to(tl.float32)
    tl.store(as_words(total) + place, joined(low, high, DTYPE), mask=held)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / width + eps)
    low = (low * scale).to(DTYPE).to(tl.float32) * low_half(factor, DTYPE)
    high = (high * scale).to(DTYPE).to(tl.float32) * high_half(factor, DTYPE)
    tl.store(as_words(result) + place, joined(low, high, DTYPE), mask=held)


@jit
def tell(peers, flag, epoch, rank, WORLD: tl.constexpr):
    """All ranks see what this program has written so far once they see its flag."""
    tl.debug_barrier()  # of all threads: one of them speaks for the others
    boxes = tl.load(peers + tl.arange(0, WORLD)).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(boxes + flag + rank, epoch, sem="release", scope="sys")


@jit
def hear(flags, epoch, WORLD: tl.constexpr):
    """Wait for the flags of all ranks. One that is further on has told more already."""
    places = flags + tl.arange(0, WORLD)
    seen = _acquired(places)
    while tl.min(seen - epoch, 0) < 0:
        seen = _acquired(places)
    tl.debug_barrier()


@jit
def _acquired(places):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.s32 $0, [$1];", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@partial(jit, unspecialized=("rank",))
def two_shot_kernel(
    x,
    result,
    inbox,
    peers,
    counters,
    words,
    span,
    first,
    second,
    flags,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs that add up `span` words of each rank's part. first, second, flags: where they begin in an inbox.

    A part is `span` words a program. Of each part the programs of all ranks send theirs to its rank.
    """
    program = tl.program_id(0)
    part = tl.num_programs(0) * span
    epoch = tl.load(counters + program) + 1
    dtype: tl.constexpr = x.dtype.element_ty
    room: tl.constexpr = _TWO_SHOT_WORDS // WORLD // _PROGRAMS
    turn = (epoch & 1) * WORLD
    own = tl.multiple_of(inbox, 16)
    sent = ((turn + rank) * _PROGRAMS + program) * room
    for step in range(WORLD):
        peer = (rank + 1 + step) % WORLD
        box = tl.multiple_of(tl.load(peers + peer).to(tl.pointer_type(tl.int32)), 16) + first + sent
        start = peer * part + program * span
        for done in range(0, span, BLOCK):
            lane = done + tl.arange(0, BLOCK)
            held = (lane < span) & (start + lane < words)
            tl.store(box + lane, tl.load(as_words(x) + start + lane, mask=held, other=0), mask=held)
    tell(peers, flags + program * WORLD, epoch, rank, WORLD)
    hear(own + flags + program * WORLD, epoch, WORLD)
    start = rank * part + program * span
    for done in range(0, span, BLOCK):
        lane = done + tl.arange(0, BLOCK)
        held = (lane < span) & (start + lane < words)
        low = tl.zeros([BLOCK], dtype=tl.float32)
        high = low
        for source in range(WORLD):
            place = own + first + ((turn + source) * _PROGRAMS + program) * room
            found = tl.load(place + lane, mask=held, other=0, volatile=True)
            low += low_half(found, dtype)
            high += high_half(found, dtype)
        added = joined(low, high, dtype)
        tl.store(as_words(result) + start + lane, added, mask=held)
        for step in range(1, WORLD):
            box = tl.load(peers + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
            tl.store(tl.multiple_of(box, 16) + second + sent + lane, added, mask=held)
    tell(peers, flags + (_PROGRAMS + program) * WORLD, epoch, rank, WORLD)
    hear(own + flags + (_PROGRAMS + program) * WORLD, epoch, WORLD)
    for step in range(1, WORLD):
        source = (rank + step) % WORLD
        place = own + second + ((turn + source) * _PROGRAMS + program) * room
        start = source * part + program * span
        for done in range(0, span, BLOCK):
            lane = done + tl.arange(0, BLOCK)
            held = (lane < span) & (start + lane < words)
            found = tl.load(place + lane, mask=held, other=0, volatile=True)
            tl.store(as_words(result) + start + lane, found, mask=held)
    tl.store(counters + program, epoch)


def row_tile(words: int) -> tuple[int, int]:
    """The padded words of a row and the warps that add it up."""
    padded: int = next_power_of_2(words)
    return padded, min(max(padded // 256, 4), 16)


def block_tile(words: int) -> tuple[int, int]:
    """Words of a program and its warps: few of each, so that many multiprocessors send at once."""
    return next((block, warps) for block, warps in ONE_SHOT_TILES if words <= block * PROGRAMS)
