"""The log of a run: a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunLog:
    """Lines that each have a `step`. A resumed run drops those that it will write again."""

    def __init__(self, path: Path, step: int) -> None:
        """step: how many steps are done."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(values) + "\n")


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]  # a line without its end was cut off by a crash
