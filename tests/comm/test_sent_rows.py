"""Rows that go to the ranks of their experts and back, over gloo: what one process makes of them, and what travels."""

from __future__ import annotations

from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from strata.comm.experts.rows import combine_rows, dispatch_rows
from strata.comm.experts.sent_rows import exchange_tokens, reach, return_rows, send_rows, slot_span
from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import Along
from strata.hardware.roofline import Workload
from strata.kernels.moe.combine import combine
from strata.kernels.moe.experts import experts
from strata.kernels.op import NCCL
from tests.parallel.ranks import relative_error, run_ranks

HIDDEN, WIDTH, PER_TOKEN = 6, 5, 3
NOTHING = Workload((), ())


class Case(NamedTuple):
    """count: experts. slots: for them and their copies. tokens: of each rank; padding: how many of its last are none.
    taste: of the first experts of which all tokens want, 0: any."""

    count: int
    slots: int
    tokens: int
    padding: list[int]
    taste: int = 0


def cases(ranks: int) -> dict[str, Case]:
    none = [0] * ranks
    return {
        "any": Case(3 * ranks, 3 * ranks, 11, none),
        "slots that ranks divide unevenly": Case(3 * ranks + 2, 3 * ranks + 2, 7, none),
        "all to the experts of one rank": Case(3 * ranks, 3 * ranks, 9, none, PER_TOKEN),
        "copies that take turns": Case(2 * ranks + 1, 3 * ranks, 13, none),
        "padding, and ranks with nothing else": Case(3 * ranks, 3 * ranks, 8, [0, 8] + [3] * (ranks - 2)),
        "no tokens anywhere": Case(3 * ranks, 3 * ranks, 4, [4] * ranks),
        "a token": Case(3 * ranks, 3 * ranks, 1, none),
    }


def tokens_of(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a rank: rows, the weights and numbers of their experts, and slots, -1 for padding."""
    generator = torch.Generator().manual_seed(17 + rank)
    x = torch.randn(case.tokens, HIDDEN, generator=generator)
    scores = torch.rand(case.tokens, case.count, generator=generator)
    scores[:, : case.taste] += 9
    weights, chosen = scores.topk(PER_TOKEN)
    mapping = torch.arange(case.tokens, dtype=torch.int32)
    mapping[case.tokens - case.padding[rank] :] = -1
    return x, weights, chosen, mapping


def matrices(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(case.count, 2 * WIDTH, HIDDEN, generator=generator),
        torch.randn(case.count, HIDDEN, WIDTH, generator=generator),
    )


def turns_of(case: Case) -> Tensor:
    """The first experts lie in two slots, and take turns."""
    turns = torch.arange(case.count, dtype=torch.int32)[:, None].repeat(1, 2)
    more = case.slots - case.count
    turns[:more, 1] = torch.arange(case.count, case.slots, dtype=torch.int32)
    return turns


def there_and_back(axis: Axis, case: Case) -> dict[str, Any]:
    gate_up, down = matrices(case)
    x, weights, chosen, mapping = tokens_of(case, axis.index)
    wanted = experts.reference(x, weights, chosen, gate_up, down)
    wanted[mapping < 0] = 0
    first, end = slot_span(case.slots, axis.size, axis.index)
    held = [slot if slot < case.count else slot - case.count for slot in range(first, end)]
    turns = turns_of(case) if case.slots > case.count else None
    arrived = send_rows(x, axis, weights, chosen, axis.index, case.slots, turns, mapping)
    made = experts(arrived.rows, arrived.weights, arrived.numbers, gate_up[held], down[held], arrived.products)
    back = return_rows(made, axis, arrived.sent, arrived.received)
    found = combine(back, arrived.source, arrived.inverse, None)

    # By each token's slots: the ranks that it goes to, once each.
    slots = chosen if turns is None else turns[chosen, torch.arange(case.tokens)[:, None] % 2].long()
    spans = [slot_span(case.slots, axis.size, rank) for rank in range(axis.size)]
    due = [0] * axis.size
    for token, own in zip(mapping.tolist(), slots.tolist(), strict=True):
        for rank, (begin, stop) in enumerate(spans):
            due[rank] += token >= 0 and any(begin <= slot < stop for slot in own)
    products = int((arrived.numbers >= 0).sum())
    return {
        "error": relative_error(found, wanted) if wanted.any() else float(found.abs().max()),
        "sent": arrived.sent,
        "due": due,
        "came": [len(arrived.rows), sum(arrived.received)],
        "products": [arrived.products, products],
    }


def on_ranks(world: World, folder: Path) -> dict[str, Any]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    return {name: there_and_back(axis, case) for name, case in cases(world.size).items()}


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_rows_become_what_one_process_makes_of_them_and_travel_once(ranks: int, tmp_path: Path) -> None:
    found = run_ranks(on_ranks, ranks, tmp_path)
    for name, case in cases(ranks).items():
        total = 0
        for rank, one in enumerate(run[name] for run in found):
            assert one["error"] < 1e-5, (name, rank)
            assert one["sent"] == one["due"], (name, rank)
            assert one["came"][0] == one["came"][1] == sum(run[name]["sent"][rank] for run in found)
            assert one["products"][0] == one["products"][1]
            total += one["products"][0]
        assert total == PER_TOKEN * sum(case.tokens - padding for padding in case.padding)
    if ranks > 2:
        everyone_asks = [run["all to the experts of one rank"]["came"][0] for run in found]
        assert everyone_asks == [9 * ranks] + [0] * (ranks - 1)


def test_how_many_ranks_a_token_reaches() -> None:
    # Of 28 pairs of eight experts, 15 leave out the two of a rank.
    assert reach(8, 4, 2) == pytest.approx([13 / 28] * 4)
    # Of ten pairs of five, three leave out the first two, and one the last three.
    assert reach(5, 2, 2) == pytest.approx([0.7, 0.9])
    assert reach(128, 16, 8)[0] == pytest.approx(1 - comb(120, 8) / comb(128, 8))
    # More choices than others hold.
    assert reach(4, 2, 3) == [1.0, 1.0]
    # All choices have a rank: of a token's products, each rank makes as many as it has slots.
    assert sum(reach(64, 64, 6)) == pytest.approx(6)


def test_what_travels_is_counted_by_hand() -> None:
    """28 tokens of two of eight experts, which four ranks have: 13 of them go to each."""
    x = torch.empty(28, 16, dtype=torch.bfloat16, device="meta")
    weights, chosen = torch.empty(28, 2, device="meta"), torch.empty(28, 2, dtype=torch.int64, device="meta")
    along = Along("tp", 4)
    given = x, along, weights, chosen, 1, 8
    arrived = send_rows.meta(*given)
    assert (arrived.sent, arrived.received) == ([13] * 4, [13] * 4)
    assert arrived.rows.shape == (52, 16)
    assert arrived.numbers.shape == arrived.weights.shape == (52, 2)
    assert arrived.inverse.shape == (28, 4)
    assert len(arrived.source) == 52
    assert arrived.products == 28 * 2 * 4 // 4
    row = 16 * 2 + 2 * 4 + 2 * 4  # bytes of hidden state, weights and numbers
    cost = send_rows.cost(*given, workload=NOTHING)
    assert (cost.sent, cost.messages) == (3 * 13 * row + 3 * 16, 4)
    assert (cost.read, cost.written) == (28 * (16 * 2 + 2 * 4 + 2 * 8) + 52 * row, 104 * row)
    back = return_rows.cost(arrived.rows, along, arrived.sent, arrived.received, workload=NOTHING)
    assert (back.sent, back.messages) == (3 * 13 * 32, 1)
    assert return_rows.meta(arrived.rows, along, arrived.sent, arrived.received).shape == (52, 16)
    whole = dispatch_rows.cost(x, along, workload=NOTHING).sent
    assert whole == combine_rows.cost(x.new_empty(112, 16), along, workload=NOTHING).sent == 3 * 28 * 32


def test_rows_are_exchanged_where_that_saves_a_quarter_of_a_millisecond() -> None:
    # Of 8 ranks a token of 30B-A3B needs 4.67 of 7 others: 2.33 rows of 4 KiB there and back, less 64 bytes for each
    # row that goes.
    others = 7 * (1 - comb(112, 8) / comb(128, 8))
    saved = 2 * (7 - others) * 4096 - others * 64
    assert exchange_tokens(2048, torch.bfloat16, 8, 128, 8) == pytest.approx((64 << 20) / saved, rel=1e-3)
    assert exchange_tokens(2048, torch.bfloat16, 2, 128, 8) is None
    assert exchange_tokens(2048, torch.bfloat16, 1, 128, 8) is None
    found = [exchange_tokens(7168, torch.bfloat16, ranks, 256, 8) for ranks in (4, 8, 16, 32, 64)]
    assert None not in found
    assert found == sorted(found, reverse=True)  # type: ignore[type-var]
    assert 8192 < (found[0] or 0) < 8500


def test_what_waits_for_the_device_names_its_messages() -> None:
    x = torch.empty(4, 8, device="meta")
    weights, chosen = torch.empty(4, 2, device="meta"), torch.empty(4, 2, dtype=torch.int64, device="meta")
    kernels = send_rows.bind("cuda").launches(x, Along("tp", 2), weights, chosen, 0, 4)
    assert kernels.count(NCCL) == 4
