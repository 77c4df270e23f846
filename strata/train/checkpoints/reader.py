"""Reads a checkpoint into the pieces of any layout: from each stored piece what a wanted one has in common with it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strata.train.checkpoints.folder import check_files
from strata.train.checkpoints.index import INDEX, CorruptCheckpoint, StoredPiece, key_of
from strata.train.checkpoints.regions import Run, copy_common
from strata.train.checkpoints.state import Piece


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

    def fill(self, kind: str, name: str, run: Run, out: Tensor) -> None:
        """Put a run of a tensor into `out`, [elements], contiguous, on any device and of any float dtype.

        Raises CorruptCheckpoint, naming the file, if what is read is not what was written.
        """
        pieces = [piece for piece in self.index.by_key[key_of(kind, name)] if piece.run.overlaps(run)]
        if len(pieces) == 1 and pieces[0].run == run:
            out.copy_(self._values(pieces[0]))
            return
        host = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        copied = sum(copy_common(piece.run, self._values(piece), run, host) for piece in pieces)
        if copied != run.elements:
            reason = f"it lists {copied} of {run.elements} elements of {kind} of {name}"
            raise CorruptCheckpoint(self.path / INDEX, reason)
        if host is not out:
            out.copy_(host)

    def _values(self, piece: StoredPiece) -> Tensor:
        """A stored piece, [elements], checked."""
        file = self.path / piece.file
        try:
            values: Tensor = self._open(piece.file).get_tensor(piece.key)
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpoint(file, str(error)) from None
        if values.shape != (piece.elements,) or str(values.dtype) != f"torch.{piece.dtype}":
            raise CorruptCheckpoint(file, f"{piece.key} is {values.dtype} {list(values.shape)}, not as the index says")
        if zlib.crc32(values.view(torch.uint8).numpy().data) != piece.crc32:
            raise CorruptCheckpoint(file, f"the checksum of {piece.key} is not that of what was written")
        return values

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(self.path / file, framework="pt"))
        return self._opened[file]


@torch.no_grad()
def load(path: Path, pieces: Sequence[Piece]) -> None:
    """Fill the pieces, in place, from a checkpoint that any layout on any number of ranks has written.

    Raises CorruptCheckpoint, naming the file, if what is read is not what was written; ValueError if a piece is of
    another model or optimizer. The pieces may be filled in part then.
    """
    with Reader(path) as reader:
        for piece in pieces:
            reader.check(piece.kind, piece.name, piece.shape)
            reader.fill(piece.kind, piece.name, piece.run, piece.tensor)
