"""What exercises are said with, from `texts.toml` beside this file."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))


def texts(section: str) -> dict[str, Any]:
    """Of a section of the file, by name: lists of phrasings, and of words."""
    found = _read()
    for name in section.split("."):
        found = found[name]
    return {name: value.split() if isinstance(value, str) else value for name, value in found.items()}
