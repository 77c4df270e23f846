"""The table of a checkpoint: which file holds which shard of which tensor, as JSON."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from strata.train.checkpoints.flat_ranges import FlatRange, are_disjoint

INDEX, STATE = "index.json", "state.json"
_FORMAT = "strata-checkpoint-1"
_Count = Annotated[int, msgspec.Meta(ge=0)]
# What may be stored, and what safetensors calls it.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class CorruptCheckpoint(ValueError):
    """A checkpoint that cannot be read; another one may."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"checkpoint {file.parent} is corrupt: {file.name}: {reason}")


class StoredShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A shard as a file has it, under the key `kind/name`. crc32: of its bytes. The rest as in `StateShard`."""

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
            raise ValueError(f"a shard of {self.key} lies outside of it")

    @property
    def key(self) -> str:
        return key_of(self.kind, self.name)

    @cached_property
    def flat_range(self) -> FlatRange:
        return FlatRange(self.box, self.start, self.elements)


def key_of(kind: str, name: str) -> str:
    """What a safetensors file calls a shard."""
    return f"{kind}/{name}"


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, tag_field="format", tag=_FORMAT):
    """What a checkpoint consists of. files: the bytes of each beside the index. state_crc32: of `state.json`."""

    files: dict[str, int]
    state_crc32: int
    shards: list[StoredShard] = msgspec.field(name="pieces")  # as files have it

    @cached_property
    def by_key(self) -> dict[str, list[StoredShard]]:
        """The shards of each tensor."""
        found: dict[str, list[StoredShard]] = {}
        for shard in self.shards:
            found.setdefault(shard.key, []).append(shard)
        return found

    def check(self) -> None:
        """Raise ValueError unless every element of every tensor lies in one shard."""
        for key, shards in self.by_key.items():
            if len({shard.shape for shard in shards}) != 1:
                raise ValueError(f"the shards of {key} are of different shapes")
            stored, whole = sum(shard.elements for shard in shards), math.prod(shards[0].shape)
            if stored != whole:
                raise ValueError(f"{key} has {whole} elements, and the shards together {stored}")
            if not are_disjoint([shard.flat_range for shard in shards]):
                raise ValueError(f"two shards of {key} overlap, and other elements lie in none")

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
        raise CorruptCheckpoint(file, f"it is no table of shards: {error}") from None
    raise ValueError(f"{file} is of the format {found!r}; this version reads {_FORMAT!r}")
