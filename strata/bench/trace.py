"""Where the time of a traced call went: kernels, the gaps between them inside a step, and the gaps between steps.

Pure arithmetic on what a device did when; `strata.bench.step_observers` records it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from strata.text.counted import counted

N = TypeVar("N", int, float)

# What a kernel does, by the first kind of which its name, in small letters, holds a word. Strata's own kernels, those
# of cuBLAS and cuDNN, and those of ATen.
COPY = "copy"
MESSAGE = "message"  # between ranks: the kernels wait for others in it, and may do more in the same launch
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        MESSAGE,
        (
            "one_shot",
            "two_shot",
            "gather_rows",
            "flag_norm",
            "nccl",
            "memcpy ptop",
            "put_signal",
            "wait_signal",
        ),
    ),
    (
        "attention",
        (
            "attention",
            "batch_invariant_decode",
            "latent_prompt",
            "expanded_prompt",
            "latent_decode",
            "latent_join",
            "join_decodes",
            "pack_heads",
            "join_heads",
            "query_chunks",
            "gather_prompt_keys",
            "pooled_scores",
            "chosen_blocks",
            "page_bounds",
            "page_scores",
            "chosen_pages",
            "sdpa",
            "flash",
            "fmha",
        ),
    ),
    ("recurrence", ("short_convolution", "tail_kernel", "state_space", "gated_delta", "deinterleave")),
    (
        "product",
        (
            "gemv",
            "dot_kernel",
            "head_product",
            "linear",
            "gemm",
            "nvjet",
            "cutlass",
            "splitk",
            "w8a8",
            "split_product",
        ),
    ),
    ("norm", ("norm",)),
    ("rotation and KV write", ("rope", "kv_write", "latent_write", "rotate_heads", "quantized_write")),
    ("activation", ("silu", "gelu", "sigmoid_gate")),
    ("sampling", ("bitmask", "gumbel", "filter_bounds", "logprob", "argmax", "exponential_sums", "best_of_shards")),
    (COPY, ("memcpy", "memset", "copy")),
    ("lookup", ("embedding", "index", "gather", "newest_tokens")),
    ("loss", ("softmax_gradient",)),
    ("experts", ("combine", "grouped_kernel", "local_order", "count_choices", "route_kernel", "choice_")),
    (
        "quantization",
        ("quantize", "largest_kernel", "round_rows", "expand_kernel", "quantize_shards", "dequantize_shards"),
    ),
    ("optimizer", ("adamw", "muon")),
)
OTHER = "other"


@dataclass(frozen=True, slots=True)
class DeviceInterval:
    """A kernel, copy or fill on the device. start, end: nanoseconds of one clock."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class KindTime:
    """Kernels of one kind: how many, and their time added up in seconds (kernels may overlap)."""

    kernels: int
    seconds: float


@dataclass(frozen=True)
class GapSplit:
    """The seconds of a call: wall = floor + (busy - exposed - floor) + exposed + launch + host.

    floor: None if it is not known. busy: the device runs something. launch: it waits inside a step. host: it waits
    between steps, before the first or after the last. exposed: of busy, messages between ranks run and nothing else.
    """

    wall: float
    floor: float | None
    busy: float
    launch: float
    host: float
    exposed: float = 0.0

    def breakdown(self) -> dict[str, float]:
        """What the wall time is made of besides the floor; without exposed messages where there are none."""
        kernels = self.busy - self.exposed
        parts = {"kernels": kernels} if self.floor is None else {"kernels over floor": kernels - self.floor}
        if self.exposed:
            parts["exposed messages"] = self.exposed
        return {**parts, "launch gaps": self.launch, "host gaps": self.host}

    @property
    def largest(self) -> str:
        """The part that keeps the call farthest from its floor."""
        parts = self.breakdown()
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class TraceTime:
    """The device's time from its first kernel to its last, in seconds by its own clock.

    busy: something runs. host: idle after a step has ended, until the next begins. steps: how many. kernels_per_step:
    the median. kinds: the longest first. exposed: messages between ranks run and nothing else.
    """

    span: float
    busy: float
    host: float
    steps: int
    kernels_per_step: float
    kinds: dict[str, KindTime]
    exposed: float = 0.0

    def lines(self) -> Iterator[str]:
        """Steps, kinds of kernels, and how much of the messages between ranks other work hides, in words."""
        yield f"{counted(self.steps, 'step')} of {self.kernels_per_step:.0f} kernels and copies (median)"
        total = sum(kind.seconds for kind in self.kinds.values())
        for name, kind in self.kinds.items():
            yield f"  {name:22}{kind.seconds:10.3f} s {kind.seconds / total:7.1%}  {kind.kernels:,} of them"
        if MESSAGE in self.kinds:
            messages = self.kinds[MESSAGE].seconds
            hidden = max(0.0, 1 - self.exposed / messages)
            yield f"messages between ranks: {messages:.3f} s, exposed {self.exposed:.3f} s ({hidden:.0%} hidden)"

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.span

    def split(self, floor: float | None) -> GapSplit:
        """The span beside the least seconds that its work could take."""
        return GapSplit(self.span, floor, self.busy, self.span - self.busy - self.host, self.host, self.exposed)


def kind_of(name: str) -> str:
    """What a kernel of that name does, one of `KINDS` or `OTHER`."""
    small = name.lower()
    return next((kind for kind, words in KINDS if any(word in small for word in words)), OTHER)


def read_trace(work: Iterable[DeviceInterval], marks: Iterable[DeviceInterval]) -> TraceTime:
    """Add up what ran; each step ends at one of the `marks`, which count as idle themselves.

    Intervals may overlap and come in any order. Raises ValueError if nothing ran.
    """
    ordered = sorted(work, key=lambda interval: interval.start)
    if not ordered:
        raise ValueError("the trace holds no kernel")
    step_ends = sorted(mark.end for mark in marks)
    busy = merged(_spans(ordered))
    idle = ((end, start) for (_, end), (start, _) in pairwise(busy))
    span = busy[-1][1] - busy[0][0]
    return TraceTime(
        span=span / 1e9,
        busy=sum(end - start for start, end in busy) / 1e9,
        host=_between_steps(idle, step_ends) / 1e9,
        steps=len(step_ends),
        kernels_per_step=statistics.median(_kernels_of_steps(ordered, step_ends)),
        kinds=_by_kind(ordered),
        exposed=exposed_messages(ordered) / 1e9,
    )


def exposed_messages(work: Iterable[DeviceInterval]) -> int:
    """Nanoseconds in which messages between ranks run, or kernels that wait for them, and no other kernel does.

    Copies hide nothing: they may be what is waited for, and their names do not tell.
    """
    everything = list(work)
    kinds = {name: kind_of(name) for name in {interval.name for interval in everything}}
    counted = [interval for interval in everything if kinds[interval.name] != COPY]
    others = (interval for interval in counted if kinds[interval.name] != MESSAGE)
    return covered(_spans(counted)) - covered(_spans(others))


def busy_of_steps(work: Iterable[DeviceInterval], marks: Iterable[DeviceInterval]) -> list[float]:
    """Seconds in which something ran, of each step; steps end at the `marks`. What overlaps counts once, in the step in
    which it began."""
    step_ends = sorted(mark.end for mark in marks)
    busy = [0] * len(step_ends)
    for start, end in merged(_spans(work)):
        at = bisect_right(step_ends, start)
        if at < len(busy):
            busy[at] += end - start
    return [nanoseconds / 1e9 for nanoseconds in busy]


def merged(intervals: Iterable[tuple[N, N]]) -> list[tuple[N, N]]:
    """The stretches that at least one of the intervals (start, end) covers, in order."""
    found: list[tuple[N, N]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def covered(intervals: Iterable[tuple[N, N]]) -> N:
    """How long at least one of the intervals (start, end) lasts."""
    return sum(end - start for start, end in merged(intervals))


def _spans(work: Iterable[DeviceInterval]) -> Iterator[tuple[int, int]]:
    return ((interval.start, interval.end) for interval in work)


def _between_steps(idle: Iterable[tuple[int, int]], step_ends: Sequence[int]) -> int:
    """Of idle stretches, what lies after the end of a step: before it, the step's own last work was launched."""
    total = 0
    for start, end in idle:
        at = bisect_left(step_ends, start)
        if at < len(step_ends):
            total += max(0, end - step_ends[at])
    return total


def _kernels_of_steps(work: Iterable[DeviceInterval], step_ends: Sequence[int]) -> list[int]:
    """How many intervals start after the end of the step before; those after the last step belong to it."""
    last = max(0, len(step_ends) - 1)
    counts = Counter(min(last, bisect_right(step_ends, interval.start)) for interval in work)
    return [counts[step] for step in range(last + 1)]


def _by_kind(work: Iterable[DeviceInterval]) -> dict[str, KindTime]:
    kernels: Counter[str] = Counter()
    nanoseconds: Counter[str] = Counter()
    for interval in work:
        kernels[interval.name] += 1
        nanoseconds[interval.name] += interval.end - interval.start
    kinds: dict[str, KindTime] = {}
    for name, count in kernels.items():
        kind = kind_of(name)
        before = kinds.get(kind, KindTime(0, 0.0))
        kinds[kind] = KindTime(before.kernels + count, before.seconds + nanoseconds[name] / 1e9)
    return dict(sorted(kinds.items(), key=lambda item: item[1].seconds, reverse=True))
