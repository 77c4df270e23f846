"""What can hold a training run back, each with the figures that tell it and what its remedies would save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from strata.engine.watch.verdict import Remedy
from strata.plan.explain.explanation import Explained
from strata.plan.explain.verdict import Finding, ranked
from strata.plan.report.units import quantity, seconds, share
from strata.plan.training_explain import run_waterfall as parts
from strata.plan.training_explain.recorded_run import RecordedRun
from strata.plan.training_explain.run_floor import RunFloor, likely_time
from strata.text.counted import counted
from strata.train.predict.estimate import USABLE, memory
from strata.train.predict.step_shape import TrainShape

# What checkpoints and log lines may take of the time.
_SELDOM = 0.01
# An update that takes so many times what its bytes need is not bound by them.
_FEW_BYTES = 4.0
# A share of float32 kernels that cannot be the loss alone.
_WIDE = 0.2


@dataclass(frozen=True)
class TrainingRuleInput:
    """What the rules look at."""

    run: RecordedRun
    floor: RunFloor
    explained: Explained

    def each(self, name: str) -> str:
        """A part in words, of each step."""
        whole = self.run.whole.each
        return f"{seconds(self.explained.share(name) * whole)} of the {seconds(whole)} of a step"

    def tried(self, what: str, option: str, shape: TrainShape, recompute: str = "", packs: int = 1) -> Iterator[Remedy]:
        """A remedy as predicted steps have it, if it fits into memory and saves anything. packs: how many times the
        packs of a step."""
        recompute = recompute or self.run.what.recompute
        now, room = self.floor.likely, self.floor.device.known("memory")
        try:
            then = likely_time(shape, recompute, self.floor.device)
            fits = room is None or memory(shape, recompute).total <= USABLE * room.value
        except (ValueError, KeyError):  # the layout or its schedule does not take it
            return
        if now is None or then is None or not fits:
            return
        gain = self.run.whole.steps * self.run.filled * (now.seconds - then.seconds / packs) / self.run.whole.seconds
        if gain > 0:
            yield Remedy(what, gain, option)

    def divided(self, what: str, **changes: Any) -> Iterator[Remedy]:
        """A remedy of another layout. Its options stand beside it if the run has a table for them."""
        now, table = self.run.what.layout, self.run.what.config.parallel
        new = {name: value for name, value in changes.items() if value != getattr(now, name)}
        option = " ".join(f"--parallel.{name} {str(value).lower()}" for name, value in new.items())
        shape = replace(self.floor.shape, layout=replace(now, **new))
        yield from self.tried(what, option if table is not None else "", shape) if new else ()

    def more_packs(self, what: str) -> Iterator[Remedy]:
        shape, packs = self.floor.shape, self.run.what.config.data.packs_per_step
        doubled = replace(shape, batches=2 * shape.batches)
        yield from self.tried(what, f"--data.packs_per_step {2 * packs}", doubled, packs=2)


def findings(asked: TrainingRuleInput) -> list[Finding]:
    """All that would save anything, the greatest gain first."""
    return ranked(one for rule in _RULES for one in rule(asked))


def _data(asked: TrainingRuleInput) -> Iterator[Finding]:
    data = asked.run.what.config.data
    evidence = (
        f"waiting for data takes {asked.each(parts.DATA)}",
        (f"a window of {counted(data.window, 'sample')} is packed at once"),
    )
    option = f"--data.window {max(1, data.window // 4)}"
    remedy = Remedy("data on a faster disk, or smaller windows", asked.explained.share(parts.DATA), option)
    yield Finding("system", "data-bound: steps wait for their packs", "host", evidence, (remedy,))


def _checkpoints(asked: TrainingRuleInput) -> Iterator[Finding]:
    lost, every = asked.explained.share(parts.CHECKPOINTS), asked.run.what.config.run.checkpoint_every
    times = max(2, math.ceil(lost / _SELDOM))
    evidence = f"checkpoints, one in {counted(every, 'step')}, take {asked.each(parts.CHECKPOINTS)} on average"
    remedy = Remedy("checkpoints less often", lost * (1 - 1 / times), f"--run.checkpoint_every {every * times}")
    yield Finding("system", "checkpoints hold the steps up", "host", (evidence,), (remedy,))


def _between(asked: TrainingRuleInput) -> Iterator[Finding]:
    lost, every = asked.explained.share(parts.BETWEEN), asked.run.what.config.run.log_every
    remedy = Remedy("processor cores that nothing else uses", lost)
    if every < 10:
        remedy = Remedy("lines of the log less often", lost * (1 - every / 10), "--run.log_every 10")
    evidence = f"the host between steps takes {asked.each(parts.BETWEEN)}"
    yield Finding("system", "host-bound: the device waits between steps", "host", (evidence,), (remedy,))


def _launches(asked: TrainingRuleInput) -> Iterator[Finding]:
    run, lost = asked.run, asked.explained.share(parts.LAUNCHES)
    evidence = [f"the device waits within steps: {asked.each(parts.LAUNCHES)}"]
    if run.what.kind == "cpu":
        symptom = "small operations: Python and dispatch take longer than they do"
        option = f"--data.tokens_per_pack {4 * run.what.config.data.tokens_per_pack}"
        remedy = Remedy("packs of four times the tokens, a quarter as many", 0.75 * lost, option)
    elif parts.REPLAYED not in run.steady.phases:
        symptom = "host-bound: launching takes longer than the kernels"
        waited = share(run.steady.phases.get("log", 0.0), run.steady.seconds)
        evidence.append(f"the host waits for the device for {waited} of the time")
        remedy = Remedy("packs whose sequences all have one length, which are captured and replayed", lost)
    else:
        return
    yield Finding("graph", symptom, "launch", tuple(evidence), (remedy,))


def _slowest(asked: TrainingRuleInput) -> Iterator[Finding]:
    if asked.run.slowest is not None:
        rank, _ = asked.run.slowest
        evidence = f"rank {rank} computes longest; the others lose {asked.each(parts.SLOWEST)}"
        remedy = Remedy(f"rank {rank} on a device as fast as the others", asked.explained.share(parts.SLOWEST))
        symptom = f"poor scaling: all ranks wait for rank {rank}"
        yield Finding("system", symptom, "scheduling", (evidence,), (remedy,))


def _messages(asked: TrainingRuleInput) -> Iterator[Finding]:
    layout, likely, lost = asked.run.what.layout, asked.floor.likely, asked.explained.share(parts.MESSAGES)
    if layout.ranks == 1 or lost <= 0:
        return
    told = [] if likely is None else sorted(likely.messages.items(), key=lambda one: -one[1].exposed)
    evidence = [f"messages that nothing hides take {asked.each(parts.MESSAGES)}"]
    evidence += [f"of them for {name}, predicted: {seconds(one.exposed)} a step" for name, one in told[:2]]
    remedies: list[Remedy] = []
    if layout.tp > 1 and not layout.overlap:
        remedies += asked.divided("messages of tp beside products", overlap=True, sequence_parallel=True)
    if layout.zero == 3:
        remedies += asked.divided("weights whole on each rank (ZeRO 2)", zero=2)
    if layout.zero == 2:
        remedies += asked.divided("gradients summed once a step (ZeRO 1)", zero=1)
    remedies += asked.more_packs("twice the packs a step, so half as many sums of gradients")
    remedies = remedies or [Remedy("links that are faster, or fewer ranks", lost)]
    symptom = "exposed communication: ranks wait for messages"
    yield Finding("system", symptom, "communication", tuple(evidence), tuple(remedies))


def _bubbles(asked: TrainingRuleInput) -> Iterator[Finding]:
    shape, layout = asked.floor.shape, asked.run.what.layout
    if layout.pp == 1 or asked.explained.share(parts.BUBBLE) <= 0:
        return
    remedies = list(asked.more_packs("twice the micro-batches"))
    for schedule in ("interleaved", "zero-bubble", "zero-bubble-v"):
        remedies += asked.divided(f"the schedule {schedule}", schedule=schedule)
    batches = counted(shape.batches, "micro-batch", "micro-batches")
    evidence = (
        f"bubbles take {asked.each(parts.BUBBLE)}",
        (f"{counted(layout.pp, 'stage')}, {batches}, schedule {layout.schedule}"),
    )
    symptom = "pipeline bubbles: stages wait for each other"
    yield Finding("system", symptom, "scheduling", evidence, tuple(remedies))


def _again(asked: TrainingRuleInput) -> Iterator[Finding]:
    lost, recompute, shape = asked.explained.share(parts.AGAIN), asked.run.what.recompute, asked.floor.shape
    if lost <= 0:
        return
    remedies: list[Remedy] = []
    for less in takewhile(lambda one: one != recompute, shape.recomputes):
        remedies += asked.tried(f"recompute {less}, which fits", f"--run.recompute {less}", shape, less)
    remedies = remedies or [Remedy("more ranks to divide the state, so that activations fit", lost)]
    evidence = f"recompute = {recompute} takes {asked.each(parts.AGAIN)}"
    symptom = "activations are computed again in the backward pass"
    yield Finding("graph", symptom, "compute", (evidence,), tuple(remedies))


def _optimizer(asked: TrainingRuleInput) -> Iterator[Finding]:
    run, floor, packs = asked.run, asked.floor, asked.run.what.config.data.packs_per_step
    taken = asked.explained.seconds("optimizer", "update") or floor.update
    what = "twice the packs a step, so half as many updates"
    remedy = Remedy(what, taken / run.whole.seconds / 2, f"--data.packs_per_step {2 * packs}")
    evidence = (
        f"updates take {share(taken, run.whole.seconds)} of the time; each moves "
        f"{quantity(floor.bytes / run.whole.steps, 'B')} for {counted(run.whole.tokens / run.whole.steps, 'token')}",
    )
    if floor.shape.offload:
        here = replace(floor.shape, offload=False)
        kept = asked.tried("masters and moments on the device", "--optimizer.offload false", here)
        yield Finding("system", "updates stream state from the host", "memory", evidence, (*kept, remedy))
    elif taken > _FEW_BYTES * floor.bytes / floor.peaks.bandwidth:
        symptom = "small operations: updates take longer than their bytes, for few tokens"
        yield Finding("graph", symptom, "launch", evidence, (remedy,))
    else:
        yield Finding("kernel", "memory-bound optimizer: an update for few tokens", "memory", evidence, (remedy,))


def _precision(asked: TrainingRuleInput) -> Iterator[Finding]:
    run, likely = asked.run, asked.floor.likely
    if run.trace is not None and likely is not None and run.trace.wide >= _WIDE:
        longer = asked.explained.seconds("products") - run.whole.steps * likely.products * run.filled
        evidence = f"{run.trace.wide:.0%} of the time of products is that of float32 kernels"
        remedy = Remedy("products in bfloat16", run.trace.wide * longer / run.whole.seconds)
        yield Finding("graph", "wrong precision: products in float32", "compute", (evidence,), (remedy,))


def _warm_up(asked: TrainingRuleInput) -> Iterator[Finding]:
    lost, given = asked.explained.share(parts.WARM_UP), asked.run.what.config.run
    longer = f"--run.epochs {10 * given.epochs:g}" if given.epochs else f"--run.steps {10 * (given.steps or 0)}"
    evidence = f"the first interval takes {seconds(asked.run.warm_up)} longer than others"
    remedy = Remedy("ten times the steps, for each of them", 0.9 * lost, longer)
    yield Finding("graph", "most of a short run is its beginning", "compilation", (evidence,), (remedy,))


_RULES = (
    _data,
    _checkpoints,
    _between,
    _launches,
    _slowest,
    _messages,
    _bubbles,
    _again,
    _optimizer,
    _precision,
    _warm_up,
)
