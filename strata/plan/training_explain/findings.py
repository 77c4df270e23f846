"""What can hold a training run back, each with the figures that tell it and what its remedies would save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from strata.plan.explain.explanation import Explained
from strata.plan.explain.verdict import Finding, ranked
from strata.plan.report.units import quantity, seconds, share
from strata.plan.training_explain import run_waterfall as parts
from strata.plan.training_explain.recorded_run import RecordedRun
from strata.plan.training_explain.run_floor import RunFloor, likely_time
from strata.plan.waterfall import Remedy
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
        whole = self.run.seconds / self.run.steps
        return f"{seconds(self.explained.share(name) * whole)} of the {seconds(whole)} of a step"

    def option(self, name: str, value: object) -> str:
        """Of the layout, if the run has a table for it that this would change."""
        return f"--parallel.{name} {value}" if self.run.what.config.parallel is not None else ""

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
        gain = self.run.steps * self.run.filled * (now.seconds - then.seconds / packs) / self.run.seconds
        if gain > 0:
            yield Remedy(what, gain, option)


def findings(asked: TrainingRuleInput) -> list[Finding]:
    """All that would save anything, the greatest gain first."""
    return ranked(one for rule in _RULES for one in rule(asked))


def _data(asked: TrainingRuleInput) -> Iterator[Finding]:
    gain, data = asked.explained.share(parts.DATA), asked.run.what.config.data
    yield Finding(
        "system",
        "data-bound: steps wait for their packs",
        "host",
        (
            f"waiting for data takes {asked.each(parts.DATA)}",
            f"a window of {counted(data.window, 'sample')} is packed at once",
        ),
        (Remedy("data on a faster disk, or smaller windows", gain, f"--data.window {max(1, data.window // 4)}"),),
    )


def _checkpoints(asked: TrainingRuleInput) -> Iterator[Finding]:
    lost, every = asked.explained.share(parts.CHECKPOINTS), asked.run.what.config.run.checkpoint_every
    times = max(2, math.ceil(lost / _SELDOM))
    yield Finding(
        "system",
        "checkpoints hold the steps up",
        "host",
        (f"checkpoints, one in {counted(every, 'step')}, take {asked.each(parts.CHECKPOINTS)} on average",),
        (Remedy("checkpoints less often", lost * (1 - 1 / times), f"--run.checkpoint_every {every * times}"),),
    )


def _between(asked: TrainingRuleInput) -> Iterator[Finding]:
    lost, every = asked.explained.share(parts.BETWEEN), asked.run.what.config.run.log_every
    remedy = Remedy("processor cores that nothing else uses", lost)
    if every < 10:
        remedy = Remedy("lines of the log less often", lost * (1 - every / 10), "--run.log_every 10")
    yield Finding(
        "system",
        "host-bound: the device waits between steps",
        "host",
        (f"the host between steps takes {asked.each(parts.BETWEEN)}",),
        (remedy,),
    )


def _launches(asked: TrainingRuleInput) -> Iterator[Finding]:
    run, data, lost = asked.run, asked.run.what.config.data, asked.explained.share(parts.LAUNCHES)
    evidence = f"the device waits within steps: {asked.each(parts.LAUNCHES)}"
    if run.what.kind == "cpu":
        option = f"--data.tokens_per_pack {4 * data.tokens_per_pack}"
        fewer = Remedy("packs of four times the tokens, a quarter as many", 0.75 * lost, option)
        symptom = "small operations: Python and dispatch take longer than they do"
        yield Finding("graph", symptom, "launch", (evidence,), (fewer,))
    elif parts.REPLAYED not in run.steady.phases:
        waited = share(run.steady.phases.get("log", 0.0), run.steady.seconds)
        remedy = Remedy("packs whose sequences all have one length, which are recorded and replayed", lost)
        told = (evidence, f"the host waits for the device for {waited} of the time")
        yield Finding("graph", "host-bound: launching takes longer than the kernels", "launch", told, (remedy,))


def _slowest(asked: TrainingRuleInput) -> Iterator[Finding]:
    if asked.run.slowest is None:
        return
    rank, _ = asked.run.slowest
    yield Finding(
        "system",
        f"poor scaling: all ranks wait for rank {rank}",
        "scheduling",
        (f"rank {rank} computes longest; the others lose {asked.each(parts.SLOWEST)}",),
        (Remedy(f"rank {rank} on a device as fast as the others", asked.explained.share(parts.SLOWEST)),),
    )


def _messages(asked: TrainingRuleInput) -> Iterator[Finding]:
    shape, layout = asked.floor.shape, asked.run.what.layout
    lost = asked.explained.share(parts.MESSAGES)
    if layout.ranks == 1 or lost <= 0:
        return
    likely = asked.floor.likely
    told = [] if likely is None else sorted(likely.messages.items(), key=lambda one: -one[1].exposed)
    evidence = [f"messages that nothing hides take {asked.each(parts.MESSAGES)}"]
    evidence += [f"of them for {name}, predicted: {seconds(one.exposed)} a step" for name, one in told[:2]]
    remedies: list[Remedy] = []
    if layout.tp > 1 and not layout.overlap:
        overlapped = replace(shape, layout=replace(layout, sequence_parallel=True, overlap=True))
        options = [asked.option("overlap", "true")]
        if not layout.sequence_parallel:
            options.append(asked.option("sequence_parallel", "true"))
        remedies += asked.tried("messages of tp beside products", " ".join(options).strip(), overlapped)
    if layout.zero == 3:
        less = replace(shape, layout=replace(layout, zero=2))
        remedies += asked.tried("weights whole on each rank (ZeRO 2)", asked.option("zero", 2), less)
    if layout.zero == 2:
        less = replace(shape, layout=replace(layout, zero=1))
        remedies += asked.tried("gradients summed once a step (ZeRO 1)", asked.option("zero", 1), less)
    remedies += _more_packs(asked, "twice the packs a step, so half as many sums of gradients")
    if not remedies:
        remedies.append(Remedy("links that are faster, or fewer ranks", lost))
    yield Finding(
        "system", "exposed communication: ranks wait for messages", "communication", tuple(evidence), tuple(remedies)
    )


def _bubbles(asked: TrainingRuleInput) -> Iterator[Finding]:
    shape, layout = asked.floor.shape, asked.run.what.layout
    if layout.pp == 1 or asked.explained.share(parts.BUBBLE) <= 0:
        return
    remedies = list(_more_packs(asked, "twice the micro-batches"))
    for schedule in ("interleaved", "zero-bubble", "zero-bubble-v"):
        if schedule != layout.schedule:
            other = replace(shape, layout=replace(layout, schedule=schedule))
            remedies += asked.tried(f"the schedule {schedule}", asked.option("schedule", schedule), other)
    yield Finding(
        "system",
        "pipeline bubbles: stages wait for each other",
        "scheduling",
        (
            f"bubbles take {asked.each(parts.BUBBLE)}",
            f"{counted(layout.pp, 'stage')}, {counted(shape.batches, 'micro-batch', 'micro-batches')}, "
            f"schedule {layout.schedule}",
        ),
        tuple(remedies),
    )


def _more_packs(asked: TrainingRuleInput, what: str) -> Iterator[Remedy]:
    shape, packs = asked.floor.shape, asked.run.what.config.data.packs_per_step
    doubled = replace(shape, batches=2 * shape.batches)
    yield from asked.tried(what, f"--data.packs_per_step {2 * packs}", doubled, packs=2)


def _again(asked: TrainingRuleInput) -> Iterator[Finding]:
    lost, recompute = asked.explained.share(parts.AGAIN), asked.run.what.recompute
    if lost <= 0:
        return
    remedies: list[Remedy] = []
    for less in asked.floor.shape.recomputes:
        if less == recompute:
            break
        remedies += asked.tried(f"recompute {less}, which fits", f"--run.recompute {less}", asked.floor.shape, less)
    if not remedies:
        remedies.append(Remedy("more ranks to divide the state, so that activations fit", lost))
    yield Finding(
        "graph",
        "activations are computed again in the backward pass",
        "compute",
        (f"recompute = {recompute} takes {asked.each(parts.AGAIN)}",),
        tuple(remedies),
    )


def _optimizer(asked: TrainingRuleInput) -> Iterator[Finding]:
    run, floor = asked.run, asked.floor
    taken = asked.explained.seconds("optimizer", "update") or floor.update
    moving = floor.bytes / floor.peaks.bandwidth
    packs = run.what.config.data.packs_per_step
    what = "twice the packs a step, so half as many updates"
    remedy = Remedy(what, taken / run.seconds / 2, f"--data.packs_per_step {2 * packs}")
    evidence = (
        f"updates take {share(taken, run.seconds)} of the time; each moves "
        f"{quantity(floor.bytes / run.steps, 'B')} for {counted(run.tokens / run.steps, 'token')}",
    )
    if floor.shape.offload:
        here = replace(floor.shape, offload=False)
        kept = asked.tried("masters and moments on the device", "--optimizer.offload false", here)
        yield Finding("system", "updates stream state from the host", "memory", evidence, (*kept, remedy))
    elif taken > _FEW_BYTES * moving:
        symptom = "small operations: updates take longer than their bytes, for few tokens"
        yield Finding("graph", symptom, "launch", evidence, (remedy,))
    else:
        yield Finding("kernel", "memory-bound optimizer: an update for few tokens", "memory", evidence, (remedy,))


def _precision(asked: TrainingRuleInput) -> Iterator[Finding]:
    run, likely = asked.run, asked.floor.likely
    if run.trace is None or likely is None or run.trace.wide < _WIDE:
        return
    longer = asked.explained.seconds("products") - run.steps * likely.products * run.filled
    yield Finding(
        "graph",
        "wrong precision: products in float32",
        "compute",
        (f"{run.trace.wide:.0%} of the time of products is that of float32 kernels",),
        (Remedy("products in bfloat16", run.trace.wide * longer / run.seconds),),
    )


def _warm_up(asked: TrainingRuleInput) -> Iterator[Finding]:
    lost, given = asked.explained.share(parts.WARM_UP), asked.run.what.config.run
    longer = f"--run.epochs {10 * given.epochs:g}" if given.epochs else f"--run.steps {10 * (given.steps or 0)}"
    yield Finding(
        "graph",
        "most of a short run is its beginning",
        "compilation",
        (f"the first interval takes {seconds(asked.run.warm_up)} longer than others",),
        (Remedy("ten times the steps, for each of them", 0.9 * lost, longer),),
    )


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
