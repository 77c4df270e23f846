"""Rows on their way to the ranks that hold their experts, each at most once to a rank, and back, as operations of a
graph.

`strata.comm.experts.rows` brings all rows to all ranks, n - 1 of each. A token of k choices needs at most k ranks,
fewer where several of its experts lie on one, so with many ranks most of that is for nobody. How many rows travel
follows from their choices, so the host waits once for the device in every call, and no CUDA graph can hold it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.comm import collectives
from strata.comm.experts.rows import combine_rows, dispatch_rows
from strata.comm.mesh import Axis
from strata.comm.operations import Along, by_library, live
from strata.hardware.roofline import Cost, Workload
from strata.kernels.moe.combine import take_rows
from strata.kernels.moe.local_order import Order, local_numbers, local_order, order_kernels
from strata.kernels.op import ATEN, NCCL, operation

# Of messages of one mixture, there and back: what they take longer at 64 MiB, a quarter of a millisecond between H200
# by 80 % of the link's rate, is more than the host's wait and three small messages. Estimated, not measured.
_MIN_SAVED = 64 << 20
# Messages to the ranks: how many rows come, the rows, weights and numbers of their experts.
_MESSAGES = 4


class Journey(NamedTuple):
    """Which of this rank's rows go where. order: of the rows by rank, those to one in the order of tokens. sent,
    received: how many go to and come from each rank. products: of a row that arrives and an expert here."""

    order: Order
    sent: list[int]
    received: list[int]
    products: int


def journey(ranks_of: Tensor, axis: Axis) -> Journey:
    """ranks_of: [tokens, per_token], the rank that has the expert of each choice, -1 where it is of none. Ranks may
    have different numbers of tokens. Waits for the device and the other ranks."""
    ranks = torch.arange(axis.size, dtype=torch.int32, device=ranks_of.device)
    lies = ranks_of[..., None] == ranks
    goes = lies.any(1)
    # [ranks, 2]: rows that go to each rank, and products of a row and an expert that it is to make of them.
    counts = torch.stack([goes.sum(0), lies.sum((0, 1))], 1)
    pending = collectives.start_all_to_all(counts, axis)
    order = local_order(torch.where(goes, ranks, -1), 0, axis.size)
    sent, received, products = torch.cat([counts[:, :1], pending.wait()], 1).t().tolist()
    return Journey(order.with_rows(sum(sent)), sent, received, sum(products))


class Arrived(NamedTuple):
    """Rows that came to this rank, with what is known of their journey.

    rows: [arrived, hidden], those of the first rank first. weights: [arrived, per_token]. numbers: [arrived, per_token]
    int32, which of this rank's experts each choice goes to; -1: another's. products: how many are not -1.
    source, inverse: of this rank's own rows, as in `Order`, [sent] and [tokens, ranks]. sent, received: see `Journey`.
    """

    rows: Tensor
    weights: Tensor
    numbers: Tensor
    products: int
    source: Tensor
    inverse: Tensor
    sent: list[int]
    received: list[int]


def slot_span(slots: int, ranks: int, index: int) -> tuple[int, int]:
    """First and end of the slots for experts that a rank has; they differ by one at most."""
    return slots * index // ranks, slots * (index + 1) // ranks


def reach(slots: int, ranks: int, per_token: int) -> list[float]:
    """For each rank how likely it has one of the `per_token` slots that a token chooses, all as likely: of E slots, h
    of them the rank's, 1 - C(E - h, k) / C(E, k)."""
    held = [end - first for first, end in (slot_span(slots, ranks, index) for index in range(ranks))]
    return [1 - math.comb(slots - own, per_token) / math.comb(slots, per_token) for own in held]


class SendCall(NamedTuple):
    """The operands of `send_rows`.

    x: [tokens, hidden], weights and chosen: [tokens, per_token], of this rank alone; chosen of experts. rank: this
    one's number. slots: for experts, of all ranks together, of which each has those of `slot_span`. placement,
    slot_mapping: as `local_experts` has them, by the token's place among the rank's own; padding goes nowhere.
    """

    x: Tensor
    along: Along | Axis
    weights: Tensor
    chosen: Tensor
    rank: int
    slots: int
    placement: Tensor | None = None
    slot_mapping: Tensor | None = None

    @property
    def expected(self) -> tuple[list[int], list[int]]:
        """How many rows go to each rank and come from each, with choices that fall evenly on all slots."""
        likely, tokens = reach(self.slots, self.along.size, self.chosen.shape[1]), len(self.x)
        return [round(tokens * one) for one in likely], [round(tokens * likely[self.rank])] * self.along.size


def _arrived(call: SendCall) -> Arrived:
    x, along, weights, chosen, index, slots = call[:6]
    sent, received = call.expected
    first, end = slot_span(slots, along.size, index)

    def made(kind: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return kind.new_empty(shape, dtype=dtype or kind.dtype, device="meta")

    return Arrived(
        made(x, sum(received), x.shape[1]),
        made(weights, sum(received), weights.shape[1]),
        made(chosen, sum(received), chosen.shape[1], dtype=torch.int32),
        round(chosen.numel() * along.size * (end - first) / slots),
        made(chosen, sum(sent), dtype=torch.int64),
        made(chosen, len(x), along.size, dtype=torch.int64),
        sent,
        received,
    )


def _send_cost(call: SendCall, *, workload: Workload) -> Cost:
    """A rank's own rows go over no link."""
    x, along, weights, chosen, index = call[:5]
    sent, received = call.expected
    row = sum(one.shape[1] * one.itemsize for one in (x, weights)) + 4 * chosen.shape[1]
    counts = 2 * 8 * (along.size - 1)
    over_links = (sum(sent) - sent[index]) * row + counts
    return Cost(
        read=x.nbytes + weights.nbytes + chosen.nbytes + sum(sent) * row,
        written=(sum(sent) + sum(received)) * row,
        messages=_MESSAGES,
        sent=over_links,
    )


@operation(_send_cost, operands=SendCall, meta=_arrived, collective=True)
def send_rows(call: SendCall) -> Arrived:
    """Each rank's rows to the ranks that have experts of theirs, with weights and numbers of these."""
    x, along, weights, chosen, _, slots, placement, slot_mapping = call
    axis = live(along)
    numbers = local_numbers(chosen, 0, slots, placement, slot_mapping).int()
    # The rank whose span has a slot; -1 of -1.
    ranks_of = torch.div((numbers + 1) * axis.size - 1, slots, rounding_mode="floor")
    known = journey(ranks_of, axis)

    def on_its_ranks(given: Tensor) -> Tensor:
        return collectives.start_all_to_all(take_rows(given, known.order), axis, known.sent, known.received).wait()

    # The rows first: the longest message gives the host time to ask for what follows.
    rows, scales = on_its_ranks(x), on_its_ranks(weights)
    first, end = slot_span(slots, axis.size, axis.index)
    own = on_its_ranks(numbers) - first
    own.masked_fill_((own < 0) | (own >= end - first), -1)
    order = known.order
    return Arrived(rows, scales, own, known.products, order.source, order.inverse, known.sent, known.received)


def _return_cost(
    rows: Tensor, along: Along | Axis, sent: list[int], received: list[int], *, workload: Workload
) -> Cost:
    row = rows.shape[1] * rows.itemsize
    over_links = rows.nbytes * (along.size - 1) // along.size  # as many are for each rank
    return Cost(read=rows.nbytes, written=sum(sent) * row, messages=1, sent=over_links)


def _returned(rows: Tensor, along: Along | Axis, sent: list[int], received: list[int]) -> Tensor:
    return rows.new_empty((sum(sent), rows.shape[1]), device="meta")


@operation(_return_cost, meta=_returned, collective=True)
def return_rows(rows: Tensor, along: Along | Axis, sent: list[int], received: list[int]) -> Tensor:
    """What became of the rows that `send_rows` brought, [arrived, hidden], goes back, in the order in which they were
    sent: [sent, hidden]. sent, received: of that journey.

    `combine` adds up what the ranks made of a token, in their order, in float32.
    """
    return collectives.start_all_to_all(rows, live(along), received, sent).wait()


def _send_kernels(call: SendCall) -> tuple[Any, ...]:
    goes = call.chosen.new_empty((len(call.chosen), call.along.size), device="meta")
    return ATEN, NCCL, *order_kernels(goes), ATEN, NCCL, ATEN, NCCL, ATEN, NCCL, ATEN


by_library(send_rows, kernels=_send_kernels)
by_library(return_rows)


def exchange_tokens(width: int, dtype: torch.dtype, ranks: int, slots: int, per_token: int) -> int | None:
    """From how many tokens of a rank on rows of hidden states [width] should travel by `send_rows` and `return_rows`
    rather than by `dispatch_rows` and `combine_rows`: where that saves enough bytes. None: never."""
    tokens, along, none = 1 << 16, Along("", ranks), Workload((), ())
    x = torch.empty(tokens, width, dtype=dtype, device="meta")
    weights = torch.empty(tokens, per_token, device="meta")
    chosen = weights.to(torch.int64)
    everywhere = dispatch_rows.meta(x, along)
    there = dispatch_rows.cost(x, along, workload=none) + combine_rows.cost(everywhere, along, workload=none)
    arrived = send_rows.meta(x, along, weights, chosen, 0, slots)
    found = send_rows.cost(x, along, weights, chosen, 0, slots, workload=none)
    found += return_rows.cost(arrived.rows, along, arrived.sent, arrived.received, workload=none)
    saved = (there.sent - found.sent) / tokens
    return math.ceil(_MIN_SAVED / saved) if saved > 0 else None
