"""What a product sends the moment it has it, and the kernel that adds it up over the ranks and makes the norm.

A product whose columns the ranks add up need not write them to memory for another kernel to send: each of its programs
sends its own as packets into all inboxes (`send_product`, in the kernels of `strata.kernels.linear.small_m_kernels`),
and `one_shot_received_norm_kernel`, launched right behind it, receives. Packets, regions and counters are those of
`one_shot_norm_kernel`: a row has the region and the counter of one program, that of its number. So to the other ranks
it is all the same who sends a row, and what `strata.kernels.collective.all_reduce` says of regions goes on to hold:

- The epoch of a row is its counter plus one, in the product and in the receiver. The receiver alone writes the counter,
  once the packets of all ranks are there, its own rank's among them, and each of the product's programs has read it
  before it sends: none reads what is written here.
- A product sends only after all kernels ahead of it have ended, and so the one that received the row the last time. Who
  writes a region again has therefore heard, in the call between, from a rank whose reader of that region had ended.

The receiver starts beside the product and does not wait for its end before it looks for packets. That is right because

- the product lets it start after its own wait, once all its programs run: they need nothing of the receiver, which has
  as many programs as rows, so those that wait keep nobody from sending;
- what it reads (residual, counter, weights of the norm) was written before the product began, so before the end of that
  wait; it reads past the nearest cache, which is only sure to be current behind a wait of its own;
- what it writes (sum, norm, counter) it writes when the product's programs have read all they read, since these have
  sent what came of it.

It ends with the wait, when the product has long ended as a rule, so that whoever waits for its end may go on to rely on
all kernels ahead of it having ended. The kernel behind it may start at once: until its own wait it reads nothing that a
step writes.
"""

from __future__ import annotations

from strata.kernels.collective.all_reduce import (
    PACKETS,
    as_words,
    joined,
    received_sum,
    region_of,
    send_packets,
    store_normed,
)
from strata.kernels.triton_import import constant, gdc_launch_dependents, gdc_wait, jit, tl

_PACKETS = constant(PACKETS)


@jit
def epochs_of(calls, row, rows):
    """The number of the next call of each row [BLOCK_M]; of what is behind the last row any."""
    return tl.load(calls + row, mask=row < rows, other=0) + 1


@jit
def send_product(total, boxes, epochs, tile, row, rows, out, rank, WORLD: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of sums [BLOCK_N, BLOCK_M], columns by rows, in 16 bits, to all ranks: a packet has two columns of a row.

    boxes, epochs [BLOCK_M]: as `addresses` and `epochs_of` give them; tile: its number. out, and so is BLOCK_N: even.
    """
    pairs: tl.constexpr = total.shape[0] // 2
    low, high = tl.split(tl.permute(tl.reshape(total, (pairs, 2, total.shape[1])), (0, 2, 1)))
    word = tile * pairs + tl.arange(0, pairs)
    held = (word < out // 2)[:, None] & (row < rows)[None, :]
    place = region_of(row, epochs, WORLD) + rank * _PACKETS
    words = joined(low, high, DTYPE)
    send_packets(words, word[:, None], held, boxes, rank, epochs[None, :], place[None, :], WORLD)


@jit
def one_shot_received_norm_kernel(
    residual,
    weight,
    total,
    result,
    inbox,
    counters,
    residual_stride,
    words,
    width,
    eps,
    WORLD: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [rows]. As `one_shot_norm_kernel`, of rows [rows, width] that products of all ranks send."""
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    held = lane < words
    if EARLY:
        gdc_launch_dependents()
    epoch = tl.load(counters + program, cache_modifier=".cg") + 1
    row = program.to(tl.int64)
    others = tl.load(as_words(residual) + row * residual_stride + lane, mask=held, other=0, cache_modifier=".cg")
    factor = tl.load(as_words(weight) + lane, mask=held, other=0, cache_modifier=".cg")
    dtype: tl.constexpr = residual.dtype.element_ty
    low, high = received_sum(lane, held, epoch, inbox, region_of(program, epoch, WORLD), WORLD, BLOCK, dtype)
    tl.store(counters + program, epoch)
    store_normed(low, high, others, factor, total, result, row * words + lane, held, width, eps, dtype)
    if EARLY:
        gdc_wait()
