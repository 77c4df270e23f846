"""Packed matrices of a checkpoint, which are read by rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from strata.kernels.quant.quantized import QuantizedWeight, Scheme, shard_of
from strata.models.checkpoint import StoredTensor
from strata.models.quantized.formats.stored import StoredTensors


class QuantizedMatrix(Protocol):
    """One matrix [out, width] of a checkpoint."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def scheme(self) -> Scheme: ...

    @property
    def step(self) -> int:
        """Rows are read from a multiple of it to another, or to the last row."""

    def rows(self, first: int, end: int) -> QuantizedWeight:
        """The rows [first, end), whole, on the CPU."""


def read_box(matrix: QuantizedMatrix, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> QuantizedWeight:
    """The rows and columns [first, end) of a matrix; `name` is for the ValueError where they cannot be had."""
    out, width = matrix.shape
    for (low, high), size in ((rows, out), (columns, width)):
        if not 0 <= low <= high <= size:
            raise ValueError(f"{name} is {out} x {width}; rows {rows} and columns {columns} are not of it")
    first = min(rows[0], out - 1) // matrix.step * matrix.step
    end = min(-(-max(rows[1], first + 1) // matrix.step) * matrix.step, out)
    weight = matrix.rows(first, end)
    try:
        return shard_of(weight, (rows[0] - first, rows[1] - first), columns)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_fills_bytes(name: str, width: int) -> None:
    """Raises ValueError where two values of a row to a byte do not fill the last one."""
    if width % 2:
        raise ValueError(f"{name} has rows of {width} values of 4 bits; an even number is supported")


@dataclass(frozen=True)
class ScaledMatrix:
    """Values [out, width] of 8 bits, or [out, width / 2] of two e2m1 to a byte, and scales [out / rows, width /
    columns] of the scheme; where one stands for all of a dimension it may lack.

    zeros: as scales, or None. whole: one more scale of all, and whether it divides.
    """

    stored: StoredTensors
    scheme: Scheme
    values: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None
    whole: tuple[StoredTensor, bool] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        out, width = self.values.shape
        return out, width * (2 if self.scheme.values == "e2m1" else 1)

    @property
    def step(self) -> int:
        return self.scheme.rows or 1

    def rows(self, first: int, end: int) -> QuantizedWeight:
        values = self.stored.read(self.values, slice(first, end))
        scales = self.stored.read_scales(self.scales, *self._rows_of(self.scales, first, end))
        zeros = None
        if self.zeros is not None:
            zeros = self._grid(self.stored.read(self.zeros, *self._rows_of(self.zeros, first, end)))
        return QuantizedWeight.of(
            self.scheme, values, self._grid(scales), zeros=zeros, row_scales=self._row_scales(end - first)
        )

    def _rows_of(self, stored: StoredTensor, first: int, end: int) -> tuple[slice, ...]:
        group = self.scheme.rows
        return (slice(first // group, -(-end // group)),) if group else ()

    def _grid(self, scales: Tensor) -> Tensor:
        return scales.reshape(scales.shape[0] if self.scheme.rows else 1, -1)

    def _row_scales(self, count: int) -> Tensor | None:
        if self.whole is None:
            return None
        stored, divides = self.whole
        scale = self.stored.read_scales(stored).float().reshape(1, 1)
        if divides and not bool((1 / scale).isfinite()):
            raise ValueError(f"{stored.file}: {stored.name} is {float(scale):.3g}, and scales are divided by it")
        return (1 / scale if divides else scale).expand(count, 1).contiguous()


@dataclass(frozen=True)
class WordMatrix:
    """Integers of 4 or 8 bits in int32 words along the columns, the first in the lowest bits; zeros in words along the
    rows.

    values [out, words], scales [out, groups], zeros [words, groups] or None; turned: all three the other way round.
    groups: the group of each column; None: they stand in turn.
    """

    stored: StoredTensors
    bits: int
    scheme: Scheme
    shape: tuple[int, int]
    values: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    groups: StoredTensor | None

    turned: ClassVar[bool] = False

    @property
    def step(self) -> int:
        return 32 // self.bits  # rows whose zeros share a word

    def rows(self, first: int, end: int) -> QuantizedWeight:
        bits, width, own = self.bits, self.shape[1], slice(first, end)
        words, order = self._rows_of(self.stored.read, self.values, own), None
        if self.groups is not None:
            order = order_of(self.stored.read(self.groups), self.scheme.columns or width, self.groups.name)
        packed = bytes_of(words)[:, : width * bits // 8] if order is None else _reordered(words.t(), bits, order)
        scales = copied(self._rows_of(self.stored.read_scales, self.scales, own))
        values = self._signed(packed.contiguous())
        return QuantizedWeight.of(self.scheme, values, scales, zeros=self._zeros(first, end), order=order)

    def _rows_of(self, read: Callable[..., Tensor], stored: StoredTensor, rows: slice) -> Tensor:
        return read(stored, slice(None), rows).t() if self.turned else read(stored, rows)

    def _signed(self, codes: Tensor) -> Tensor:
        return codes if self.bits == 4 else signed(codes)

    def _zeros(self, first: int, end: int) -> Tensor | None:
        """[rows, groups], counted as the values are; None: the middle."""
        return None if self.zeros is None else self._signed(self._zero_codes(self.zeros, first, end))

    def _zero_codes(self, zeros: StoredTensor, first: int, end: int, more: int = 0) -> Tensor:
        """uint8. more: what is added to their words."""
        rows = slice(first // self.step, -(-end // self.step))
        fields = bytes_of(self._rows_of(self.stored.read, zeros, rows).t() + more)
        return copied((nibbles_of(fields) if self.bits == 4 else fields)[:, : end - first].t())


def _reordered(words: Tensor, bits: int, order: Tensor) -> Tensor:
    """int32 [width * bits / 32, out] -> uint8 [out, width * bits / 8], the columns in this order."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[:, None]
    codes = (words[:, None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(0, 1)
    # Rows of codes are copied as they stand, which is faster than columns are after they are turned.
    ordered = codes[order] if bits == 8 else codes[order[::2]] | codes[order[1::2]] << 4
    return copied(ordered.t())


def copied(tensor: Tensor) -> Tensor:
    """With memory and strides of its own, which `contiguous` does not give where a dimension is 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


def bytes_of(words: Tensor) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, 4 * words], the lowest bits of a word first."""
    return copied(words).view(torch.uint8)


def nibbles_of(packed: Tensor) -> Tensor:
    """Bytes [..., count] -> their halves, the low one first, [..., 2 * count]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def signed(packed: Tensor) -> Tensor:
    """Bytes that hold a number and 128 more -> int8."""
    return (packed ^ 128).view(torch.int8)


def scheme_of_words(bits: int, group: int, activations: str = "") -> Scheme:
    """Of integers in words, with a scale for each `group` columns of a row; 0: of all."""
    return Scheme("int4" if bits == 4 else "int8", 1, group, activations)


def order_of(groups: Tensor, size: int, name: str) -> Tensor | None:
    """int32 [width]: columns so that those of a group stand together, groups of `size` in turn; None: they do.

    groups: the group of each column. Raises ValueError where another number than `size` has one.
    """
    width = len(groups)
    in_turn = torch.arange(width) // size
    if torch.equal(groups.long(), in_turn):
        return None
    order = torch.argsort(groups.long(), stable=True)
    if not torch.equal(groups.long()[order], in_turn):
        raise ValueError(f"{name} does not give each group {size} columns, as group_size says")
    return order.to(torch.int32)
