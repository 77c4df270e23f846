"""Sums over ranks whose messages are in 8 bits, with what rounding took away added to the next: for gradients.

A value travels in e4m3, groups of 128 with a power of two in common (`strata.kernels.collective.quantized_shards`):
8,256 bytes for 8,192 values. Each rank rounds its part for each other, and the sums are added up in float32 in the
order of the ranks, so one value is rounded once and not once a hop, as in ZeRO++ (Wang et al. 2023). What a rank's
rounding took away it adds to what it sends in the next step (error feedback, Seide et al. 2014; Karimireddy et al.
2019).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.comm.collectives import start_all_gather, start_all_to_all
from strata.comm.mesh import Axis
from strata.kernels.collective.quantized_shards import dequantize_shards, quantize_shards, shard_bytes

# Values of a row, whose exponents fill 16 bytes.
ROW = 2048

Sum = Generator[None, None, Tensor]  # a step of which waits for a message and sends the next, to the sum


def message_bytes(values: int) -> int:
    """What so many values take in a message."""
    return -(-values // ROW) * shard_bytes(ROW)


class QuantizedSums:
    """Errors are kept in bfloat16, 2 bytes for each value that a rank sends in a step."""

    def __init__(self) -> None:
        self._errors: dict[Hashable, Tensor] = {}

    def drop_errors(self) -> None:
        """Begin without, as a run does that goes on from a checkpoint, which has none."""
        for error in self._errors.values():
            error.zero_()

    def scattered(self, x: Tensor, axis: Axis, key: Hashable = None) -> Sum:
        """This rank's part of the sum over the ranks, in x's dtype; x: [values], of which each rank has a part, and
        which may be written over.

        key: whose error it is that is kept; None: it is not.
        """
        if axis.size == 1:
            yield
            return x
        parts = x.view(axis.size, -1)
        filled = F.pad(parts, (0, -parts.shape[1] % ROW))
        pending = start_all_to_all(self._rounded(filled.view(-1, ROW), key), axis)
        yield
        total = torch.zeros(filled.shape[1], device=x.device)
        for sent in pending.wait().chunk(axis.size):
            total += _widened(sent)
        return total[: parts.shape[1]].to(x.dtype)

    def everywhere(self, x: Tensor, axis: Axis, key: Hashable) -> Sum:
        """The sum over the ranks on all of them, to the bit: x: [values]. It is rounded once more on its way back."""
        filled = F.pad(x, (0, -len(x) % (axis.size * ROW)))
        own = yield from self.scattered(filled, axis, (key, "out"))
        pending = start_all_gather(self._rounded(own.view(-1, ROW), (key, "back")), axis)
        yield
        return _widened(pending.wait())[: len(x)].to(x.dtype)

    def _rounded(self, rows: Tensor, key: Hashable) -> Tensor:
        """uint8 [rows, bytes] of [rows, ROW]."""
        if key is None:
            return _packed(rows)
        error = self._errors.get(key)
        if error is None:
            error = self._errors[key] = torch.zeros_like(rows, dtype=torch.bfloat16)
        sent = _packed(rows.add_(error))
        lost = rows.sub_(_widened(sent).view_as(rows))
        error.copy_(lost.nan_to_num_(0.0, 0.0, 0.0))  # a step whose gradients were not finite is left out
        return sent


def _packed(rows: Tensor) -> Tensor:
    packed: Tensor = quantize_shards(rows, 1)
    return packed[0]


def _widened(rows: Tensor) -> Tensor:
    """[values] float32."""
    wide: Tensor = dequantize_shards(rows[None], ROW, torch.float32)
    return wide.flatten()


class QuantizedReduceScatter:
    """What FSDP2 calls in place of its own (`FSDPModule.set_custom_reduce_scatter`). It keeps no errors: they would
    take the memory of whole gradients, which it divides."""

    def __init__(self, sums: QuantizedSums, axis: Axis) -> None:
        self._sums, self._axis = sums, axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        reduction = self._sums.scattered(input_tensor, self._axis)
        try:
            while True:
                next(reduction)
        except StopIteration as end:
            output_tensor.copy_(end.value)
