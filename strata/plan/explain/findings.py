"""What can hold a run back, each with the figures that tell it and what its remedy would save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strata.cost.step_model import StepSeconds
from strata.plan.explain.explanation import OperationTime
from strata.plan.explain.measurement import Measurement, shared_prefix_tokens
from strata.plan.explain.split import LAUNCHES, PROMPTS, TAKEN, split_steps
from strata.plan.explain.waterfalls import QUEUEING, TOKENIZATION, Explained
from strata.plan.explain.what_if import WhatIf
from strata.plan.waterfall import Cause, Layer, Remedy
from strata.text.counted import counted

# A tokenizer that is none of the bottleneck takes so long for a token, in seconds: what the tokenizers library does.
_TOKENIZED = 3e-6
# What the loop does between steps besides scheduling, in seconds: on a CPU it prepares the step's inputs there (0.7 to
# 0.9 ms on a core of an EPYC), on a GPU nearly all of it is done while the step before runs.
_LOOP_ON_CPU, _LOOP_ON_GPU = 1e-3, 1e-4
# Time for which the engine's thread had no processor, as a share: less it also waits for other threads of its steps.
_TAKEN = 0.1
# Tokens of a step with prompts that are tried in place of a larger limit.
_CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)
# Requests of which the longest make a tail: those beyond this share of all.
_TAIL_SHARE = 0.9


@dataclass(frozen=True)
class Finding:
    """One cause and its remedy. change: what it changes of the engine's options, so that it can be tried; None if no
    option does it. replaces: steps measured under the change stand in for those of the run."""

    name: str
    layer: Layer
    symptom: str
    cause: Cause
    evidence: tuple[str, ...]
    remedy: Remedy
    change: Mapping[str, Any] | None = None
    options: Mapping[str, int | bool] = field(default_factory=dict)
    replaces: bool = False

    def tried(self, gain: float, evidence: str) -> Finding:
        """With what a probe found."""
        return replace(self, remedy=replace(self.remedy, gain=gain), evidence=(*self.evidence, evidence))


@dataclass(frozen=True)
class RuleInput:
    """What the rules look at. wanted: steps in the dtype that was asked for, None where the run has it."""

    measured: Measurement
    explained: Explained
    times: StepSeconds
    wanted: StepSeconds | None
    what_if: WhatIf

    @property
    def wall(self) -> float:
        """Of what is explained."""
        return self.explained.waterfall.measured

    def part(self, name: str) -> float:
        """The share of a part in what is explained."""
        return math.fsum(part.seconds for part in self.explained.waterfall.parts if part.name == name) / self.wall


def findings(asked: RuleInput) -> list[Finding]:
    """All that would save anything, the greatest gain first."""
    found = [one for rule in _RULES for one in rule(asked) if one.remedy.gain > 0]
    return sorted(found, key=lambda one: one.remedy.gain, reverse=True)


def _host_loop(asked: RuleInput) -> Iterable[Finding]:
    run, what_if = asked.measured, asked.what_if
    steps = len(run.steps)
    if what_if.subject != "run" or not run.requests:
        return
    scheduler = what_if.base.host
    needed = scheduler + (_LOOP_ON_CPU if run.host_is_device else _LOOP_ON_GPU)
    took = what_if.between
    yield Finding(
        "slow host loop",
        "system",
        "low utilization: the device waits for the host between steps",
        "host",
        (f"{1e6 * took:,.0f} us between steps; {1e6 * needed:,.0f} are usual, {1e6 * scheduler:,.0f} schedule",),
        Remedy("a host loop as short as usual", steps * (took - needed) / run.wall),
    )


def _tokenizer(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    took = run.host.get(TOKENIZATION, 0.0)
    tokens = sum(len(request.prompt) for request in run.requests)
    if not took or not tokens or asked.what_if.subject != "run":
        return
    yield Finding(
        "slow tokenizer",
        "system",
        "low utilization: prompts become ids before anything runs",
        "host",
        (f"tokenization took {took:.3f} s, {1e6 * took / tokens:.1f} us a token; {1e6 * _TOKENIZED:.0f} is usual",),
        Remedy("a faster tokenizer, or ids as prompts", max(0.0, took - _TOKENIZED * tokens) / run.wall),
    )


def _contention(asked: RuleInput) -> Iterable[Finding]:
    share = asked.part(TAKEN)
    if share < _TAKEN:
        return
    yield Finding(
        "CPU contention",
        "system",
        "low utilization: other work takes the processors that run the steps",
        "host",
        (f"for {share:.0%} of the time the engine's thread had work and no processor",),
        Remedy("processors of its own (taskset, fewer processes beside it)", share),
    )


def _launches(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    if run.host_is_device or not run.unrecorded:
        return
    share = asked.part(LAUNCHES)
    yield Finding(
        "eager launches",
        "graph",
        "low utilization: the device waits inside steps for launches by the host",
        "launch",
        (f"{run.unrecorded:,} of {counted(len(run.steps), 'step')} replayed no CUDA graph",),
        Remedy("steps of recorded sizes", share, "--max-num-batched-tokens, --max-num-seqs"),
    )


def _unfused(asked: RuleInput) -> Iterable[Finding]:
    facts, run = asked.measured.facts, asked.measured
    more = sum(facts.operations.values()) - sum(facts.expected.values())
    if more <= 0 or not facts.expected:
        return
    calls = {name: count for name, count in facts.operations.items() if count}
    each = [one.seconds / (calls[one.name] * len(run.steps)) for one in asked.explained.operations if one.name in calls]
    gain = more * min(each, default=0.0) * len(run.steps) / run.wall
    yield Finding(
        "unfused graph",
        "graph",
        "busy but slow: operations that the passes would merge run one by one",
        "memory",
        (
            f"{counted(sum(facts.operations.values()), 'operation')} ran, "
            f"{sum(facts.expected.values())} after all passes",
        ),
        Remedy("the passes that merge and fuse", gain, "--passes all"),
        change={"passes": "all"},
        replaces=True,
    )


def _precision(asked: RuleInput) -> Iterable[Finding]:
    facts = asked.measured.facts
    if asked.wanted is None:
        return
    workloads = [step.workload for step in asked.measured.steps]
    chosen = workloads[:: max(1, len(workloads) // 32)]
    now, then = (math.fsum(times.seconds(work) for work in chosen) for times in (asked.times, asked.wanted))
    yield Finding(
        "wider dtype than asked",
        "kernel",
        f"busy but slow: weights and products are {facts.dtype}, {facts.asked_dtype} was asked for",
        "compute",
        (f"steps take {then / now:.0%} of the time in {facts.asked_dtype}, as predicted",),
        Remedy(f"weights in {facts.asked_dtype}", asked.what_if.replayed_share * (1 - then / now), "--dtype"),
        change={"dtype": facts.asked_dtype},
        replaces=True,
    )


def _unpacked(asked: RuleInput) -> Iterable[Finding]:
    found = asked.measured.unpacked
    if found is None:
        return
    took = _seconds_of(split_steps(asked.measured, asked.times).operations, found.operation)
    here = _seconds_of(asked.explained.operations, found.operation)
    gain = here / asked.wall * (1 - found.plain / took) if took else 0.0
    plain = f"weights in floats: {found.values} is unpacked in every call of {found.operation} on a CPU"
    yield Finding(
        "unpacked weights",
        "kernel",
        f"busy but slow: {found.operation} unpacks weights in {found.values} in every call",
        "memory",
        (f"{found.operation} takes {took:.3f} s; {found.plain:.3f} by plain weights, as such products take here",),
        Remedy(plain, gain, "leave out --quantization") if found.asked else Remedy(f"a checkpoint of {plain}", gain),
        change={"quantization": None} if found.asked else None,
        replaces=True,
    )


def _seconds_of(operations: Iterable[OperationTime], name: str) -> float:
    return math.fsum(one.seconds for one in operations if one.name == name)


def _pool(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    longest = [len(one.prompt) + one.outputs for one in run.requests]
    wanted = sum(sorted(longest, reverse=True)[: run.facts.slots])
    if wanted <= run.facts.kv_tokens:
        return
    size = run.facts.page_size
    pages = sum(-(-length // size) + 1 for length in sorted(longest, reverse=True)[: run.facts.slots])
    lost = f"{counted(run.preemptions, 'preemption')}; the KV pages hold {counted(run.facts.kv_tokens, 'token')}"
    yield Finding(
        "tiny KV pool",
        "system",
        "KV capacity: sequences wait for pages or lose them",
        "preemption" if run.preemptions else "scheduling",
        (f"{lost}, the sequences that could run at once have {wanted:,}",),
        Remedy(
            f"KV pages for {counted(pages * size, 'token')}",
            asked.what_if.gain({"pages": pages}),
            "--num-pages, or --kv-cache-dtype fp8",
        ),
        change={"num_pages": pages},
        options={"pages": pages},
    )


def _prefixes(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    tokens = sum(len(request.prompt) for request in run.requests)
    shared = shared_prefix_tokens(run.requests, run.facts.page_size)
    if run.facts.caches_prefixes or not shared:
        return
    changes = {"caches_prefixes": True}
    yield Finding(
        "no prefix cache",
        "system",
        "busy with prompts whose beginnings were computed before",
        "scheduling",
        (f"{shared:,} of {tokens:,} prompt tokens begin earlier prompts too ({shared / tokens:.0%})",),
        Remedy("the prefix cache", asked.what_if.gain(changes), "--enable-prefix-caching"),
        change={"enable_prefix_caching": True},
        options=changes,
    )


def _batch_cap(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    slots = min(len(run.requests), 256)
    if run.facts.slots >= slots:
        return
    full = sum(1 for step in run.steps if len(step.chunks) >= run.facts.slots)
    yield Finding(
        "batch cap",
        "system",
        "low arithmetic intensity: fewer sequences run at once than there are",
        "scheduling",
        (f"{full:,} of {counted(len(run.steps), 'step')} had all {run.facts.slots} sequences that may run at once",),
        Remedy(f"{counted(slots, 'sequence')} at once", asked.what_if.gain({"slots": slots}), "--max-num-seqs"),
        change={"max_num_seqs": slots},
        options={"slots": slots},
    )


def _chunks(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    if asked.what_if.subject != "tail" or asked.part(PROMPTS) <= 0:
        return
    largest = max(step.tokens for step in run.steps)
    smaller = [tokens for tokens in _CHUNKS if run.facts.slots <= tokens < min(largest, run.facts.step_tokens)]
    gains = {tokens: asked.what_if.gain({"step_tokens": tokens}) for tokens in smaller}
    if not gains:
        return
    best = max(gains, key=lambda tokens: gains[tokens])
    yield Finding(
        "huge chunks",
        "system",
        "long tails: tokens wait for the prompts of others in the same step",
        "scheduling",
        (f"steps had up to {counted(largest, 'token')}",),
        Remedy(f"steps of {counted(best, 'token')} at most", gains[best], "--max-num-batched-tokens"),
        change={"max_num_batched_tokens": best},
        options={"step_tokens": best},
    )


def _long_tail(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    if len(run.requests) < 3 or asked.what_if.subject != "run":
        return
    outputs = sorted(request.outputs for request in run.requests)
    usual = outputs[math.ceil(_TAIL_SHARE * len(outputs)) - 1]
    if outputs[-1] <= 1.5 * usual:
        return
    alone = math.fsum(step.seconds for step in run.steps if len(step.chunks) <= len(outputs) * (1 - _TAIL_SHARE))
    cut = tuple(replace(request, outputs=min(request.outputs, usual)) for request in run.requests)
    yield Finding(
        "long tail",
        "system",
        "long tails: a few requests run on after all others have ended",
        "scheduling",
        (
            f"the longest has {outputs[-1]:,} output tokens, nine of ten have {usual:,} or fewer",
            f"steps with a tenth of the requests or fewer took {alone / run.wall:.0%} of the time",
        ),
        Remedy(f"outputs of {counted(usual, 'token')} at most, or other work beside the tail",
               asked.what_if.gain(requests=cut), "max_tokens"),
    )  # fmt: skip


def _queueing(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    share = asked.part(QUEUEING)
    if asked.what_if.subject != "request" or len(run.requests) < 2:
        return
    yield Finding(
        "queueing",
        "system",
        "high latency with good throughput: requests wait before they run",
        "queueing",
        (f"{share:.0%} of a request's time is over before its first step begins",),
        Remedy("a second replica", asked.what_if.gain(requests=run.requests[::2]), "--data-parallel-size"),
    )


def _other_processes(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    if not run.device.others or run.host_is_device:
        return
    expected = math.fsum(asked.times.seconds(step.workload) for step in run.steps)
    yield Finding(
        "another process on the GPU",
        "system",
        "busy but slow: the device is shared",
        "host",
        (f"beside this process: {', '.join(run.device.others)}", _slower(run.stepping, expected)),
        Remedy("the device to itself", max(0.0, run.stepping - expected) / run.wall),
    )


def _held_down(asked: RuleInput) -> Iterable[Finding]:
    run = asked.measured
    reasons = [one for one in run.device.slowed_by if "idle" not in one]
    if not reasons:
        return
    expected = math.fsum(asked.times.seconds(step.workload) for step in run.steps)
    yield Finding(
        "power or thermal limit",
        "system",
        "busy but slow: the device holds its clocks down",
        "power",
        (f"clocks held down by {', '.join(reasons)}", _slower(run.stepping, expected)),
        Remedy("a higher power limit, or better cooling", max(0.0, run.stepping - expected) / run.wall),
    )


def _slower(took: float, expected: float) -> str:
    return f"steps took {took:.3f} s, {took / expected:.2f} times what is predicted" if expected else ""


def _messages(asked: RuleInput) -> Iterable[Finding]:
    if asked.measured.facts.ranks == 1:
        return
    share = asked.explained.waterfall.seconds(cause="communication") / asked.wall
    yield Finding(
        "exposed messages",
        "system",
        "poor scaling: ranks wait for each other's messages",
        "communication",
        (f"messages between {asked.measured.facts.ranks} ranks take {share:.0%} of the time beyond their floor",),
        Remedy("messages beside products, or fewer ranks", share, "--overlap-tokens"),
    )


_RULES = (
    _host_loop,
    _tokenizer,
    _contention,
    _launches,
    _unfused,
    _precision,
    _unpacked,
    _pool,
    _prefixes,
    _batch_cap,
    _chunks,
    _long_tail,
    _queueing,
    _other_processes,
    _held_down,
    _messages,
)
