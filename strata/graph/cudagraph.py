"""CUDA graphs: a fixed sequence of launches, captured once and replayed with one call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from strata.kernels.split_counters import split_counters


def non_owning_view(tensor: Tensor) -> Tensor:
    """The same memory of a contiguous CUDA tensor, without keeping it: for what the next CUDA graph may overwrite.

    Dozens of CUDA graphs would otherwise each keep their own largest results.
    """
    assert tensor.is_contiguous()
    # The interface knows no bfloat16, so the elements go through it as integers of their size.
    described = {"shape": tuple(tensor.shape), "typestr": f"<i{tensor.element_size()}", "version": 3}
    described["data"] = (tensor.data_ptr(), False)
    lent: Any = type("NonOwningView", (), {"__cuda_array_interface__": described})()
    return torch.as_tensor(lent, device=tensor.device).view(tensor.dtype)


class CudaGraphStore(Protocol):
    """What keeps sequences of launches; see `CudaGraphs`."""

    def capture_graph(
        self, key: Hashable, run: Callable[[], None], between: Callable[[], None] = lambda: None, warm: bool = False
    ) -> None: ...

    def discard(self, keys: Iterable[Hashable]) -> None: ...

    def replay(self, key: Hashable) -> None: ...

    def lend(self, tensor: Tensor) -> Tensor: ...


class CudaGraphs:
    """CUDA graphs that share one memory pool, because only one of them runs at a time.

    What a captured function reads and writes must stay at the same addresses: its inputs and outputs live in tensors
    that its closure holds. Intermediates of one CUDA graph may be overwritten by the replay of another.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace, 32 MiB on Hopper, for each stream that it has run on.
        self._aside = torch.cuda.Stream()
        # Made within a CUDA graph that nothing ran before, they would be zero once that one is replayed, and not
        # before.
        split_counters(torch.device("cuda", torch.cuda.current_device()))

    def capture_graph(
        self, key: Hashable, run: Callable[[], None], between: Callable[[], None] = lambda: None, warm: bool = False
    ) -> None:
        """Run `run` once to warm up (compilation, library handles) unless it is `warm`, then capture it under `key`.
        Whatever that raises, the current stream is the one that it was; `discard` frees the rest.

        between: lets go of what the first run left, whose memory could not be freed or used while the second is
        captured.
        """
        if not warm:
            self._aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._aside):
                run()
            torch.cuda.current_stream().wait_stream(self._aside)
        torch.cuda.synchronize()
        between()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a collection that frees device memory would break the CUDA graph
        try:
            # Other threads, such as the one that watches over NCCL, may ask the driver something meanwhile. Where the
            # end of a capture fails, PyTorch stays on the stream of the capture.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                run()
        finally:
            if collecting:
                gc.enable()
        self._graphs[key] = graph

    def discard(self, keys: Iterable[Hashable]) -> None:
        """Drop CUDA graphs and free their memory, also those that were broken off. Nothing else may hold any of it."""
        torch.cuda.synchronize()  # what ran before a CUDA graph, on a stream of its own, may still be under way
        for key in keys:
            self._graphs.pop(key, None)
        if not self._graphs:  # a pool ends with the last CUDA graph in it
            self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()

    def replay(self, key: Hashable) -> None:
        """Launch the CUDA graph on the current stream."""
        self._graphs[key].replay()

    def lend(self, tensor: Tensor) -> Tensor:
        """A result of a captured function as whoever replays it may keep it: until the next replay of any."""
        return non_owning_view(tensor)
