"""Runs each step on all ranks: what rank 0 is told to do, it tells the others first."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType

from llguidance import LLMatcher
from torch import Tensor

from strata.engine.embeddings.pooling import Pooled, PoolRequest, PromptPooler
from strata.engine.faults import EngineFault
from strata.engine.grammars.grammar import MasksUnderWay
from strata.engine.loop import LaunchedStep, StepObserver
from strata.engine.plan import StepPlan
from strata.engine.ranks import messages
from strata.engine.ranks.expert_balance import ExpertBalance, RankExperts
from strata.engine.ranks.followers import STEP_SECONDS, Followers
from strata.engine.runner import Launched, Runner, ScoredPrompt, Undrawn
from strata.engine.sampler import LogprobTensors

# How long rank 0 sleeps between two looks at its device, in seconds: a rank that ends meanwhile leaves it waiting for
# ever, so it must not wait inside the driver.
_LOOK_SECONDS = 2e-5

# Bytes of a tensor that travel in one message.
_TENSOR_BYTES = 1 << 26

# By which followers launch later than rank 0: they wake up, and decode a plan that rank 0 has. Estimated.
BEHIND_SECONDS = 0.3e-3


class ReturnedStep:
    """A step of several stages, of which the last tells rank 0 what it gives. A `LaunchedStep`.

    number: of the message by which it was launched or drawn. note: is told the ids once they are known.
    """

    size = None
    arrived: tuple[()] = ()

    def __init__(
        self,
        plan: StepPlan,
        masked: bool,
        number: int,
        followers: Followers,
        note: Callable[[StepPlan, Sequence[int]], None],
    ) -> None:
        self.plan, self.masked = plan, masked
        self._number, self._followers, self._note = number, followers, note
        self._told: messages.Drawn | None = None

    @property
    def ended(self) -> bool:
        return self._told is not None

    @property
    def logprobs(self) -> LogprobTensors | None:
        return None if self._told is None else self._told.logprobs

    @property
    def prompt_logprobs(self) -> tuple[ScoredPrompt, ...]:
        return () if self._told is None else self._told.prompt_logprobs

    def wait(self) -> list[int]:
        """As `Launched.wait`; raises EngineFault if a rank has ended or the step takes too long."""
        if self._told is None:
            told = self._followers.answer(self._followers.drawing_rank, self._number)
            assert isinstance(told, messages.Drawn)
            self._told = told
            self._note(self.plan, told.ids)
        return list(self._told.ids)


@dataclass(frozen=True)
class ReturnedVectors(Pooled):
    """Vectors that the last of several stages tells rank 0, whose own are of no use."""

    number: int = field(kw_only=True)
    followers: Followers = field(kw_only=True)

    def wait(self) -> Tensor:
        """As `Pooled.wait`; raises EngineFault if a rank has ended or they take too long."""
        told = self.followers.answer(self.followers.drawing_rank, self.number)
        assert isinstance(told, messages.Vectors)
        return told.vectors


class RankedRunner:
    """The runner of rank 0 and, by `followers`, those of the others; see the protocol `StepRunner` of the loop.

    Ctrl-C comes after a call, not in it: half of one would leave the ranks in different steps. What fails in one on
    rank 0 ends the others, and raises EngineFault from then on.
    """

    def __init__(
        self, runner: Runner, followers: Followers, experts: RankExperts | None, balance: ExpertBalance | None
    ) -> None:
        """experts: of rank 0, where those of a mixture may move; balance: tells when, and where to."""
        self._runner, self._followers, self.experts, self._balance = runner, followers, experts, balance
        # (slot, id) that stages have not been told yet.
        self._drawn: list[tuple[int, int]] = []

    @property
    def observer(self) -> StepObserver | None:
        return self._runner.observer

    @observer.setter
    def observer(self, observer: StepObserver | None) -> None:
        self._runner.observer = observer

    def launch(self, plan: StepPlan) -> LaunchedStep | Undrawn:
        with together(self._followers):
            self._move_experts()
            drawn, self._drawn = tuple(self._drawn), []
            number = self._followers.send(messages.LaunchStep(plan, drawn))
            if drawn:
                self._runner.learn(drawn)
            step = self._runner.launch(plan)
            return step if isinstance(step, Undrawn) else self._under_way(step, number)

    def mask(self, step: Undrawn, matchers: Sequence[LLMatcher | None]) -> Undrawn:
        return self._runner.mask(step, matchers)

    def draw(self, step: Undrawn) -> LaunchedStep:
        with together(self._followers):
            number = self._followers.send(messages.DrawLaunched(step.complete, mask_rows(step.masks)))
            return self._under_way(self._runner.draw(step), number)

    def settle(self) -> None:
        with together(self._followers):
            self._followers.forget_steps(self._followers.send(messages.Settle()))
            self._runner.settle()
            self._drawn.clear()

    @property
    def processes(self) -> dict[int, int]:
        """The process id of each rank but this one."""
        return self._followers.processes

    def check(self) -> None:
        """Raises EngineFault if a rank has ended or hangs."""
        self._followers.check()

    def check_ids(self) -> None:
        """Raises EngineFault if a rank has drawn another id than others; for tests, it waits for all."""
        if not self._followers.same_ids(self._runner.ids_digest()):
            raise EngineFault("ranks have drawn different ids")

    def update_weight(self, name: str, tensor: Tensor, write: Callable[[], None]) -> None:
        """See `WeightStore.everywhere`. Raises ValueError, before anything has changed, if another rank cannot pack its
        part."""
        with together(self._followers):
            values = messages.bytes_of(tensor)
            for start in range(0, len(values), _TENSOR_BYTES):
                self._followers.send(messages.WeightBytes(values[start : start + _TENSOR_BYTES].tobytes()))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._followers.send(messages.UpdateWeight(name, dtype, tuple(tensor.shape)))
            agreed = self._followers.min_over_ranks(1)
            if agreed:
                write()
        if not agreed:
            raise ValueError(
                f"{name} cannot be packed: the part of another rank does not fit the scheme; give values that do, or "
                "serve weights that are not packed"
            )

    def _move_experts(self) -> None:
        """Before a step, if some are to move."""
        if self._balance is not None and (move := self._balance.next_move()) is not None:
            layer, placed = move
            self._followers.send(messages.MoveExperts(layer, tuple(placed.tolist())))
            assert self.experts is not None
            self.experts.move(layer, placed)

    def _under_way(self, step: Launched, number: int) -> LaunchedStep:
        """number: of the message by which it was launched or drawn."""
        if self._followers.stages > 1:
            return ReturnedStep(step.plan, step.masked, number, self._followers, self._note)
        return self._watched(step)

    def _watched(self, step: Launched) -> Launched:
        return replace(step, watch=partial(_watch, self._followers))

    def _note(self, plan: StepPlan, ids: Sequence[int]) -> None:
        """Tell the stages with the next step what has been drawn."""
        self._drawn += [(draw.slot, id) for draw, id in zip(plan.draws, ids, strict=True)]


class RankedPooler:
    """The pooler of rank 0 and those of the others."""

    def __init__(self, pooler: PromptPooler, followers: Followers) -> None:
        self._pooler, self._followers = pooler, followers

    def check(self, prompt: Sequence[int]) -> None:
        self._pooler.check(prompt)

    def fitting(self, requests: Iterable[PoolRequest], token_limit: float = float("inf")) -> int:
        return self._pooler.fitting(requests, token_limit)

    def launch(self, requests: Sequence[PoolRequest]) -> Pooled:
        with together(self._followers):
            prompts = tuple((tuple(request.prompt), request.pooling) for request in requests)
            number = self._followers.send(messages.Pool(prompts))
            own = self._pooler.launch(requests)
            if self._followers.stages > 1:
                return ReturnedVectors(own.vectors, own.arrived, number=number, followers=self._followers)
            return replace(own, watch=partial(_watch, self._followers))


def _watch(followers: Followers, has_ended: Callable[[], bool]) -> None:
    """Until something on the device of rank 0 has ended. Raises EngineFault if a rank has, or it takes too long."""
    until = time.monotonic() + STEP_SECONDS
    while not has_ended():
        followers.check()
        if time.monotonic() > until:
            raise EngineFault(f"rank 0 has waited for the end of a step for {STEP_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)
    followers.check()


@contextmanager
def together(followers: Followers) -> Iterator[None]:
    """What is inside happens on all ranks, or ends them."""
    with _uninterrupted():
        try:
            yield
        except EngineFault:
            raise
        except Exception as error:
            raise followers.fault_of(error) from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let SIGINT wait for the end of the block. Only the main thread hears it."""
    # A handler that is not Python's is None to it, and could not be put back.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard and callable(before):
            before(*heard[0])


def mask_rows(masks: MasksUnderWay | None) -> messages.MaskRows | None:
    """Masks as they travel, once they are computed."""
    if masks is None:
        return None
    masks.computed.result()
    return messages.MaskRows(masks.buffer, masks.count, masks.words)
