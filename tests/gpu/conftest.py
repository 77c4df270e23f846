"""Tests that need a CUDA device: skipped without one. Inputs are new in every run, and fresh memory is full of NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from strata.kernels.triton_import import HAS_TRITON


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    """Before the fixtures of any module, which may start engines."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="session")
def _without_processes_that_compile() -> Iterator[None]:
    """Engines of this process compile what they launch: each has other options, and a process for each takes longer."""

    class Nothing:
        def __init__(self, *_: object, **__: object) -> None: ...

        @contextmanager
        def under_way(self) -> Iterator[Nothing]:
            yield self

        def finish(self, *, show: bool) -> bool:
            return False

    if not HAS_TRITON:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata.engine.ahead.ahead.KernelsAhead", Nothing)
        yield


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    value = torch.seed()
    yield value
    print(f"torch.manual_seed({value})")  # shown when a test fails


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves unwritten of its result is NaN, the largest integer, or True."""

    def poisoning(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = empty(*args, **kwargs)
            with torch.no_grad():  # also where a gradient is asked for, as torch.utils.checkpoint does
                if made.is_floating_point():
                    return made.fill_(torch.nan)
                return made.fill_(True if made.dtype == torch.bool else torch.iinfo(made.dtype).max)

        return filled

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
