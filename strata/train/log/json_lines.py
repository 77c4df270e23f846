"""The log as a file: a JSON object a line."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """Lines that each have a `step`. A resumed run drops those that it will write again.

    A number that is not finite becomes null, for which JSON has no other word.
    """

    def __init__(self, path: Path, step: int) -> None:
        """step: how many steps are done."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = "".join(json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step)
            part = path.with_suffix(".part")
            part.write_text(kept, encoding="utf-8")
            part.replace(path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step} | {key: _written(value) for key, value in values.items()}) + "\n"
        data = line.encode()
        with self._path.open("ab", buffering=0) as stream:
            end = stream.tell()
            if stream.write(data) < len(data):
                stream.truncate(end)  # half a line would spoil the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Nothing to do: every line is written at once."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without one whose end a crash cut off."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _written(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
