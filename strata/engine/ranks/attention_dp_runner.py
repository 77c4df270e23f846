"""Runs each step on ranks that have sequences of their own: each has a plan, and what it draws comes to rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from llguidance import LLMatcher
from torch import Tensor

from strata.engine.grammars.grammar import Masks, MasksUnderWay
from strata.engine.plan import RankPlans, StepPlan, UndrawnStep
from strata.engine.program.shape import StepShape
from strata.engine.ranks import messages
from strata.engine.ranks.expert_balance import ExpertBalance, RankExperts
from strata.engine.ranks.followers import Followers
from strata.engine.ranks.ranked_runner import RankedRunner, mask_rows, together
from strata.engine.runner import Launched, Runner, ScoredPrompt, Undrawn
from strata.engine.sampler import LogprobTensors
from strata.engine.steps.slots import SlotState


class _Masked(NamedTuple):
    """See `Undrawn`."""

    complete: tuple[bool, ...]
    masks: MasksUnderWay | None


@dataclass(frozen=True)
class RanksUndrawn(UndrawnStep):
    """A step of which some ranks wait for masks. own: of rank 0; number: of the message that launched those of others.
    waiting: which ranks do. masked: of each what `mask` has made, None if it does not wait."""

    plan: RankPlans
    own: Launched | Undrawn
    number: int
    waiting: tuple[bool, ...]
    masked: tuple[_Masked | None, ...] = ()


class RanksStep:
    """A step that is under way on all ranks; see the protocol `LaunchedStep` of the loop.

    numbers: of the messages by which each of the other ranks launched or drew it.
    """

    arrived: tuple[()] = ()

    def __init__(
        self, plan: RankPlans, own: Launched, numbers: Sequence[int], followers: Followers, *, masked: bool
    ) -> None:
        self.plan, self.masked, self.size = plan, masked, own.size
        self._own, self._numbers, self._followers = own, numbers, followers
        self._told: list[messages.Drawn] = []

    @property
    def ended(self) -> bool:
        """Whether it has on rank 0; the others run the same."""
        return self._own.ended

    def wait(self) -> list[int]:
        """The ids of all ranks. Raises EngineFault if a rank has ended or the step takes too long."""
        ids = self._own.wait()
        if not self._told:
            for rank, number in enumerate(self._numbers, 1):
                answer = self._followers.answer(rank, number)
                assert isinstance(answer, messages.Drawn)
                self._told.append(answer)
        return [*ids, *(id for told in self._told for id in told.ids)]

    @property
    def logprobs(self) -> LogprobTensors | None:
        """Of all draws, with zeros for those of ranks where nobody reports any; known once `wait` has returned."""
        counts = [len(part.draws) for part in self.plan.parts]
        return joined([self._own.logprobs, *(told.logprobs for told in self._told)], counts[: 1 + len(self._told)])

    @property
    def prompt_logprobs(self) -> tuple[ScoredPrompt, ...]:
        return (*self._own.prompt_logprobs, *(one for told in self._told for one in told.prompt_logprobs))


def joined(parts: Sequence[LogprobTensors | None], rows: Sequence[int]) -> LogprobTensors | None:
    """Log-probabilities of several ranks, one rank's rows after another's; None if no rank has any. rows: of each."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    most = max(part.top.shape[1] for part in there)

    def column(name: str) -> Tensor:
        example: Tensor = getattr(there[0], name)
        width = (most,) * (example.dim() - 1)
        whole = example.new_zeros((sum(rows), *width))
        for part, own in zip(parts, whole.split(list(rows)), strict=True):
            if part is not None:
                values = getattr(part, name)
                own[tuple(slice(size) for size in values.shape)] = values
        return whole

    return LogprobTensors(column("chosen"), column("ranks"), column("top_ids"), column("top"))


class AttentionDpRunner(RankedRunner):
    """The runner of rank 0 and, by `followers`, those of the others, each of which runs plans of its own."""

    def __init__(
        self,
        runner: Runner,
        followers: Followers,
        experts: RankExperts | None,
        balance: ExpertBalance | None,
        mask_ids: int,
        max_sequences: int,
        device: torch.device,
    ) -> None:
        """experts, balance: see `RankedRunner`. mask_ids, max_sequences: see `Runner`. device: of rank 0."""
        super().__init__(runner, followers, experts, balance)
        # Of the sequences of all ranks.
        self._slots = [SlotState(max_sequences) for _ in range(followers.size)]
        # Those of the other ranks leave the host as messages.
        devices = [device, *(torch.device("cpu") for _ in range(1, followers.size))]
        self._masks = [Masks(mask_ids, max_sequences, one) for one in devices]

    def launch(self, plan: StepPlan) -> RanksStep | RanksUndrawn:  # type: ignore[override]
        assert isinstance(plan, RankPlans)
        parts = list(zip(self._slots, plan.parts, strict=True))
        for slots, part in parts:
            slots.learn(part)
        scored = any(slots.scores(part) for slots, part in parts)
        tagged = any(slots.tags_any(part) for slots, part in parts)
        room = StepShape.of_ranks(plan.parts, scored=scored, tagged=tagged)
        waiting = tuple(slots.waits(part) for slots, part in parts)
        with together(self._followers):
            self._move_experts()
            number = self._followers.send_each([messages.LaunchStep(part, room=room) for part in plan.parts[1:]])
            own = self._runner.launch(plan.parts[0], room)
        if any(waiting):
            return RanksUndrawn(plan, own, number, waiting)
        assert isinstance(own, Launched)
        numbers = (number,) * (len(plan.parts) - 1)
        return RanksStep(plan, self._watched(own), numbers, self._followers, masked=False)

    def mask(self, step: RanksUndrawn, matchers: Sequence[LLMatcher | None]) -> RanksUndrawn:  # type: ignore[override]
        """See the protocol; the matchers of one rank's draws come after another's."""
        left = iter(matchers)
        masked: list[_Masked | None] = []
        for masks, part, waits in zip(self._masks, step.plan.parts, step.waiting, strict=True):
            own = list(islice(left, len(part.draws)))
            complete = tuple(matcher is not None and matcher.is_stopped() for matcher in own)
            masked.append(_Masked(complete, masks.start(own)) if waits else None)
        return replace(step, masked=tuple(masked))

    def draw(self, step: RanksUndrawn) -> RanksStep:  # type: ignore[override]
        with together(self._followers):
            told = [
                messages.DrawLaunched(*(() if one is None else (one.complete, mask_rows(one.masks))))
                for one in step.masked
            ]
            number = self._followers.send_each(told[1:])
            own, first = step.own, step.masked[0]
            if isinstance(own, Undrawn):
                assert first is not None
                own = self._runner.draw(replace(own, complete=first.complete, masks=first.masks))
            numbers = [step.number if one is None else number for one in step.masked[1:]]
            masked = any(one is not None and one.masks is not None for one in step.masked)
            return RanksStep(step.plan, self._watched(own), numbers, self._followers, masked=masked)

    def settle(self) -> None:
        with together(self._followers):
            for masks in self._masks:
                masks.settle()
            self._followers.forget_steps(self._followers.send(messages.Settle()))
            self._runner.settle()

    def check_ids(self) -> None:
        """Ranks draw ids of their own; raises EngineFault if one has ended or hangs."""
        self.check()
