"""Batches made by hand, without the cache floor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strata.kernels.state.paged import PagedKV
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.state import attention_rows


def random_sequences(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def packed(sequences: Sequence[Sequence[int]]) -> Batch:
    """Whole sequences, one after another."""
    return _batch(sequences, [0] * len(sequences), None)


class HandPaged:
    """KV pools and block tables of a few sequences, their pages interleaved and in falling order."""

    def __init__(
        self,
        config: ModelConfig,
        sequences: int,
        longest: int,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.page_size = page_size
        self.lengths = [0] * sequences
        most = -(-longest // page_size)
        self.tables = torch.arange(most * sequences, dtype=torch.int32).flip(0).view(most, sequences).T.contiguous()
        rows = attention_rows(config)
        shape = (most * sequences, page_size, *rows.shape)
        # What was never written must never be read.
        self.keys = tuple(torch.full(shape, float("nan"), dtype=dtype) for _ in range(config.num_layers))
        self.values = self.keys
        if rows.tensors == 2:
            self.values = tuple(torch.full(shape, float("nan"), dtype=dtype) for _ in range(config.num_layers))

    def slot(self, row: int, position: int) -> int:
        """Where a sequence's token at a position goes."""
        return int(self.tables[row, position // self.page_size]) * self.page_size + position % self.page_size

    def next_batch(self, chunks: dict[int, Sequence[int]]) -> Batch:
        """The next tokens of some sequences, by their number."""
        rows, slots, starts = list(chunks), [], []
        for row, tokens in chunks.items():
            starts.append(self.lengths[row])
            for position in range(self.lengths[row], self.lengths[row] + len(tokens)):
                slots.append(self.slot(row, position))
            self.lengths[row] += len(tokens)
        pages = PagedKV(
            self.keys, self.values, self.tables[rows], _int32([self.lengths[r] for r in rows]), _int32(slots)
        )
        return _batch(list(chunks.values()), starts, pages)


def _batch(sequences: Sequence[Sequence[int]], starts: Sequence[int], pages: PagedKV | None) -> Batch:
    offsets = [0]
    for tokens in sequences:
        offsets.append(offsets[-1] + len(tokens))
    tokens = [token for sequence in sequences for token in sequence]
    positions = [start + i for sequence, start in zip(sequences, starts, strict=True) for i in range(len(sequence))]
    return Batch(_int32(tokens), _int32(positions), _int32(offsets), max(map(len, sequences)), pages)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
