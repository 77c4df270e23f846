"""Joins scheduler and runner, the host one step ahead of the device. It knows a runner by its messages alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Listed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from strata.engine.faults import EngineFault, memory_explained
from strata.engine.grammars.matchers import explain, takes_end
from strata.engine.plan import StepPlan, TransferEnd, UndrawnStep
from strata.engine.request import Request, Sequence, Update
from strata.engine.scheduling.config import Waiting
from strata.engine.scheduling.late_launch import LateLaunch
from strata.engine.scheduling.rank_schedulers import RankSchedulers
from strata.engine.scheduling.scheduler import Scheduler
from strata.text.counted import counted

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from strata.engine.ledger import Ledger
    from strata.engine.runner import ScoredPrompt
    from strata.engine.sampler import LogprobTensors


class StepObserver(Protocol):
    """Told, while the host enqueues a step, where its work on the device begins and where it ends."""

    def begin(self, plan: StepPlan) -> None: ...

    def end(self) -> None: ...


class LaunchedStep(Protocol):
    """A step that is under way.

    logprobs: of the plan's draws, where any sequence reports them. masked: some draws obeyed the masks of grammars.
    arrived: the transfers that have ended since the step before told of some, known once `wait` has returned.
    size: of the CUDA graph that it replays, None if it is not all captured. ended: `wait` would not block.
    """

    @property
    def plan(self) -> StepPlan: ...
    @property
    def logprobs(self) -> LogprobTensors | None: ...
    @property
    def prompt_logprobs(self) -> tuple[ScoredPrompt, ...]: ...
    @property
    def masked(self) -> bool: ...
    @property
    def arrived(self) -> Listed[TransferEnd]: ...
    @property
    def size(self) -> Hashable | None: ...
    @property
    def ended(self) -> bool: ...

    def wait(self) -> list[int]:
        """The ids in the order of the plan's draws, negative where nothing comes of one (see `Draw`); blocks until they
        are known."""


class StepRunner(Protocol):
    """Runs plans in the order of their launch, and needs nothing but them. A step that is launched undrawn gets its
    masks, and is drawn before the next is launched."""

    observer: StepObserver | None

    def launch(self, plan: StepPlan) -> LaunchedStep | UndrawnStep: ...

    def mask(self, step: Any, matchers: Listed[LLMatcher | None]) -> UndrawnStep:
        """Begin with the masks of an undrawn step. matchers: of each of its draws, None where any id may come."""

    def draw(self, step: Any) -> LaunchedStep: ...

    def settle(self) -> None:
        """Wait until nothing of any step is under way."""


class StepTiming(NamedTuple):
    """How a step went, in seconds of the loop's clock.

    waiting: who had to wait for the next, and why. planned: when the scheduler was asked for it; launched: when its
    launch began; ended: when the host knew its ids. drawing: for which the host waited to draw it, behind masks of
    grammars.
    captured: it replayed a CUDA graph. late: the device had done it before the host came for its ids.
    """

    plan: StepPlan
    waiting: tuple[Waiting, ...]
    planned: float
    launched: float
    ended: float = 0.0
    drawing: float = 0.0
    captured: bool = False
    late: bool = False


@dataclass(frozen=True)
class StepOutput:
    """What a finished step brought.

    updates: each sequence that got ids.
    logprobs: of the step's rows, on the host; `rows` finds the row of a sequence's first id in them, behind which those
        of its others lie.
    prompt_logprobs: by their sequences.
    timing: how the step went.
    """

    updates: list[Update]
    rows: dict[int, int]
    logprobs: LogprobTensors | None
    prompt_logprobs: list[tuple[Sequence, ScoredPrompt]]
    timing: StepTiming


class EngineLoop:
    """Launches the next step before it reads the ids of the step before, if `run_ahead`.

    On a CPU there is nothing to overlap, so its engine reads each step's ids at once.

    What grammars allow in a step follows from the ids of the step before. Such a step is launched like any other and
    drawn last, when the next one has been planned: so its masks are computed beside the device and the host.

    With stages of a pipeline, as many steps are under way as there are stages, and with `run_ahead` one more, which
    waits for the first stage. All ids that a plan builds on are known then, so that its masks wait for nothing.

    A caller who has requests to wait for asks `launch_late`, and steps once `delay` is over (see `LateLaunch`).

    Whatever a call raises while it changes something, Ctrl-C too, all requests end and no page stays cached: half a
    step leaves nothing that a later one could take for a whole. If the device has run out of memory, the error is an
    EngineFault, and from then on `add` raises the same.

    clock: tells seconds to all who note when something happened to a request.
    """

    def __init__(
        self,
        scheduler: Scheduler | RankSchedulers,
        runner: StepRunner,
        run_ahead: bool,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The scheduler's config tells how many stages there are."""
        self.scheduler = scheduler
        self.clock = clock
        self._runner = runner
        self._run_ahead = run_ahead
        self._ledger = ledger
        self._outstanding: LaunchedStep | UndrawnStep | None = None
        self._stages = scheduler.config.stages
        self._in_stages: deque[LaunchedStep] = deque()
        self._launches: deque[StepTiming] = deque()  # of the steps under way, as far as it is known
        self._late: LateLaunch | None = None
        self._fault: str | None = None
        self._is_inconsistent = False

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is under way."""
        return self._outstanding is None and not self._in_stages and not self.scheduler.has_work

    def launch_late(self, behind: float = 0.0) -> None:
        """Learn from now on when a step has to be launched. behind: see `LateLaunch`."""
        if self._run_ahead and self._stages == 1:
            self._late = LateLaunch(self.clock, behind)

    @property
    def delay(self) -> float:
        """Seconds for which the next step need not be launched, so that it can have what comes until then; 0 if it is
        due, or an arrival could not be in it."""
        late = self._late
        if late is None or not late.remaining() or self.scheduler.needs_known_ids or not self.scheduler.has_space:
            return 0.0
        return late.wait()

    @property
    def late(self) -> LateLaunch | None:
        """What has been learnt since `launch_late`; None without it."""
        return self._late

    def forget_under_way(self) -> None:
        """Learn nothing from the steps under way, beside which the device does something else."""
        if self._late is not None:
            self._late.forget_under_way()

    def observe(self, observer: StepObserver | None) -> None:
        """Tell a benchmark where each step begins and ends on the device, until this is called with None."""
        self._runner.observer = observer

    def add(self, request: Request, matcher: LLMatcher | None = None) -> list[Sequence]:
        """Queue a request, with the matcher of its grammar if it has one (see `GrammarCompiler`).

        Raises ValueError if it can never fit, EngineFault if the engine has broken down.
        """
        if self._fault is not None:
            raise EngineFault(self._fault)
        with self._atomic(Exception):
            return self.scheduler.add(request, matcher)

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is; a step under way finishes without it."""
        with self._atomic():
            self.scheduler.abort(request_id)

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        """End a sequence for a reason that the scheduler cannot see (a stop string)."""
        with self._atomic():
            self.scheduler.finish(sequence, reason, stop_reason)

    def step(self) -> StepOutput | None:
        """Launch what is ready and return what the step before brought; None if there was none."""
        with self._atomic():
            return self._step() if self._stages == 1 else self._step_in_stages()

    def outputs(self) -> Iterator[StepOutput]:
        """Step until nothing is left to do."""
        while not self.idle:
            output = self.step()
            if output is not None:
                yield output

    def _step(self) -> StepOutput | None:
        before, self._outstanding = self._outstanding, None
        if before is not None and self.scheduler.needs_known_ids:
            return self._complete(self._drawn(before))
        began = self.clock()
        plan = self.scheduler.schedule(began)
        drawn = self._drawn(before) if before is not None else None
        after = self._launch(plan, began) if plan is not None else None
        if self._late is not None and plan is not None:
            self._late.launched(plan, _size(after), began, alone=drawn is None)
        if not self._run_ahead and after is not None:
            drawn, after = self._drawn(self._masked(after)), None
        output = self._complete(drawn) if drawn is not None else None
        self._outstanding = self._masked(after) if after is not None else None
        return output

    def _step_in_stages(self) -> StepOutput | None:
        """Launch a step while a stage has none, or else wait for the oldest."""
        if len(self._in_stages) < self._stages + self._run_ahead:
            began = self.clock()
            plan = self.scheduler.schedule(began)
            if plan is not None:
                self._in_stages.append(self._drawn(self._masked(self._launch(plan, began))))
                return None
        return self._complete(self._in_stages.popleft()) if self._in_stages else None

    @contextmanager
    def _atomic(self, *refusals: type[Exception]) -> Iterator[None]:
        """What is inside happens as a whole, or everything ends. refusals: errors that leave all as it was."""
        if self._is_inconsistent:  # the clearing up has been interrupted as well
            self._clear()
        self._is_inconsistent = True
        try:
            yield
        except refusals:
            self._is_inconsistent = False
            raise
        except EngineFault as fault:
            self._fault = str(fault)
            self._clear()
            raise
        except BaseException:
            self._clear()
            raise
        self._is_inconsistent = False

    def _clear(self) -> None:
        self._outstanding = None
        self._in_stages.clear()
        self._launches.clear()
        self.forget_under_way()
        with suppress(Exception):  # the device may have broken down; then the next step says so
            self._runner.settle()
        self.scheduler.reset()
        self._is_inconsistent = False

    def _launch(self, plan: StepPlan, planned: float) -> LaunchedStep | UndrawnStep:
        self._launches.append(StepTiming(plan, self.scheduler.take_waiting(), planned, self.clock()))
        with memory_explained(lambda: _doing(plan), self._ledger):
            return self._runner.launch(plan)

    def _masked(self, step: LaunchedStep | UndrawnStep) -> LaunchedStep | UndrawnStep:
        """Begin with the masks of a step that needs some: they are computed while the caller goes on."""
        if not isinstance(step, UndrawnStep):
            return step
        sequences = (self.scheduler.sequence(draw.sequence) for draw in step.plan.draws)
        matchers = [sequence.matcher if sequence is not None else None for sequence in sequences]
        return self._runner.mask(step, matchers)

    def _drawn(self, step: LaunchedStep | UndrawnStep) -> LaunchedStep:
        if not isinstance(step, UndrawnStep):
            return step
        began = self.clock()
        with memory_explained(lambda: _doing(step.plan), self._ledger):
            drawn = self._runner.draw(step)
        if drawn.masked:
            at = 0 if self._stages == 1 else -1
            self._launches[at] = self._launches[at]._replace(drawing=self.clock() - began)
        return drawn

    def _complete(self, launched: LaunchedStep) -> StepOutput:
        late = self._run_ahead and launched.ended
        ids, plan = launched.wait(), launched.plan
        if self._late is not None:
            self._late.completed(in_time=not late)
        timing = self._launches.popleft()._replace(ended=self.clock(), captured=launched.size is not None, late=late)
        scored = [(self.scheduler.sequence(part.sequence), part) for part in launched.prompt_logprobs]
        failed = self._fail_lost(plan) if launched.masked else []
        updates = failed + self.scheduler.complete(plan, ids, launched.arrived)
        if launched.masked:
            updates = [self._followed(update) for update in updates]
        rows: dict[int, int] = {}
        if launched.logprobs is not None:
            rows = {draw.sequence: row for row, draw in reversed([*enumerate(plan.draws)])}
        wanted = [(sequence, part) for sequence, part in scored if sequence is not None]
        return StepOutput(updates, rows, launched.logprobs, wanted, timing)

    def _fail_lost(self, plan: StepPlan) -> list[Update]:
        """End the requests of sequences whose matchers could not tell what may come next."""
        updates = []
        for draw in plan.draws:
            sequence = self.scheduler.sequence(draw.sequence)
            if sequence is not None and sequence.matcher is not None and sequence.matcher.is_error():
                why = explain(sequence.matcher.get_error())
                updates += self.scheduler.fail(sequence, f"the output cannot be kept to its grammar: {why}")
        return updates

    def _followed(self, update: Update) -> Update:
        """Let the matcher of a sequence, if it has one, take the ids that it got, one of which may end its output."""
        sequence, tokens = update.sequence, update.tokens
        if sequence.matcher is None or sequence.finished:
            return update
        for taken, token in enumerate(tokens, 1):
            if takes_end(sequence.matcher, token):
                self.scheduler.finish(sequence, "stop")
                return Update(sequence, tokens[:taken], "stop")
        return update


def _doing(plan: StepPlan) -> str:
    return f"running a step of {counted(plan.tokens, 'token')} from {counted(len(plan.chunks), 'sequence')}"


def _size(step: LaunchedStep | UndrawnStep | None) -> Hashable | None:
    """None of a step whose draw waits for masks, too."""
    return None if step is None or isinstance(step, UndrawnStep) else step.size
