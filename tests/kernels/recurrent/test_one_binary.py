"""Deterministic mode runs a recurrence as one binary, however its sequences come: another may add up in another order.

Launches on a CPU are written down instead; what Triton would compile each for is asked of Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import native_specialize_impl

from strata.kernels.recurrent import gated_delta_triton, state_space_triton
from strata.kernels.recurrent.calls import StateSpaceSpec
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.recurrent.state_space import state_space
from strata.kernels.state.fixed import FixedStates
from strata.models.batch import Batch
from tests.kernels.recurrent.steps import pool, step

HOPPER = make_backend(GPUTarget("cuda", 90, 32))
TOKENS = 100


class Launches:
    """A kernel that does not run. variants: what each launch would have been compiled for."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.variants: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        params = self.kernel.params[: len(arguments)]
        assert not any(param.is_constexpr for param in params)
        told = [not param.do_not_specialize for param in params]
        variant = [native_specialize_impl(HOPPER, one, False, by, by) for one, by in zip(arguments, told, strict=True)]
        self.variants.append((*variant, *constants.items()))


def some(tokens: int, *shape: int) -> Tensor:
    return torch.zeros(tokens, *shape, dtype=torch.bfloat16)


def batches(shape: tuple[int, ...]) -> list[tuple[int, Batch]]:
    """Where its rows begin, and a batch: whole prompts that keep nothing, and one in pieces of which some are of a
    token, which begin at addresses that are not multiples of 16."""
    states = pool(2, ((1,), torch.float32), (shape, torch.float32))
    kept = FixedStates(states.tensors, torch.ones(1, dtype=torch.int32))
    pieces, done = [], 0
    for count in (37, 1, 1, 61):
        pieces.append((done, step([count], [done], kept)))
        done += count
    return [(0, step([TOKENS])), (0, step([60, 40])), (7, step([1])), *pieces]


def state_space_arguments() -> tuple[list[Tensor], list[Any], tuple[int, ...]]:
    rows = [some(TOKENS, 3, 64), some(TOKENS, 3), some(TOKENS, 1, 20), some(TOKENS, 1, 20)]
    return rows, [*some(3, 3), StateSpaceSpec(0, 0.0, 1.0)], (3, 64, 20)


def gated_delta_arguments() -> tuple[list[Tensor], list[Any], tuple[int, ...]]:
    rows = [some(TOKENS, 1, 20), some(TOKENS, 1, 20), some(TOKENS, 3, 20), some(TOKENS, 3), some(TOKENS, 3)]
    return rows, [*some(2, 3), 0], (3, 20, 20)


@pytest.mark.parametrize(
    ("operation", "module", "kernel", "given"),
    [
        (state_space, state_space_triton, "state_space_kernel", state_space_arguments),
        (gated_delta, gated_delta_triton, "gated_delta_kernel", gated_delta_arguments),
    ],
    ids=["state space", "gated delta"],
)
def test_a_recurrence_is_one_binary(
    operation: Any, module: Any, kernel: str, given: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(getattr(module, kernel))
    monkeypatch.setattr(module, kernel, launches)
    rows, weights, shape = given()
    bound = operation.bind("cuda", deterministic=True)
    for first, batch in batches(shape):
        last = first + len(batch.positions)
        behind = [*weights[:-1], batch, weights[-1]]
        bound(*(one[first:last] for one in rows), *behind)
    assert len(launches.variants) == len(batches(shape))
    assert all(one == launches.variants[0] for one in launches.variants)
