"""A pipeline schedule in time: its length and bubble, the activations it holds, and where transfers go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from strata.parallel.schedules import Action, PipelineSchedule, StagePass


@dataclass(frozen=True)
class Durations:
    """Of the passes of one stage and of a transfer between ranks, all in one unit."""

    forward: float = 1
    inputs: float = 1
    weights: float = 1
    transfer: float = 0

    def of(self, kind: StagePass) -> float:
        """How long a pass takes."""
        if kind is StagePass.FORWARD:
            return self.forward
        return {StagePass.INPUTS: self.inputs, StagePass.WEIGHTS: self.weights}.get(kind, self.inputs + self.weights)


@dataclass(frozen=True)
class ScheduleTimeline:
    """When each action starts and ends, from the first start on, if nothing but `Durations` and the order decides."""

    spans: Mapping[Action, tuple[float, float]]
    ranks: int

    @property
    def length(self) -> float:
        """Until the last rank has ended."""
        return max(end for _, end in self.spans.values())

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they are idle."""
        return 1 - sum(end - start for start, end in self.spans.values()) / (self.ranks * self.length)


def simulate(schedule: PipelineSchedule, durations: Durations | None = None) -> ScheduleTimeline:
    """Run the schedule in time; without `durations` all passes take 1 and transfers 0.

    Raises ValueError if it comes to a halt, naming what each rank waits for.
    """
    durations = durations or Durations()
    spans: dict[Action, tuple[float, float]] = {}
    free = [0.0] * schedule.ranks
    done = [0] * schedule.ranks
    gradients: dict[tuple[int, int], Action] = {}  # what gave the gradient of a stage's inputs
    while True:
        before = sum(done)
        for rank, actions in enumerate(schedule.actions):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                start = _earliest_start(action, schedule, spans, gradients, durations.transfer)
                if start is None:
                    break
                start = max(start, free[rank])
                free[rank] = start + durations.of(action.kind)
                spans[action] = (start, free[rank])
                done[rank] += 1
                if action.kind.gives_gradient:
                    gradients[action.stage, action.micro_batch] = action
        if sum(done) == before:
            break
    if stuck := [f"rank {r} at {a[done[r]]}" for r, a in enumerate(schedule.actions) if done[r] < len(a)]:
        raise ValueError(f"the schedule comes to a halt: {', '.join(stuck)}")
    return ScheduleTimeline(spans, schedule.ranks)


def peak_saved(schedule: PipelineSchedule) -> tuple[float, ...]:
    """Of each rank the most micro-batches of which passes keep something for each other at once; one in half of its
    stages is a half. One between INPUTS and WEIGHTS counts twice: besides activations it holds the gradients that
    arrived at its products, about as many bytes.
    """
    changes = {StagePass.FORWARD: 1, StagePass.INPUTS: 1, StagePass.WEIGHTS: -2, StagePass.BACKWARD: -1}
    peaks = []
    for rank, actions in enumerate(schedule.actions):
        most = max(accumulate(changes[action.kind] for action in actions))
        peaks.append(most / len(schedule.stages_of(rank)))
    return tuple(peaks)


@dataclass(frozen=True)
class StageTransfer:
    """What an action made goes to another rank: hidden states after a forward pass, their gradient after the others.

    source, target: ranks of the pipeline.
    """

    made: Action
    source: int
    target: int


@dataclass(frozen=True)
class Exchange:
    """Transfers that a rank starts together and goes on without waiting for; at most one each way with each rank."""

    transfers: tuple[StageTransfer, ...]


Program = tuple[Action | Exchange, ...]


def programs(schedule: PipelineSchedule) -> tuple[Program, ...]:
    """Of each rank its actions with the exchanges between them.

    An exchange stands at the moment of the timeline of equal passes at which its transfers can start, before the
    actions that end later. So the programs of all ranks are parts of one sequence: even if every transfer waited for
    the rank at its other end, and every exchange for the one before it, as on one stream of NCCL, none would wait
    forever.
    """
    spans = simulate(schedule).spans
    at: list[dict[float, list[StageTransfer]]] = [{} for _ in range(schedule.ranks)]
    for action, (_, end) in spans.items():
        if (transfer := _transfer(action, schedule)) is not None:
            for rank in (transfer.source, transfer.target):
                at[rank].setdefault(end, []).append(transfer)
    made = []
    for rank, actions in enumerate(schedule.actions):
        events: list[tuple[float, int, Action | Exchange]] = [(spans[action][1], 0, action) for action in actions]
        events += [(moment, 1, Exchange(tuple(transfers))) for moment, transfers in at[rank].items()]
        made.append(tuple(event for _, _, event in sorted(events, key=lambda event: event[:2])))
    return tuple(made)


def _transfer(action: Action, schedule: PipelineSchedule) -> StageTransfer | None:
    """None where the result stays on the rank, or nobody wants it."""
    if action.kind is StagePass.WEIGHTS:
        return None
    to = action.stage + (1 if action.kind is StagePass.FORWARD else -1)
    if not 0 <= to < schedule.stages or schedule.rank_of_stage[to] == schedule.rank_of_stage[action.stage]:
        return None
    return StageTransfer(action, schedule.rank_of_stage[action.stage], schedule.rank_of_stage[to])


def _earliest_start(
    action: Action,
    schedule: PipelineSchedule,
    spans: Mapping[Action, tuple[float, float]],
    gradients: Mapping[tuple[int, int], Action],
    transfer: float,
) -> float | None:
    """When all that the action needs is there; None if some of it has not yet run."""
    start = 0.0
    for needed in _needs(action, schedule.stages, gradients):
        if needed is None or needed not in spans:
            return None
        moved = schedule.rank_of_stage[needed.stage] != schedule.rank_of_stage[action.stage]
        start = max(start, spans[needed][1] + (transfer if moved else 0))
    return start


def _needs(action: Action, stages: int, gradients: Mapping[tuple[int, int], Action]) -> Iterator[Action | None]:
    """What must have run before; None for a gradient that does not exist yet."""
    stage, m = action.stage, action.micro_batch
    if action.kind is StagePass.FORWARD:
        if stage > 0:
            yield Action(StagePass.FORWARD, stage - 1, m)
        return
    yield Action(StagePass.FORWARD, stage, m)
    if action.kind is StagePass.WEIGHTS:
        yield gradients.get((stage, m))
    elif stage + 1 < stages:
        yield gradients.get((stage + 1, m))
