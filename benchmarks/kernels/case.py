"""One call that `strata bench kernels` times, and what makes its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Workload
from strata.kernels.op import Operation

EPS = 1e-6
BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Case:
    """One call to time.

    make: draws fresh arguments on torch's default device. libraries: do the same work by torch alone, where it can.
    dtype: of the arithmetic.
    """

    operation: Operation
    shape: str
    rows: int
    make: Callable[[], tuple[Any, ...]]
    workload: Workload
    dtype: str = "float32"
    libraries: tuple[Callable[..., object], ...] = ()


def randn(*shape: int) -> Tensor:
    """Standard normal numbers in bfloat16."""
    return torch.randn(shape, dtype=torch.bfloat16)


def angles(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines as `rope_angles` leaves them; any numbers do."""
    cos, sin = torch.randn(2, rows, 1, dim)
    return cos, sin


# Cases of any number of rows, and how many bytes a row moves.
Scalable = tuple[Callable[[int], Case], int]


def case_of(operation: Operation, shape: str, rows: int, make: Callable[[], tuple[Any, ...]], *libraries: Any) -> Case:
    """A call of so many sequences of one token."""
    return Case(operation, shape, rows, make, Workload((1,) * rows, (1,) * rows), libraries=libraries)
