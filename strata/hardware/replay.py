"""Timing short kernels: several calls in one CUDA graph, over operands that the calls before have pushed out of L2."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

import torch

# Operands together are this many times the L2 cache. However it evicts (what was loaded to be evicted first may go
# before what is older), no more than one part in so many of a call's operands is left when its turn comes again.
_L2_FACTOR = 16
_MAX_COPIES = 256
# A graph runs about this long, so that its start does not count.
_GRAPH_SECONDS = 1e-3
_MAX_CALLS = 64
_WARMUP = 2


@dataclass(frozen=True)
class Timing:
    """Every run of a measurement, in seconds."""

    runs: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.runs)


def copies_beyond_l2(nbytes: int) -> int:
    """How many operands of so many bytes to take turns with."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return min(_MAX_COPIES, max(1, math.ceil(_L2_FACTOR * cache / max(1, nbytes))))


def time_replayed(calls: Sequence[Callable[[], object]], *, repeats: int = 9, estimate: float = 0.0) -> Timing:
    """Seconds of one call: all calls in turn, captured in a CUDA graph, over replays of it.

    estimate: about what a call takes, in seconds; short calls are captured several times over. Every call runs once
    before, on the stream that captures.
    """
    count = max(len(calls), min(_MAX_CALLS, int(_GRAPH_SECONDS / max(estimate, 1e-6))))
    captured = list(islice(cycle(calls), count))
    # Without the context manager of torch.cuda.graph, which collects garbage for each of hundreds of CUDA graphs.
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")  # a thread of NCCL's asks for events meanwhile
        try:
            for call in captured:
                call()
        finally:
            graph.capture_end()
        for _ in range(_WARMUP):
            graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
    torch.cuda.synchronize()
    return Timing(tuple(start.elapsed_time(end) / 1e3 / count for start, end in pairwise(marks)))
