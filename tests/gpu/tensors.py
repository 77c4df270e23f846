"""Tensors of tests on a GPU, CUDA graphs of what they call, and how near a result has to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Found = TypeVar("Found")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def captured(run: Callable[[], Found]) -> tuple[torch.cuda.CUDAGraph, Found]:
    """Run once, and then a CUDA graph of it, with what it leaves there."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_near(result: Tensor, exact: Tensor, atol: float = 1e-4) -> None:
    """One rounding to the dtype, beside what sums in float32 lose: atol of the largest."""
    assert result.isfinite().all()
    rtol = 0.55 * torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), exact.double(), rtol=rtol, atol=atol * exact.abs().max().item())


def widened(given: Sequence[Any]) -> list[Any]:
    """Floats of them in float64."""
    return [one.double() if isinstance(one, Tensor) and one.is_floating_point() else one for one in given]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within it, to wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
