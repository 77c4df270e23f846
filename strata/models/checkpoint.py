"""What a folder of safetensors files holds, known from the headers alone and checked before any weight is read."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
# The format's own limit, so that a corrupt length does not make us read gigabytes.
_LONGEST_HEADER = 100_000_000


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
    """One tensor of a checkpoint. `start` is the byte where it begins, counted from the end of the header.

    first_row, expert: of what stands here as a tensor of `shape` and is a part of the one in the file.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
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
    """The tensors of one safetensors file: a length (8 bytes, little-endian), a JSON header, then the data."""
    text, data_bytes = _read_header_text(file)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _corrupt(file, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(file, "its metadata is not an object of strings")
    return _read_entries(file, header, data_bytes, _DTYPES | (_PACKED_DTYPES if packed else {}))


def _read_header_text(file: Path) -> tuple[bytes, int]:
    """The JSON header, and how many bytes follow it."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = stream.read(length) if 2 <= length <= min(_LONGEST_HEADER, size - 8) else b""
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist, though the checkpoint needs it") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not text:
        raise _corrupt(file, f"its header claims {length} bytes, the file has {size}")
    return text, size - 8 - length


def _read_entries(
    file: Path, header: dict[str, Any], data_bytes: int, dtypes: dict[str, torch.dtype]
) -> dict[str, StoredTensor]:
    """The header's entries, which must tile the data without gap or overlap."""
    tensors, spans = {}, []
    for name, entry in header.items():
        tensors[name], end = _read_entry(file, name, entry, dtypes)
        spans.append((tensors[name].start, end, name))
    covered = 0
    for start, end, name in sorted(spans):
        if start != covered:
            raise _corrupt(file, f"the data of {name} begins at byte {start}, where byte {covered} was expected")
        covered = end
    if covered != data_bytes:
        raise _corrupt(file, f"its header describes {covered} bytes of data, the file holds {data_bytes}")
    return tensors


def _read_entry(file: Path, name: str, entry: Any, dtypes: dict[str, torch.dtype]) -> tuple[StoredTensor, int]:
    """A tensor and the byte where it ends."""
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _corrupt(file, f"the header's entry of {name} lacks dtype, shape or data_offsets") from None
    if any(type(value) is not int or value < 0 for value in (*shape, start, end)):
        raise _corrupt(file, f"the header's entry of {name} has a size or offset that is not a count")
    known = dtypes | ({"U8": torch.uint8} if name.endswith(_PACKED) else {})
    if kind not in list(known):
        reason = "" if len(dtypes) > len(_DTYPES) else " (config.json tells of no quantized weights)"
        raise ValueError(f"{file}: {name} has dtype {kind}; supported are {', '.join(dtypes)}{reason}")
    tensor = StoredTensor(name, file, known[kind], shape, start)
    if end - start != math.prod(shape) * tensor.dtype.itemsize:
        raise _corrupt(file, f"{name} of shape {list(shape)} and dtype {kind} does not take {end - start} bytes")
    return tensor, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return found


def _corrupt(file: Path, reason: str) -> ValueError:
    return ValueError(f"{file} is truncated or corrupt: {reason}; download or copy it again")


def shorten(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
