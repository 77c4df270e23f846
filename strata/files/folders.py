"""What stands at a path that should be a folder."""

from __future__ import annotations

from pathlib import Path


def why_no_folder(folder: Path, asked_as: str = "model folder") -> str:
    """For a path that is no folder: whether something else stands there."""
    return f"{asked_as} {str(folder)!r} " + ("is a file" if folder.exists() else "does not exist")
