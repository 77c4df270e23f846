"""Pipeline schedules: every pass once and in order, transfers that never wait forever, bubbles and peaks by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.parallel.schedules import (
    SCHEDULES,
    Action,
    PipelineSchedule,
    StagePass,
    interleaved,
    make_schedule,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from strata.parallel.timeline import Durations, Exchange, peak_saved, programs, simulate

F, B, W, BW = StagePass.FORWARD, StagePass.INPUTS, StagePass.WEIGHTS, StagePass.BACKWARD


def peak_activations(schedule: PipelineSchedule) -> tuple[float, ...]:
    """Of each rank the most micro-batches whose activations it holds at once; one in half of its stages is a half."""
    changes = {F: 1, B: 0, W: -1, BW: -1}
    peaks = (max(accumulate(changes[action.kind] for action in actions)) for actions in schedule.actions)
    return tuple(peak / len(schedule.stages_of(rank)) for rank, peak in enumerate(peaks))


@st.composite
def schedules(draw: st.DrawFn) -> PipelineSchedule:
    name = draw(st.sampled_from([*SCHEDULES, "more chunks"]))
    ranks, micro_batches = draw(st.integers(1, 9)), draw(st.integers(1, 24))
    if name == "more chunks":
        return interleaved(ranks, ranks * draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    if name == "interleaved":
        micro_batches *= ranks
    if name == "zero-bubble-v":
        micro_batches += 2 * ranks - 1
    return make_schedule(name, ranks, micro_batches)


def run_in_lockstep(schedule: PipelineSchedule) -> None:
    """Run the programs of all ranks with the strictest transfers: an exchange starts when all before it on the rank
    have ended, and ends when all its partners are at the same one. What a pass needs must have arrived.
    """
    made = programs(schedule)
    at = [0] * schedule.ranks
    has: set[tuple[int, Action]] = set()  # (rank, what it has)
    last = schedule.stages - 1

    def can_run(rank: int, action: Action) -> bool:
        stage, m = action.stage, action.micro_batch
        if action.kind is F:
            return stage == 0 or (rank, Action(F, stage - 1, m)) in has
        if action.kind is W:
            return (rank, Action(B, stage, m)) in has
        slope = stage == last or any((rank, Action(kind, stage + 1, m)) in has for kind in (B, BW))
        return slope and (rank, Action(F, stage, m)) in has

    def head(rank: int) -> Action | Exchange | None:
        return made[rank][at[rank]] if at[rank] < len(made[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            while isinstance(event := head(rank), Action) and can_run(rank, event):
                has.add((rank, event))
                at[rank] += 1
                moved = True
        # All ranks that an exchange connects, directly or not, must stand at one that has the same transfers.
        for rank in range(schedule.ranks):
            group, waiting = set(), [rank]
            complete = True
            while waiting and complete:
                one = waiting.pop()
                group.add(one)
                event = head(one)
                complete = isinstance(event, Exchange)
                for transfer in event.transfers if isinstance(event, Exchange) else ():
                    peer = transfer.target if transfer.source == one else transfer.source
                    there = head(peer)
                    complete &= isinstance(there, Exchange) and transfer in there.transfers
                    complete &= (transfer.source, transfer.made) in has
                    waiting += [peer] if peer not in group else []
            if complete:
                for one in group:
                    event = head(one)
                    assert isinstance(event, Exchange)
                    directions = [(transfer.source, transfer.target) for transfer in event.transfers]
                    assert len(set(directions)) == len(directions)
                    has |= {(transfer.target, transfer.made) for transfer in event.transfers}
                for one in group:
                    at[one] += 1
                moved = True
    assert at == [len(program) for program in made]


@settings(max_examples=120, deadline=None)
@given(schedules())
def test_every_pass_runs_once_in_order_and_nothing_waits_forever(schedule: PipelineSchedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        for stage in schedule.stages_of(rank):
            for m in range(schedule.micro_batches):
                kinds = [action.kind for action in actions if (action.stage, action.micro_batch) == (stage, m)]
                assert kinds in ([F, BW], [F, B, W])
        assert {action.stage for action in actions} == set(schedule.stages_of(rank))
    run_in_lockstep(schedule)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_no_time_is_shorter_than_its_parts(
    schedule: PipelineSchedule, forward: int, inputs: int, weights: int, transfer: int
) -> None:
    timeline = simulate(schedule, Durations(forward, inputs, weights, transfer))
    work = schedule.micro_batches * (forward + inputs + weights)
    down = schedule.stages * (forward + inputs) + weights  # one micro-batch to the head and back
    assert timeline.length >= max(down, work * len(schedule.stages_of(0)))
    assert timeline.bubble == pytest.approx(1 - work * schedule.stages / (schedule.ranks * timeline.length), abs=1e-9)
    for actions in schedule.actions:
        spans = [timeline.spans[action] for action in actions]
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_lengths_are_those_of_the_papers(ranks: int) -> None:
    """With F = B = W = 1 and n micro-batches, n * 3 a stage is work; what is added is the bubble."""
    n = 4 * ranks
    idle = {name: simulate(make_schedule(name, ranks, n)).length for name in SCHEDULES}
    assert idle["1f1b"] == 3 * n + (ranks - 1) * (1 + 2)
    assert idle["zero-bubble"] == 3 * n + (ranks - 1) * (1 + 1 - 1)
    # A stage of these is half as long as one of the others.
    assert idle["interleaved"] == 2 * 3 * n + (ranks - 1) * (1 + 2)
    assert idle["zero-bubble-v"] == 2 * 3 * n + (ranks - 1)
    assert simulate(interleaved(ranks, n, 3)).length == 3 * 3 * n + (ranks - 1) * (1 + 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_v_is_never_idle_between_its_first_and_last_action(ranks: int) -> None:
    schedule = zero_bubble_v(ranks, 3 * ranks)
    spans = simulate(schedule).spans
    for actions in schedule.actions:
        assert spans[actions[-1]][1] - spans[actions[0]][0] == 2 * 3 * schedule.micro_batches


def test_peaks_are_those_of_the_papers() -> None:
    assert peak_activations(one_f_one_b(4, 16)) == (4, 3, 2, 1)
    assert peak_activations(one_f_one_b(4, 2)) == (2, 2, 2, 1)
    assert peak_activations(zero_bubble_h1(4, 16)) == (4, 4, 4, 4)
    assert peak_activations(zero_bubble_v(4, 16)) == (4, 4, 4, 4)
    # 1 + (ranks - 1) / (ranks * chunks) times the 4 of 1F1B on the first rank.
    assert peak_activations(interleaved(4, 16, 2)) == (5.5, 4.5, 3.5, 2.5)


def test_what_waits_for_the_gradients_of_weights_counts_twice() -> None:
    assert peak_saved(one_f_one_b(4, 16)) == peak_activations(one_f_one_b(4, 16))
    # F0 F1 B0 and F0 B0 F1 B1 are the fullest moments, see below.
    assert peak_saved(zero_bubble_h1(2, 3)) == (3, 4)


def test_two_ranks_by_hand() -> None:
    def shown(schedule: PipelineSchedule) -> list[str]:
        return [" ".join(f"{a.kind.value}{a.micro_batch}" for a in actions) for actions in schedule.actions]

    assert shown(one_f_one_b(2, 3)) == ["F0 F1 BW0 F2 BW1 BW2", "F0 BW0 F1 BW1 F2 BW2"]
    assert shown(zero_bubble_h1(2, 3)) == ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]


def test_the_share_of_the_bubble() -> None:
    assert simulate(one_f_one_b(4, 8)).bubble == pytest.approx(3 / 11)  # (p - 1) / (n + p - 1)
    assert simulate(one_f_one_b(1, 8)).bubble == 0


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "message"),
    [
        ("gpipe", 2, 4, "schedule 'gpipe' is unknown; known are 1f1b, interleaved, zero-bubble, zero-bubble-v"),
        ("1f1b", 0, 4, "pp = 0 must be at least 1"),
        ("zero-bubble", 2, 0, "micro_batches = 0 must be at least 1"),
        ("interleaved", 4, 6, "micro_batches = 6 is no multiple of pp = 4; make it one, or use 1f1b"),
        ("zero-bubble-v", 4, 7, r"micro_batches = 7 is less than 2 \* pp = 8; raise it to that, or use zero-bubble"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(name: str, ranks: int, micro_batches: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, ranks, micro_batches)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Each order is right by itself, but one rank waits for the gradient and the other for the hidden states."""
    good = one_f_one_b(2, 2)
    first, second = good.actions
    actions = (first[0], first[2], first[1], first[3]), (second[2], *second[:2], second[3])
    with pytest.raises(ValueError, match="comes to a halt: rank 0 at"):
        simulate(replace(good, actions=actions))
