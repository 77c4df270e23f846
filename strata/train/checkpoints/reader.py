"""Reads a checkpoint into the shards of any layout: from each stored shard what a wanted one has in common with it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strata.train.checkpoints.flat_ranges import FlatRange, copy_common
from strata.train.checkpoints.folder import check_files
from strata.train.checkpoints.index import INDEX, CorruptCheckpoint, StoredShard, key_of
from strata.train.checkpoints.state import StateShard


class Reader:
    """An open checkpoint. Files are mapped, so that only what is wanted is read, and nothing is held twice."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptCheckpoint as `check_files` does."""
        self.path, self.index = path, check_files(path)
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._stack.close()

    def check(self, kind: str, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless there is a tensor of that shape."""
        stored = self.index.by_key.get(key_of(kind, name))
        if stored is None:
            raise ValueError(
                f"checkpoint {self.path} has no {kind} of {name}; it is of another model or another optimizer"
            )
        if stored[0].shape != shape:
            raise ValueError(
                f"checkpoint {self.path} has {name} of shape {list(stored[0].shape)}, the model {list(shape)}; "
                f"it is of another model"
            )

    def fill(self, kind: str, name: str, run: FlatRange, out: Tensor) -> None:
        """Put a run of a tensor into `out`, [elements], contiguous, on any device and of any float dtype.

        Raises CorruptCheckpoint, naming the file, if what is read is not what was written.
        """
        shards = [shard for shard in self.index.by_key[key_of(kind, name)] if shard.flat_range.overlaps(run)]
        if len(shards) == 1 and shards[0].flat_range == run:
            out.copy_(self._values(shards[0]))
            return
        host = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        copied = sum(copy_common(shard.flat_range, self._values(shard), run, host) for shard in shards)
        if copied != run.elements:
            reason = f"it lists {copied} of {run.elements} elements of {kind} of {name}"
            raise CorruptCheckpoint(self.path / INDEX, reason)
        if host is not out:
            out.copy_(host)

    def whole(self, kind: str, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor as it was before any layout divided it, on the CPU."""
        value = torch.empty(self.index.by_key[key_of(kind, name)][0].shape, dtype=dtype, device="cpu")
        self.fill(kind, name, FlatRange.of_whole(value.shape), value.view(-1))
        return value

    def _values(self, shard: StoredShard) -> Tensor:
        """A stored shard, [elements], checked."""
        file = self.path / shard.file
        try:
            values: Tensor = self._open(shard.file).get_tensor(shard.key)
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpoint(file, str(error)) from None
        if values.shape != (shard.elements,) or str(values.dtype) != f"torch.{shard.dtype}":
            raise CorruptCheckpoint(file, f"{shard.key} is {values.dtype} {list(values.shape)}, not as the index says")
        if zlib.crc32(values.view(torch.uint8).numpy().data) != shard.crc32:
            raise CorruptCheckpoint(file, f"the checksum of {shard.key} is not that of what was written")
        return values

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(self.path / file, framework="pt"))
        return self._opened[file]


@torch.no_grad()
def load(path: Path, shards: Sequence[StateShard]) -> None:
    """Fill the shards, in place, from a checkpoint that any layout on any number of ranks has written.

    Raises CorruptCheckpoint, naming the file, if what is read is not what was written; ValueError if a shard is of
    another model or optimizer. The shards may be filled in part then.
    """
    with Reader(path) as reader:
        for shard in shards:
            reader.check(shard.kind, shard.name, shard.shape)
            reader.fill(shard.kind, shard.name, shard.flat_range, shard.tensor)
