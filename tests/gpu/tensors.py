"""Tensors of tests on a GPU, CUDA graphs of what they call, and how near a result has to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.replay import time_replayed

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


def assert_within(found: Tensor | None, exact: Tensor, tolerance: float) -> None:
    """Of norms."""
    assert found is not None
    assert found.isfinite().all()
    exact = exact.to(found.device, torch.float64)
    assert (found.double() - exact).norm() <= tolerance * exact.norm()


def assert_replays_have_the_bits_of(run: Callable[[], Tensor], wanted: Tensor, repeats: int, message: object) -> None:
    """Launched, and as the last of many replays of one CUDA graph leaves it."""
    results: list[Tensor] = []
    time_replayed([lambda: results.append(run())], repeats=repeats)
    for result in (results[0], results[-1]):
        assert torch.equal(result, wanted), message


def assert_a_chain_waits(run: Callable[..., Tensor], x: Tensor, layers: Sequence[tuple[Any, ...]]) -> None:
    """Launches of which each reads what the one before wrote, and may begin before that has ended. What poisons their
    results has to be undone: kernels would stand between the launches."""

    def chain(wait: bool = False) -> Tensor:
        last = x
        for layer in layers:
            last = run(last, *layer)
            if wait:
                torch.cuda.synchronize()
        return last

    assert_replays_have_the_bits_of(chain, chain(wait=True), 20, "read too soon")
