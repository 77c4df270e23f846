"""The table of a checkpoint: which file holds which piece of which tensor, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from strata.train.checkpoints.regions import Box, Run, are_apart

INDEX, STATE = "index.json", "state.json"
_FORMAT = "strata-checkpoint-1"
# What may be stored, and what safetensors calls it.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class CorruptCheckpoint(ValueError):
    """A checkpoint that cannot be read; another one may."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"checkpoint {file.parent} is corrupt: {file.name}: {reason}")


@dataclass(frozen=True)
class StoredPiece:
    """A piece as a file has it, under the key `kind/name`. crc32: of its bytes. The rest as in `Piece`."""

    file: str
    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    elements: int
    dtype: str
    crc32: int

    @property
    def key(self) -> str:
        return key_of(self.kind, self.name)

    @cached_property
    def run(self) -> Run:
        return Run(self.box, self.start, self.elements)

    def values(self) -> dict[str, Any]:
        """What JSON can hold; `of` makes the piece again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def of(values: Mapping[str, Any]) -> StoredPiece:
        """From JSON. Raises KeyError, TypeError or ValueError for anything else."""
        shape, box = tuple(values["shape"]), tuple((first, end) for first, end in values["box"])
        piece = StoredPiece(**{**values, "shape": shape, "box": box})
        counts = (*shape, *(edge for edges in box for edge in edges), piece.start, piece.elements, piece.crc32)
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"{piece.key} has a size that is not a count")
        inside = len(box) == len(shape) and all(0 <= a <= b <= size for (a, b), size in zip(box, shape, strict=True))
        if not inside or piece.start + piece.elements > math.prod(end - first for first, end in box):
            raise ValueError(f"a piece of {piece.key} lies outside of it")
        return piece


def key_of(kind: str, name: str) -> str:
    """What a safetensors file calls a piece."""
    return f"{kind}/{name}"


@dataclass(frozen=True)
class Index:
    """What a checkpoint consists of. files: the bytes of each beside the index. state_crc32: of `state.json`."""

    files: Mapping[str, int]
    state_crc32: int
    pieces: Sequence[StoredPiece]

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

    def to_json(self) -> str:
        pieces = ",\n".join(json.dumps(piece.values()) for piece in self.pieces)
        head = {"format": _FORMAT, "files": dict(self.files), "state_crc32": self.state_crc32}
        return f'{json.dumps(head)[:-1]}, "pieces": [\n{pieces}\n]}}\n'


def read_index(path: Path) -> Index:
    """The table of the checkpoint `path`. Raises CorruptCheckpoint if it is missing or does not make up whole tensors,
    ValueError if it is of another format.
    """
    file = path / INDEX
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] == _FORMAT:
            pieces = [StoredPiece.of(piece) for piece in values["pieces"]]
            index = Index(values["files"], values["state_crc32"], pieces)
            index.check()
            return index
    except FileNotFoundError:
        raise CorruptCheckpoint(file, "it is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(file, f"it is no table of pieces: {error!r}") from None
    raise ValueError(f"{file} is of the format {values['format']!r}; this version reads {_FORMAT!r}")
