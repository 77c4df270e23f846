"""Pipeline schedules as data: which passes of which micro-batches a rank runs, in what order; made without torch.

Stages are numbered from the embedding to the head. A schedule holds computation alone; `strata.parallel.timeline` gives
how long it takes, what it holds, and where the transfers go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache


class StagePass(Enum):
    """What runs of a stage. The backward pass runs whole, or in two parts of which the second may come much later."""

    FORWARD = "F"
    INPUTS = "B"  # the gradient of the stage's inputs, for which the stage before waits
    WEIGHTS = "W"  # the gradient of the weights, for which nobody waits
    BACKWARD = "BW"  # both at once

    @property
    def frees(self) -> bool:
        """Whether the activations of the micro-batch are needed no more."""
        return self in (StagePass.WEIGHTS, StagePass.BACKWARD)

    @property
    def gives_gradient(self) -> bool:
        """Whether the gradient of the stage's inputs comes of it."""
        return self in (StagePass.INPUTS, StagePass.BACKWARD)


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: StagePass
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True)
class PipelineSchedule:
    """rank_of_stage: by stage. actions. actions: of each rank, in their order."""

    micro_batches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def ranks(self) -> int:
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that this rank runs, in their order."""
        return tuple(stage for stage, home in enumerate(self.rank_of_stage) if home == rank)


def one_f_one_b(ranks: int, micro_batches: int) -> PipelineSchedule:
    """1F1B (PipeDream-flush, Narayanan et al. 2021): each forward pass beyond the first few waits for a backward pass.

    One stage a rank. A rank holds at most ranks - rank micro-batches.
    """
    _require_positive(ranks, micro_batches)
    actions = []
    for rank in range(ranks):
        forwards = [Action(StagePass.FORWARD, rank, m) for m in range(micro_batches)]
        backwards = [Action(StagePass.BACKWARD, rank, m) for m in range(micro_batches)]
        actions.append(tuple(_alternate(forwards, backwards, lead=ranks - rank - 1)))
    return PipelineSchedule(micro_batches, tuple(range(ranks)), tuple(actions))


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> PipelineSchedule:
    """Interleaved 1F1B (Narayanan et al. 2021): rank r has `chunks` stages: r, r + ranks, ...

    The bubble shrinks by the factor `chunks`, and there are as many times more transfers. Raises ValueError unless
    `ranks` divides `micro_batches`.
    """
    _require_positive(ranks, micro_batches)
    if chunks < 1:
        raise ValueError(f"chunks = {chunks} must be at least 1")
    if micro_batches % ranks:
        raise ValueError(
            f"interleaved: micro_batches = {micro_batches} is no multiple of pp = {ranks}; make it one, or use 1f1b"
        )
    actions = []
    for rank in range(ranks):
        # A group of `ranks` micro-batches goes through one stage of the rank after the other.
        order = [
            (chunk * ranks + rank, first + m)
            for first in range(0, micro_batches, ranks)
            for chunk in range(chunks)
            for m in range(ranks)
        ]
        forwards = [Action(StagePass.FORWARD, stage, m) for stage, m in order]
        last = (chunks - 1) * ranks + 2 * rank
        backwards = [Action(StagePass.BACKWARD, last - stage, m) for stage, m in order]
        lead = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        actions.append(tuple(_alternate(forwards, backwards, lead)))
    return PipelineSchedule(micro_batches, tuple(range(ranks)) * chunks, tuple(actions))


def zero_bubble_h1(ranks: int, micro_batches: int) -> PipelineSchedule:
    """ZB-H1 (Qi et al. 2023): 1F1B whose gradients of weights wait, and fill what was idle at the end.

    Rank r keeps the gradients of weights of r micro-batches waiting, so that every rank holds as many micro-batches as
    the first one of 1F1B. With passes of equal length a third of 1F1B's bubble is left.
    """
    plain = one_f_one_b(ranks, micro_batches)
    split = tuple(tuple(_delay_weights(actions, rank)) for rank, actions in enumerate(plain.actions))
    return PipelineSchedule(micro_batches, plain.rank_of_stage, split)


def zero_bubble_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """ZB-V (Qi et al. 2024): stages go down the ranks and up again, so rank r has the stages r and 2 * ranks - 1 - r.

    With passes of equal length a rank is never idle from its first action to its last, and it holds no more than 1F1B's
    first rank. Embedding and head lie on one rank. Raises ValueError for fewer than 2 * ranks micro-batches.
    """
    _require_positive(ranks, micro_batches)
    if micro_batches < 2 * ranks:
        raise ValueError(
            f"zero-bubble-v: micro_batches = {micro_batches} is less than 2 * pp = {2 * ranks}; raise it to that, "
            "or use zero-bubble"
        )
    rank_of_stage = (*range(ranks), *reversed(range(ranks)))
    return PipelineSchedule(
        micro_batches, rank_of_stage, tuple(_zero_bubble_v(ranks, rank, micro_batches) for rank in range(ranks))
    )


SCHEDULES: Mapping[str, Callable[[int, int], PipelineSchedule]] = {
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble_h1,
    "zero-bubble-v": zero_bubble_v,
}


# A search asks for the same ones under many layouts.
@lru_cache(maxsize=256)
def make_schedule(name: str, ranks: int, micro_batches: int) -> PipelineSchedule:
    """The schedule of that name in `SCHEDULES`. Raises ValueError if it is unknown or wants other numbers."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; known are {', '.join(SCHEDULES)}")
    return SCHEDULES[name](ranks, micro_batches)


def forward_alone(schedule: PipelineSchedule) -> PipelineSchedule:
    """Its forward passes, in their order."""
    actions = tuple(tuple(one for one in rank if one.kind is StagePass.FORWARD) for rank in schedule.actions)
    return replace(schedule, actions=actions)


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], lead: int) -> Iterator[Action]:
    """`lead` forward passes, then a forward and a backward pass in turn, then the backward passes that are left."""
    lead = min(lead, len(forwards))
    yield from forwards[:lead]
    for forward, backward in zip(forwards[lead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - lead :]


def _delay_weights(actions: Sequence[Action], waiting: int) -> Iterator[Action]:
    """Split the backward passes. At most `waiting` gradients of weights wait after any action, and all come in turn."""
    weights: list[Action] = []
    for action in actions:
        if action.kind is not StagePass.BACKWARD:
            yield action
            continue
        yield Action(StagePass.INPUTS, action.stage, action.micro_batch)
        weights.append(Action(StagePass.WEIGHTS, action.stage, action.micro_batch))
        if len(weights) > waiting:
            yield weights.pop(0)
    yield from weights


def _zero_bubble_v(ranks: int, rank: int, micro_batches: int) -> tuple[Action, ...]:
    """The actions of one rank, for passes of equal length."""
    down, up = rank, 2 * ranks - 1 - rank
    made: list[Action] = []
    counts: Counter[tuple[StagePass, int]] = Counter()

    def run(stage: int, *kinds: StagePass) -> None:
        """Each of `kinds` for the next micro-batch of the stage that has not had it."""
        for kind in kinds:
            made.append(Action(kind, stage, counts[kind, stage]))
            counts[kind, stage] += 1

    # Until the first micro-batch is back from the last rank.
    for _ in range(2 * (ranks - rank) - 1):
        run(down, StagePass.FORWARD)
    for _ in range(rank):
        run(up, StagePass.FORWARD)
        run(down, StagePass.FORWARD)
    # Until its gradient has gone up and comes down again.
    for _ in range(ranks - rank):
        run(up, StagePass.FORWARD, StagePass.INPUTS, StagePass.WEIGHTS)
    while counts[StagePass.FORWARD, up] < micro_batches:
        if counts[StagePass.FORWARD, down] < micro_batches:
            run(down, StagePass.FORWARD)
        run(down, StagePass.INPUTS, StagePass.WEIGHTS)
        run(up, StagePass.FORWARD, StagePass.INPUTS, StagePass.WEIGHTS)
    # What others wait for comes first; the gradients of weights that were put off fill the end.
    for _ in range(rank):
        run(down, StagePass.INPUTS)
        run(up, StagePass.INPUTS)
    while counts[StagePass.INPUTS, down] < micro_batches:
        run(down, StagePass.INPUTS, StagePass.WEIGHTS)
    for stage in (up, down):
        while counts[StagePass.WEIGHTS, stage] < micro_batches:
            run(stage, StagePass.WEIGHTS)
    return tuple(made)


def _require_positive(ranks: int, micro_batches: int) -> None:
    for name, value in (("pp", ranks), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")
