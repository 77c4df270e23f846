"""What a folder of safetensors files holds, known from the headers alone and checked before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from strata.files.weight_index import INDEX, SINGLE, read_index

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What packed weights are called, beside their own names: bytes.
_PACKED = ("_blocks", "_scales")
# Those of packed weights and their scales in the formats of `strata.models.quantized.formats`.
_PACKED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class ExpertPlace:
    """Where a matrix [outputs, inputs] of one expert lies in a tensor of all experts (`strata.models.joined`).

    number: of the expert. first, step: of the tensor's outputs it has those from `first` on, every `step`-th. scales:
    of a packed tensor; None: it holds floats, [experts, inputs, outputs].
    """

    number: int
    first: int
    step: int
    scales: StoredTensor | None


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint. `place` is its number in the order of the file's bytes.

    first_row, expert: of what stands here as a tensor of `shape` and is a part of the one in the file.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: int
    first_row: int = 0
    expert: ExpertPlace | None = None


def read_checkpoint(folder: Path, packed: bool = False) -> dict[str, StoredTensor]:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists, by name.

    packed: its config.json says how weights are packed. Reads headers only. Raises ValueError for a missing file, a
    corrupt or truncated one, an index that does not match its shards, or weights that are neither floats nor packed.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE, packed)
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors weights are read")
    homes = read_index(folder / INDEX)
    shards = {name: read_header(folder / name, packed) for name in sorted(set(homes.values()))}
    absent = [name for name, home in homes.items() if name not in shards[home]]
    if absent:
        raise ValueError(f"{folder / INDEX} lists tensors that their files do not hold: {shorten(absent)}")
    unlisted = [name for home, shard in shards.items() for name in shard if homes.get(name) != home]
    if unlisted:
        raise ValueError(f"{folder / INDEX} does not list tensors that its files hold: {shorten(unlisted)}")
    return {name: shards[home][name] for name, home in homes.items()}


def read_header(file: Path, packed: bool = False) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist, though the checkpoint needs it")
    dtypes = _DTYPES | (_PACKED_DTYPES if packed else {})
    tensors = {}
    try:
        with safe_open(file, framework="numpy") as reader:  # torch would ask the system for memory of the file's size
            for place, name in enumerate(reader.offset_keys()):
                stored = reader.get_slice(name)
                dtype = _dtype_of(file, name, stored.get_dtype(), dtypes)
                tensors[name] = StoredTensor(name, file, dtype, tuple(stored.get_shape()), place)
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or corrupt: {error}; download or copy it again") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    return tensors


def _dtype_of(file: Path, name: str, kind: str, dtypes: dict[str, torch.dtype]) -> torch.dtype:
    known = dtypes | ({"U8": torch.uint8} if name.endswith(_PACKED) else {})
    if kind not in known:
        reason = "" if len(dtypes) > len(_DTYPES) else " (config.json tells of no quantized weights)"
        raise ValueError(f"{file}: {name} has dtype {kind}; supported are {', '.join(dtypes)}{reason}")
    return known[kind]


def shorten(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
