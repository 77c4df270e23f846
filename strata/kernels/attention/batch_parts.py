"""Which kernel attends for which rows of a step with prompts: worked out once on the host, used in every layer.

PyTorch builds a cuDNN graph for each shape that it meets, which holds up the host for longer than cuDNN saves, and for
packed sequences of different lengths in every call. So cuDNN only ever sees lengths that are multiples of BLOCK: it
takes the first queries of a prompt, and the kernel over pages those that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from strata.kernels.attention.virtual_sequences import VirtualSequences

# Tokens. Smaller blocks leave less to the slower kernel and make more shapes.
BLOCK = 512
# Queries of a call: fewer do not fill the device.
LEAST_QUERIES = 1024
MOST_HEAD_DIM = 128


@dataclass(frozen=True)
class LibraryCall:
    """Prompts of which cuDNN takes the first queries.

    sequence: the first of them in the batch; row: where its tokens begin. sequences: how many, neighbours; more than
    one only if nothing of them is cached and all their tokens are taken. rows: new tokens taken of each; cached: those
    before them.
    """

    sequence: int
    sequences: int
    row: int
    rows: int
    cached: int

    @property
    def lead(self) -> int:
        """The last cached tokens, which do not fill a block; their keys are handled with the new ones."""
        return self.cached % BLOCK


@dataclass(frozen=True)
class BatchParts:
    """The rows of a step with prompts, by the kernel that attends for them.

    decodes: how many sequences, the first of the batch, have one new token. library: what cuDNN takes. left: rows that
    the kernel over pages takes; starts: [sequences] int32, where in each sequence they begin.
    """

    decodes: int
    library: tuple[LibraryCall, ...]
    left: int
    starts: Tensor


@dataclass(frozen=True)
class RecordedParts:
    """The division of a recorded step, which only the device knows: one recording serves batches of any lengths.

    decode_lengths: [sequences] int32, the lengths of those that `BatchParts` counts as decodes, 0 of the others.
    starts: as in `BatchParts`. bounds: [2] int32, the first sequence that is no decode, and where the sequences end,
    the one included to which padding belongs. virtual: those that are no decodes, for cuDNN; None: the kernel over
    pages takes them.
    """

    decode_lengths: Tensor
    starts: Tensor
    bounds: Tensor
    virtual: VirtualSequences | None = None


def library_reach(
    dtype: torch.dtype,
    head_dim: int,
    windows: Iterable[int | None],
    longest: int,
    capability: tuple[int, int] | None = None,
) -> int:
    """How long a sequence may be, cached tokens included, that cuDNN attends over; 0 if it cannot.

    dtype, head_dim: of the pools. windows: of the model's layers, which cuDNN does not know. longest: tokens that a
    sequence can have. capability: of the device; None: of the one that is here.
    """
    if capability is None:
        here = torch.cuda.is_available() and torch.backends.cudnn.is_available()
        capability = torch.cuda.get_device_capability() if here else (0, 0)
    if dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > MOST_HEAD_DIM or capability < (8, 0):
        return 0
    return min((window for window in windows if window is not None), default=longest)


def divide(cached: Sequence[int], new: Sequence[int], reach: int) -> BatchParts:
    """The parts of a step, `starts` on the CPU.

    cached, new: tokens of each sequence that lie in pages before the step, and that the step runs. reach: see
    `library_reach`.
    """
    decodes = next((at for at, count in enumerate(new) if count != 1), len(new))
    starts, row, left = list(range(1, decodes + 1)), decodes, 0
    library = []
    for (held, count), same in groupby(zip(cached[decodes:], new[decodes:], strict=True)):
        alike = len(list(same))
        rows = _whole_rows(held, count) if held + count <= reach else 0
        together = alike if held == 0 and rows == count else 1
        if rows * together < LEAST_QUERIES:
            rows = 0
        for first in range(0, alike if rows else 0, together):
            library.append(LibraryCall(len(starts) + first, together, row + first * count, rows, held))
        starts += [row + sequence * count + rows for sequence in range(alike)]
        left += alike * (count - rows)
        row += alike * count
    return BatchParts(decodes, tuple(library), left, torch.tensor(starts, dtype=torch.int32))


def _whole_rows(cached: int, new: int) -> int:
    """The most of the new tokens that fill blocks together with the last cached ones."""
    lead = cached % BLOCK
    return max(0, (lead + new) // BLOCK * BLOCK - lead)
