"""Which pages each running sequence has: on the host, and on the device, which receives what changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from strata.cache.staging import Staging
from strata.kernels.attention.query_chunks import KEY_BLOCK

# Entries that travel to the device at once.
MAX_CHANGES = 4096


def table_pages(max_length: int, page_size: int) -> int:
    """Entries of a sequence's table: as many pages as it can have, in whole blocks of keys, as the library reads."""
    pages, block = -(-max_length // page_size), max(1, KEY_BLOCK // page_size)
    return -(-pages // block) * block


class BlockTables:
    """Row = slot, column = page of the slot's sequence: [slots + 1, page_limit] int32.

    The last row is of zeros, for padding rows of a CUDA graph. `rows` is the host's side, `on_device` the device's,
    which follows in the order of the work that the device is given: captured steps enter the page of each sequence's
    new token themselves, with `gather_tables`, because `send` between two replays would slow those after it
    (docs/log.md); `send` brings all else. On a CPU both are one.
    """

    def __init__(self, slots: int, page_limit: int, device: torch.device) -> None:
        self.rows: NDArray[np.int32] = np.zeros((slots + 1, page_limit), dtype=np.int32)
        host = torch.from_numpy(self.rows)
        self._shared = device.type == "cpu"
        self.on_device = host if self._shared else torch.zeros_like(host, device=device)
        # Two, so that changes can be written down while those of the step before have not left.
        self._staging = [Staging(3 * MAX_CHANGES, device) for _ in range(2)]
        self._changed: list[NDArray[np.int64]] = []

    @property
    def padding(self) -> int:
        """The row of no sequence."""
        return len(self.rows) - 1

    def update(self, slot: int, first: int, pages: Sequence[int], entered: int | None = None) -> None:
        """Entries [first, first + len(pages)) of a sequence's table have changed.

        entered: the column that the step enters itself.
        """
        self.rows[slot, first : first + len(pages)] = pages
        if not self._shared:
            columns = np.arange(first, first + len(pages))
            columns = columns if entered is None else columns[columns != entered]
            if len(columns):
                self._changed.append(slot * self.rows.shape[1] + columns)

    def send(self) -> None:
        """Bring the device's side up to the host's: a copy and a kernel, if anything has changed."""
        if not self._changed:
            return
        indices = np.concatenate(self._changed)
        self._changed.clear()
        entries = self.on_device.view(-1)
        for start in range(0, len(indices), MAX_CHANGES):
            part = indices[start : start + MAX_CHANGES]
            self._staging.reverse()
            staging, count = self._staging[0], len(part)
            staging.wait()
            host = staging.host.numpy()
            host[: 2 * count].view(np.int64)[:] = part
            host[2 * count : 3 * count] = self.rows.reshape(-1)[part]
            sent = staging.target(3 * count)
            staging.send(sent)
            entries.scatter_(0, sent[: 2 * count].view(torch.int64), sent[2 * count :])
