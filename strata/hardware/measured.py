"""Calls that were measured on devices, for predictions: a file in the package for each device, made offline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from strata.hardware.prediction import Call

FOLDER = Path(__file__).parent / "measured"


def path_of(product: str, folder: Path = FOLDER) -> Path:
    """The file of a device, by the name that its driver reports."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', product.lower()).strip('_')}.json"


def read(product: str, folder: Path = FOLDER) -> dict[str, list[Call]]:
    """The calls of a device by operation, none if there is no file.

    Raises ValueError, naming it, for what `write` does not make.
    """
    path = path_of(product, folder)
    if not path.is_file():
        return {}
    found: dict[str, list[Call]] = {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for operation, kind, dtype, shape, seconds in content["calls"]:
            found.setdefault(operation, []).append((kind, dtype, tuple(shape), seconds))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of measured calls ({error}); make it anew") from None
    return found


def write(product: str, source: str, calls: Mapping[str, Iterable[Call]], folder: Path = FOLDER) -> Path:
    """Write those of each operation, one a line. source: what measured them."""
    path = path_of(product, folder)
    each = sorted((operation, *call) for operation, of_one in calls.items() for call in of_one)
    lines = ",\n".join(f"  {json.dumps(call)}" for call in each)
    path.write_text(
        f'{{\n "device": {json.dumps(product)},\n "source": {json.dumps(source)},\n "calls": [\n{lines}\n ]\n}}\n',
        encoding="utf-8",
    )
    return path
