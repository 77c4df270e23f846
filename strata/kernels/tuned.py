"""What was measured to be fastest on a device: a table in the package for each device that was tuned.

A table is made offline by `strata bench kernels --tune`; while a model runs nothing is measured. A device without a
table, and a shape without an entry, get what they would get without tables.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

FOLDER = Path(__file__).parent / "tuned"
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Key:
    """A kind of call. dtype: as torch names it; out, width: the shape of the weight; rows: that were measured."""

    operation: str
    dtype: str
    out: int
    width: int
    rows: int


@dataclass(frozen=True)
class TunedChoice:
    """The implementation to take, what it needs to know, and the seconds that it and the library took.

    library_seconds: of what the library can do of the call, which for a fused product is the product alone.
    """

    implementation: str
    parameters: Mapping[str, Any]
    seconds: float
    library_seconds: float


Table = Mapping[Key, TunedChoice]


def row_bucket(rows: int) -> int:
    """The next power of two: the most rows of a measurement that still tells of so many."""
    return 1 << max(0, rows - 1).bit_length()


def serving_key(measured: Mapping[Key, object], key: Key) -> Key | None:
    """The key of what is listed for a call, or else for the same with the next larger rows, up to `row_bucket`."""
    keys = (replace(key, rows=rows) for rows in range(key.rows, row_bucket(key.rows) + 1)) if measured else ()
    return next((other for other in keys if other in measured), None)


def serving(measured: Mapping[Key, Kind], key: Key) -> Kind | None:
    """What is listed under the `serving_key`."""
    found = serving_key(measured, key)
    return None if found is None else measured[found]


def path_of(product: str, folder: Path = FOLDER) -> Path:
    """Where the table of a device stands, by the name its driver reports: "NVIDIA H200" -> nvidia_h200.json."""
    return folder / f"{re.sub('[^a-z0-9]+', '_', product.lower()).strip('_')}.json"


@cache
def read(product: str, folder: Path = FOLDER) -> Table:
    """The table of a device, empty if there is none. Read once in a process."""
    path = path_of(product, folder)
    return read_file(path) if path.is_file() else MappingProxyType({})


def read_file(path: Path) -> Table:
    """Read a table. Raises ValueError, naming the file and what is wrong, unless it is as `write` makes it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or content.keys() != {"device", "entries"}:
        raise ValueError(f"{path} is no table of tuned kernels: it must have the keys device and entries alone")
    if not isinstance(content["entries"], list):
        raise ValueError(f"{path} is no table of tuned kernels: its entries must be a list")
    table: dict[Key, TunedChoice] = {}
    for number, entry in enumerate(content["entries"]):
        key, choice = _parse(entry, f"entry {number} of {path}")
        if key in table:
            raise ValueError(f"entry {number} of {path} repeats {key}")
        table[key] = choice
    return MappingProxyType(table)


def _parse(entry: Any, where: str) -> tuple[Key, TunedChoice]:
    names = [field.name for part in (Key, TunedChoice) for field in fields(part)]
    if not isinstance(entry, dict) or entry.keys() != set(names):
        raise ValueError(f"{where} must have the keys {', '.join(names)} and no others")
    try:
        key, choice = msgspec.convert(entry, Key), msgspec.convert(entry, TunedChoice)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    return key, replace(choice, parameters=MappingProxyType(entry["parameters"]))


def write(path: Path, product: str, table: Table) -> None:
    """Write a table, an entry a line, in one move."""
    entries = [asdict(key) | _as_dict(choice) for key, choice in table.items()]
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f'{{"device": {json.dumps(product)}, "entries": [\n  {lines}\n]}}\n', encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _as_dict(choice: TunedChoice) -> dict[str, Any]:
    values = {field.name: getattr(choice, field.name) for field in fields(choice)}
    return values | {"parameters": dict(choice.parameters)}
