"""The table of a checkpoint: which file holds which piece of which tensor, as JSON."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from strata.train.checkpoints.regions import Run, are_apart

INDEX, STATE = "index.json", "state.json"
_FORMAT = "strata-checkpoint-1"
_Count = Annotated[int, msgspec.Meta(ge=0)]
# What may be stored, and what safetensors calls it.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class CorruptCheckpoint(ValueError):
    """A checkpoint that cannot be read; another one may."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"checkpoint {file.parent} is corrupt: {file.name}: {reason}")


class StoredPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A piece as a file has it, under the key `kind/name`. crc32: of its bytes. The rest as in `Piece`."""

    file: str
    kind: str
    name: str
    shape: tuple[_Count, ...]
    box: tuple[tuple[_Count, _Count], ...]
    start: _Count
    elements: _Count
    dtype: str
    crc32: _Count

    def __post_init__(self) -> None:
        edges = zip(self.box, self.shape, strict=False)
        inside = len(self.box) == len(self.shape) and all(first <= end <= size for (first, end), size in edges)
        if not inside or self.start + self.elements > math.prod(end - first for first, end in self.box):
            raise ValueError(f"a piece of {self.key} lies outside of it")

    @property
    def key(self) -> str:
        return key_of(self.kind, self.name)

    @cached_property
    def run(self) -> Run:
        return Run(self.box, self.start, self.elements)


def key_of(kind: str, name: str) -> str:
    """What a safetensors file calls a piece."""
    return f"{kind}/{name}"


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, tag_field="format", tag=_FORMAT):
    """What a checkpoint consists of. files: the bytes of each beside the index. state_crc32: of `state.json`."""

    files: dict[str, int]
    state_crc32: int
    pieces: list[StoredPiece]

    @cached_property
    def by_key(self) -> dict[str, list[StoredPiece]]:
        """The pieces of each tensor."""
        found: dict[str, list[StoredPiece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.key, []).append(piece)
        return found

    def check(self) -> None:
        """Raise ValueError unless every element of every tensor lies in one piece."""
        for key, pieces in self.by_key.items():
            if len({piece.shape for piece in pieces}) != 1:
                raise ValueError(f"the pieces of {key} are of different shapes")
            stored, whole = sum(piece.elements for piece in pieces), math.prod(pieces[0].shape)
            if stored != whole:
                raise ValueError(f"{key} has {whole} elements, and the pieces together {stored}")
            if not are_apart([piece.run for piece in pieces]):
                raise ValueError(f"two pieces of {key} overlap, and other elements lie in none")

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


class _Header(msgspec.Struct):
    format: str


def read_index(path: Path) -> Index:
    """The table of the checkpoint `path`. Raises CorruptCheckpoint if it is missing or does not make up whole tensors,
    ValueError if it is of another format.
    """
    file = path / INDEX
    try:
        text = file.read_bytes()
        found = msgspec.json.decode(text, type=_Header).format
        if found == _FORMAT:
            index = msgspec.json.decode(text, type=Index)
            index.check()
            return index
    except FileNotFoundError:
        raise CorruptCheckpoint(file, "it is missing") from None
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(file, f"it is no table of pieces: {error}") from None
    raise ValueError(f"{file} is of the format {found!r}; this version reads {_FORMAT!r}")
