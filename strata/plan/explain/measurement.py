"""What was measured of a run: its steps, its requests, what the engine counted, and how the engine was set up.

Plain values, so that a measurement can be kept, made up for a test, or come from a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from strata.hardware.roofline import Workload
from strata.plan.explain.explanation import StepWork


class StepChunk(NamedTuple):
    """One sequence's share of a step: its id, tokens before the step, tokens of the step, ids drawn from the last."""

    sequence: int
    start: int
    tokens: int
    draws: int


@dataclass(frozen=True)
class MeasuredStep:
    """One step, in seconds from the start of the run.

    begin, end: of its work on the device. busy: seconds in which something ran on the device; None: all of them.
    processor: seconds that the engine's thread had a processor between, where the host is the device; None elsewhere.
    compiled: how many kernels were compiled or read from the disk for it. Of a GPU: delayed: seconds for which the host
    was about to launch it and had no processor; eager: it replayed no CUDA graph where others do.
    """

    begin: float
    end: float
    chunks: tuple[StepChunk, ...]
    busy: float | None = None
    processor: float | None = None
    compiled: int = 0
    delayed: float = 0.0
    eager: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def workload(self) -> Workload:
        """Sequences of one token first, as steps run them."""
        ordered = sorted(self.chunks, key=lambda chunk: chunk.tokens > 1)
        return Workload(
            tuple(chunk.tokens for chunk in ordered), tuple(chunk.start + chunk.tokens for chunk in ordered)
        )

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def kind(self) -> StepWork:
        prompts = sum(1 for chunk in self.chunks if chunk.tokens > 1)
        if not prompts:
            return "decode"
        return "prompt" if prompts == len(self.chunks) else "mixed"


@dataclass(frozen=True)
class MeasuredRequest:
    """prompt: its ids. outputs: tokens that it got. due: when it came. times: when each of its tokens was delivered, in
    seconds from the start of the run; empty where nobody noted it. sequence: its id in the steps."""

    prompt: tuple[int, ...]
    outputs: int
    due: float = 0.0
    times: tuple[float, ...] = ()
    sequence: int = -1


@dataclass(frozen=True)
class EngineFacts:
    """How the engine was set up, and what it is made of.

    dtype: of the weights, as torch names it. asked_dtype: what was asked for. slots: sequences that run at once.
    step_tokens: the most of a step. kv_tokens: that the pages hold. operations: of the graph that ran, by name;
    expected: of the graph that the passes make of this model.
    """

    model: str
    dtype: str
    asked_dtype: str
    slots: int
    step_tokens: int
    max_length: int
    kv_tokens: int
    page_size: int
    caches_prefixes: bool
    ranks: int = 1
    operations: Mapping[str, int] = field(default_factory=dict)
    expected: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceState:
    """What a GPU told meanwhile. slowed_by: what held its clocks down. others: other processes that use it."""

    slowed_by: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class TracedOperations:
    """Seconds of each operation in some steps of one kind, and of these steps as a whole."""

    seconds: Mapping[str, float]
    whole: float


@dataclass(frozen=True)
class UnpackedProducts:
    """Products whose packed weights become floats in every call, as those of a CPU do.

    values: of the weights ("int4"). operation: that multiplies. plain: seconds that it would take in all steps by plain
    weights, of such products measured there. asked: the engine was told to pack the weights, which the checkpoint has
    in floats.
    """

    values: str
    operation: str
    plain: float
    asked: bool


@dataclass(frozen=True)
class Measurement:
    """One run of a workload.

    title: what ran, in words. product: the device. wall: seconds of the run. host: seconds beside steps, by what the
    host did then ("tokenization"); what is between steps besides is not in it. preemptions: of sequences. ideal: the
    least seconds of the work on this device, if all of it ran in the fullest steps; None: no better than by the steps
    that ran. traced: by the kind of steps; empty: nobody traced. processor: seconds that the engine's thread had a
    processor, where the host is the device; None elsewhere. unpacked: None where no packed weight is unpacked in every
    call.
    """

    title: str
    product: str
    wall: float
    steps: tuple[MeasuredStep, ...]
    requests: tuple[MeasuredRequest, ...]
    facts: EngineFacts
    host: Mapping[str, float] = field(default_factory=dict)
    preemptions: int = 0
    ideal: float | None = None
    traced: Mapping[StepWork, TracedOperations] = field(default_factory=dict)
    device: DeviceState = DeviceState()
    processor: float | None = None
    unpacked: UnpackedProducts | None = None

    @property
    def stepping(self) -> float:
        """Seconds of all steps."""
        return math.fsum(step.seconds for step in self.steps)

    @property
    def host_is_device(self) -> bool:
        return self.processor is not None

    @property
    def lost_between(self) -> float:
        """Seconds beside steps for which others had the processor."""
        if self.processor is None:
            return 0.0
        ran = self.processor - math.fsum(step.processor or 0.0 for step in self.steps)
        return max(0.0, self.wall - self.stepping - max(0.0, ran))

    @property
    def between(self) -> float:
        """Seconds beside steps that the host worked, whatever it did."""
        return max(0.0, self.wall - self.stepping - self.lost_between)


def recomputed(steps: Iterable[MeasuredStep]) -> list[int]:
    """Of each step the tokens that its sequences had computed before and lost, as those that were preempted have."""
    reached: dict[int, int] = {}
    found = []
    for step in steps:
        again = 0
        for chunk in step.chunks:
            before = reached.get(chunk.sequence, 0)
            again += max(0, min(before, chunk.start + chunk.tokens) - chunk.start)
            reached[chunk.sequence] = max(before, chunk.start + chunk.tokens)
        found.append(again)
    return found


def shared_prefix_tokens(requests: Iterable[MeasuredRequest], page_size: int) -> int:
    """Prompt tokens in whole pages with which an earlier request began as well."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        digest, prompt = 0, request.prompt
        is_shared = True
        for end in range(page_size, len(prompt), page_size):  # one token at least is computed
            digest = hash((digest, prompt[end - page_size : end]))
            is_shared = is_shared and digest in seen
            found += page_size * is_shared
            seen.add(digest)
    return found
