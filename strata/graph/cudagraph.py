"""CUDA graphs: a fixed sequence of launches, recorded once and replayed with one call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable

import torch


class CudaGraphs:
    """Recordings that share one memory pool, because only one of them runs at a time.

    What a recorded function reads and writes must stay at the same addresses: its inputs and outputs live in tensors
    that its closure holds. Intermediates of one recording may be overwritten by the replay of another.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, key: Hashable, run: Callable[[], None]) -> None:
        """Run `run` once to warm up (compilation, library handles), then record it under `key`."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a collection that frees device memory would break the recording
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                run()
        finally:
            if collecting:
                gc.enable()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        """Launch the recording on the current stream."""
        self._graphs[key].replay()
