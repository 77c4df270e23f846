"""The dense layer by the algorithms of cuBLASLt that were measured to be fastest (`strata bench kernels --tune`).

The library chooses by a model of the device. For some shapes of 64 to 1,024 rows another of its algorithms takes up to
a third less time. The table of a device holds those, as the library's own values, with the version that they are for:
another one may read them otherwise, so there F.linear runs, as it does where the library refuses an algorithm. None
divides k among programs, so none needs a workspace, and sums are made in one order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from strata.kernels import tuned
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear import cublaslt

MAX_ROWS = 1024
IMPLEMENTATION = "cublaslt"
_MAX_SHAPES = 8192


@dataclass(frozen=True)
class MeasuredAlgorithm:
    """version: of the library, as it tells it; algorithm: cublasLtMatmulAlgo_t in hexadecimal digits."""

    version: int
    algorithm: str

    def __post_init__(self) -> None:
        try:
            size = len(bytes.fromhex(self.algorithm))
        except (TypeError, ValueError):
            size = -1
        if size != cublaslt.ALGORITHM_BYTES or type(self.version) is not int:
            raise ValueError(
                f"an algorithm has a version (a whole number) and {2 * cublaslt.ALGORITHM_BYTES} hexadecimal digits, "
                f"not {self.version!r} and {self.algorithm!r}"
            )


Algorithms = Mapping[tuned.Key, bytes | None]
"""None: something else was faster, or the algorithm is for another version of the library."""


def algorithms_of(table: tuned.Table, version: int | None) -> Algorithms:
    """The algorithms in a table for a version of the library. Raises ValueError if one is none, naming its entry."""
    return MappingProxyType({key: _algorithm_of(key, choice, version) for key, choice in table.items()})


def _algorithm_of(key: tuned.Key, choice: tuned.TunedChoice, version: int | None) -> bytes | None:
    if choice.implementation != IMPLEMENTATION:
        return None
    try:
        found = MeasuredAlgorithm(**choice.parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the table's {key} has no algorithm of cuBLASLt: {error}") from None
    return bytes.fromhex(found.algorithm) if found.version == version else None


@cache
def _device_algorithms(device: torch.device) -> Algorithms:
    return algorithms_of(tuned.read(DeviceLimits.of(device).product), cublaslt.version())


@lru_cache(_MAX_SHAPES)
def _product(
    device: torch.device, dtype: torch.dtype, rows: int, out: int, width: int
) -> cublaslt.CublasLtProduct | None:
    key = tuned.Key("linear", str(dtype).removeprefix("torch."), out, width, rows)
    algorithm = tuned.serving(_device_algorithms(device), key)
    return None if algorithm is None else cublaslt.product_by(algorithm, device, dtype, rows, out, width)


def _found(x: Tensor, weight: Tensor) -> cublaslt.CublasLtProduct | None:
    out, width = weight.shape
    return _product(weight.device, weight.dtype, x.numel() // width, out, width)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether there is an algorithm for these, as which contiguous operands without a bias were measured."""
    return (
        bias is None
        and 0 < x.numel() <= MAX_ROWS * weight.shape[1]
        and not weight.is_meta  # the library cannot be asked
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.data_ptr() % cublaslt.ALIGNMENT == 0
        and cublaslt.supports(x, weight)
        and _found(x, weight) is not None
    )


def measured_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` where `supports`: x [..., width], weight [out, width], no bias -> [..., out].

    It can be captured in a CUDA graph. Raises RuntimeError, with the library's reason, if the library fails.
    """
    product = _found(x, weight)
    assert product is not None
    out, width = weight.shape
    result = torch.empty((*x.shape[:-1], out), dtype=x.dtype, device=x.device)
    product.run(x.view(-1, width), weight, None, result)
    return result
