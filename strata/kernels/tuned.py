"""What was measured to be fastest on a device: a table in the package for each device that was tuned.

A table is made offline by `strata bench kernels --tune`; while a model runs nothing is measured. A device without a
table, and a shape without an entry, get what they would get without tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Key:
    """A kind of call. dtype: as torch names it; out, width: the shape of the weight; rows: a power of two."""

    operation: str
    dtype: str
    out: int
    width: int
    rows: int


@dataclass(frozen=True)
class Choice:
    """The implementation to take, what it needs to know, and the seconds that it and the library took.

    library_seconds: of what the library can do of the call, which for a fused product is the product alone.
    """

    implementation: str
    parameters: Mapping[str, Any]
    seconds: float
    library_seconds: float


Table = Mapping[Key, Choice]


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
    table: dict[Key, Choice] = {}
    for number, entry in enumerate(content["entries"]):
        key, choice = _parse(entry, f"entry {number} of {path}")
        if key in table:
            raise ValueError(f"entry {number} of {path} repeats {key}")
        table[key] = choice
    return MappingProxyType(table)


_KINDS: dict[str, tuple[type, ...]] = {
    "operation": (str,),
    "dtype": (str,),
    "out": (int,),
    "width": (int,),
    "rows": (int,),
    "implementation": (str,),
    "parameters": (dict,),
    "seconds": (float,),
    "library_seconds": (float,),
}


def _parse(entry: Any, where: str) -> tuple[Key, Choice]:
    if not isinstance(entry, dict) or entry.keys() != _KINDS.keys():
        raise ValueError(f"{where} must have the keys {', '.join(_KINDS)} and no others")
    for name, kinds in _KINDS.items():
        if type(entry[name]) not in kinds:
            raise ValueError(f"{where} has {entry[name]!r} for {name}, which must be of type {kinds[0].__name__}")
    key = Key(**{field.name: entry[field.name] for field in fields(Key)})
    values = {field.name: entry[field.name] for field in fields(Choice)}
    return key, Choice(**values | {"parameters": MappingProxyType(values["parameters"])})


def write(path: Path, product: str, table: Table) -> None:
    """Write a table, an entry a line."""
    entries = [asdict(key) | _as_dict(choice) for key, choice in table.items()]
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"device": {json.dumps(product)}, "entries": [\n  {lines}\n]}}\n', encoding="utf-8")


def _as_dict(choice: Choice) -> dict[str, Any]:
    values = {field.name: getattr(choice, field.name) for field in fields(choice)}
    return values | {"parameters": dict(choice.parameters)}
