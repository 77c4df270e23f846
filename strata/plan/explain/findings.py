"""What can hold a run back, each with the figures that tell it and what its remedy would save."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from strata.cost.step_model import StepModel
from strata.engine.watch.verdict import Cause, Remedy
from strata.plan.explain.explanation import Explained
from strata.plan.explain.measurement import Measurement, shared_prefix_tokens
from strata.plan.explain.split import LAUNCHES, PROMPTS, TAKEN, split_steps
from strata.plan.explain.verdict import Finding, ranked
from strata.plan.explain.waterfalls import QUEUEING, TOKENIZATION
from strata.plan.explain.what_if import WhatIf
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
class RuleInput:
    """What the rules look at. wanted: steps in the dtype that was asked for, None where the run has it."""

    measured: Measurement
    explained: Explained
    times: StepModel
    wanted: StepModel | None
    what_if: WhatIf

    @property
    def subject(self) -> str:
        return self.what_if.subject

    def of_option(
        self, symptom: str, evidence: str, cause: Cause, what: str, flags: str, change: Mapping[str, Any], **facts: Any
    ) -> Finding:
        """An option of the engine's scheduler: what it would save is the run through that scheduler once more.
        change: see `Finding`. facts: the same of the engine's facts."""
        remedy = Remedy(what, self.what_if.gain(facts), flags)
        return Finding("system", symptom, cause, (evidence,), (remedy,), change, facts)


def findings(asked: RuleInput) -> list[Finding]:
    """All that would save anything, the greatest gain first."""
    return ranked(one for rule in _RULES for one in rule(asked))


def _of_host(symptom: str, evidence: str, what: str, gain: float) -> Finding:
    """What no option mends."""
    return Finding("system", symptom, "host", (evidence,), (Remedy(what, gain),))


def _host_loop(asked: RuleInput) -> Iterator[Finding]:
    run, what_if = asked.measured, asked.what_if
    if asked.subject != "run" or not run.requests:
        return
    scheduler, took = what_if.base.host, what_if.between
    needed = scheduler + (_LOOP_ON_CPU if run.host_is_device else _LOOP_ON_GPU)
    yield _of_host(
        "low utilization: the device waits for the host between steps",
        f"{1e6 * took:,.0f} us between steps; {1e6 * needed:,.0f} are usual, {1e6 * scheduler:,.0f} schedule",
        "a host loop as short as usual",
        len(run.steps) * (took - needed) / run.wall,
    )


def _tokenizer(asked: RuleInput) -> Iterator[Finding]:
    run = asked.measured
    took = run.host.get(TOKENIZATION, 0.0)
    tokens = sum(len(request.prompt) for request in run.requests)
    if took and tokens and asked.subject == "run":
        yield _of_host(
            "low utilization: prompts become ids before anything runs",
            f"tokenization took {took:.3f} s, {1e6 * took / tokens:.1f} us a token; {1e6 * _TOKENIZED:.0f} is usual",
            "a faster tokenizer, or ids as prompts",
            (took - _TOKENIZED * tokens) / run.wall,
        )


def _contention(asked: RuleInput) -> Iterator[Finding]:
    share = asked.explained.share(TAKEN)
    if share >= _TAKEN:
        yield _of_host(
            "low utilization: other work takes the processors that run the steps",
            f"for {share:.0%} of the time the engine's thread had work and no processor",
            "processors of its own (taskset, fewer processes beside it)",
            share,
        )


def _launches(asked: RuleInput) -> Iterator[Finding]:
    run = asked.measured
    if not run.host_is_device and (eager := sum(step.eager for step in run.steps)):
        symptom = "low utilization: the device waits inside steps for launches by the host"
        evidence = f"{eager:,} of {counted(len(run.steps), 'step')} replayed no CUDA graph"
        gain = asked.explained.share(LAUNCHES)
        remedy = Remedy("steps of captured sizes", gain, "--max-num-batched-tokens, --max-num-seqs")
        yield Finding("graph", symptom, "launch", (evidence,), (remedy,))


def _unfused(asked: RuleInput) -> Iterator[Finding]:
    facts, run = asked.measured.facts, asked.measured
    ran, expected = (sum(counts.values()) for counts in (facts.operations, facts.expected))
    if ran <= expected or not facts.expected:
        return
    calls = {name: count for name, count in facts.operations.items() if count}
    each = [one.seconds / (calls[one.name] * len(run.steps)) for one in asked.explained.operations if one.name in calls]
    gain = (ran - expected) * min(each, default=0.0) * len(run.steps) / run.wall
    symptom = "busy but slow: operations that the passes would merge run one by one"
    evidence = f"{counted(ran, 'operation')} ran, {expected} after all passes"
    remedy = Remedy("the passes that merge and fuse", gain, "--passes all")
    yield Finding("graph", symptom, "memory", (evidence,), (remedy,), {"passes": "all"}, replaces=True)


def _precision(asked: RuleInput) -> Iterator[Finding]:
    facts = asked.measured.facts
    if asked.wanted is None:
        return
    workloads = [step.workload for step in asked.measured.steps]
    chosen = workloads[:: max(1, len(workloads) // 32)]
    now, then = (math.fsum(times.seconds(work) for work in chosen) for times in (asked.times, asked.wanted))
    symptom = f"busy but slow: weights and products are {facts.dtype}, {facts.asked_dtype} was asked for"
    evidence = f"steps take {then / now:.0%} of the time in {facts.asked_dtype}, as predicted"
    remedy = Remedy(f"weights in {facts.asked_dtype}", asked.what_if.replayed_share * (1 - then / now), "--dtype")
    yield Finding("kernel", symptom, "compute", (evidence,), (remedy,), {"dtype": facts.asked_dtype}, replaces=True)


def _unpacked(asked: RuleInput) -> Iterator[Finding]:
    found = asked.measured.unpacked
    if found is None:
        return
    split = split_steps(asked.measured, asked.times)
    took = sum(one.seconds for one in split.operations if one.name == found.operation)
    here = asked.explained.seconds(found.operation)
    gain = here / asked.explained.waterfall.measured * (1 - found.plain / took) if took else 0.0
    plain = f"weights in floats: {found.values} is unpacked in every call of {found.operation} on a CPU"
    symptom = f"busy but slow: {found.operation} unpacks weights in {found.values} in every call"
    evidence = f"{found.operation} takes {took:.3f} s; {found.plain:.3f} by plain weights, as such products take here"
    remedy, change = Remedy(f"a checkpoint of {plain}", gain), None
    if found.asked:
        remedy, change = Remedy(plain, gain, "leave out --quantization"), {"quantization": None}
    yield Finding("kernel", symptom, "memory", (evidence,), (remedy,), change, replaces=True)


def _pool(asked: RuleInput) -> Iterator[Finding]:
    run, size = asked.measured, asked.measured.facts.page_size
    longest = sorted((len(one.prompt) + one.outputs for one in run.requests), reverse=True)[: run.facts.slots]
    if sum(longest) <= run.facts.kv_tokens:
        return
    pages = sum(-(-length // size) + 1 for length in longest)
    lost = f"{counted(run.preemptions, 'preemption')}; the KV pages hold {counted(run.facts.kv_tokens, 'token')}"
    yield asked.of_option(
        "KV capacity: sequences wait for pages or lose them",
        f"{lost}, the sequences that could run at once have {sum(longest):,}",
        "preemption" if run.preemptions else "scheduling",
        f"KV pages for {counted(pages * size, 'token')}",
        "--num-pages, or --kv-cache-dtype fp8",
        {"num_pages": pages},
        kv_tokens=pages * size,
    )


def _prefixes(asked: RuleInput) -> Iterator[Finding]:
    run = asked.measured
    tokens = sum(len(request.prompt) for request in run.requests)
    shared = shared_prefix_tokens(run.requests, run.facts.page_size)
    if shared and not run.facts.caches_prefixes:
        yield asked.of_option(
            "busy with prompts whose beginnings were computed before",
            f"{shared:,} of {tokens:,} prompt tokens begin earlier prompts too ({shared / tokens:.0%})",
            "scheduling",
            "the prefix cache",
            "--enable-prefix-caching",
            {"enable_prefix_caching": True},
            caches_prefixes=True,
        )


def _batch_cap(asked: RuleInput) -> Iterator[Finding]:
    run, slots = asked.measured, min(len(asked.measured.requests), 256)
    if run.facts.slots < slots:
        full = sum(1 for step in run.steps if len(step.chunks) >= run.facts.slots)
        yield asked.of_option(
            "low arithmetic intensity: fewer sequences run at once than there are",
            f"{full:,} of {counted(len(run.steps), 'step')} had all {run.facts.slots} sequences that may run at once",
            "scheduling",
            f"{counted(slots, 'sequence')} at once",
            "--max-num-seqs",
            {"max_num_seqs": slots},
            slots=slots,
        )


def _chunks(asked: RuleInput) -> Iterator[Finding]:
    run = asked.measured
    if asked.subject != "tail" or asked.explained.share(PROMPTS) <= 0:
        return
    largest = max(step.tokens for step in run.steps)
    smaller = [tokens for tokens in _CHUNKS if run.facts.slots <= tokens < min(largest, run.facts.step_tokens)]
    if smaller:
        best = max(smaller, key=lambda tokens: asked.what_if.gain({"step_tokens": tokens}))
        yield asked.of_option(
            "long tails: tokens wait for the prompts of others in the same step",
            f"steps had up to {counted(largest, 'token')}",
            "scheduling",
            f"steps of {counted(best, 'token')} at most",
            "--max-num-batched-tokens",
            {"max_num_batched_tokens": best},
            step_tokens=best,
        )


def _long_tail(asked: RuleInput) -> Iterator[Finding]:
    run = asked.measured
    if len(run.requests) < 3 or asked.subject != "run":
        return
    outputs = sorted(request.outputs for request in run.requests)
    usual = outputs[math.ceil(_TAIL_SHARE * len(outputs)) - 1]
    if outputs[-1] <= 1.5 * usual:
        return
    alone = math.fsum(step.seconds for step in run.steps if len(step.chunks) <= len(outputs) * (1 - _TAIL_SHARE))
    gain = asked.what_if.gain(requests=[replace(one, outputs=min(one.outputs, usual)) for one in run.requests])
    symptom = "long tails: a few requests run on after all others have ended"
    evidence = (
        f"the longest has {outputs[-1]:,} output tokens, nine of ten have {usual:,} or fewer",
        f"steps with a tenth of the requests or fewer took {alone / run.wall:.0%} of the time",
    )
    what = f"outputs of {counted(usual, 'token')} at most, or other work beside the tail"
    yield Finding("system", symptom, "scheduling", evidence, (Remedy(what, gain, "max_tokens"),))


def _queueing(asked: RuleInput) -> Iterator[Finding]:
    requests = asked.measured.requests
    if asked.subject == "request" and len(requests) > 1:
        symptom = "high latency with good throughput: requests wait before they run"
        evidence = f"{asked.explained.share(QUEUEING):.0%} of a request's time is over before its first step begins"
        gain = asked.what_if.gain(requests=requests[::2])
        remedy = Remedy("a second replica", gain, "--data-parallel-size")
        yield Finding("system", symptom, "queueing", (evidence,), (remedy,))


def _slowed(asked: RuleInput) -> Iterator[Finding]:
    """Steps that take longer than predicted, while the device says why."""
    run = asked.measured
    held_down = ", ".join(one for one in run.device.slowed_by if "idle" not in one)
    others = "" if run.host_is_device else ", ".join(run.device.others)
    if not held_down and not others:
        return
    expected = math.fsum(asked.times.seconds(step.workload) for step in run.steps)
    slower = f"steps took {run.stepping:.3f} s, {run.stepping / expected:.2f} times what is predicted"
    gain = (run.stepping - expected) / run.wall
    if others:
        remedy = Remedy("the device to itself", gain)
        evidence = f"beside this process: {others}", slower
        yield Finding("system", "busy but slow: the device is shared", "host", evidence, (remedy,))
    if held_down:
        remedy = Remedy("a higher power limit, or better cooling", gain)
        evidence = f"clocks held down by {held_down}", slower
        yield Finding("system", "busy but slow: the device holds its clocks down", "power", evidence, (remedy,))


def _messages(asked: RuleInput) -> Iterator[Finding]:
    ranks, fall = asked.measured.facts.ranks, asked.explained.waterfall
    if ranks > 1:
        share = fall.seconds(cause="communication") / fall.measured
        symptom = "poor scaling: ranks wait for each other's messages"
        evidence = f"messages between {ranks} ranks take {share:.0%} of the time beyond their floor"
        remedy = Remedy("messages beside products, or fewer ranks", share, "--overlap-tokens")
        yield Finding("system", symptom, "communication", (evidence,), (remedy,))


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
    _slowed,
    _messages,
)
