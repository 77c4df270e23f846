"""Models of huggingface.co by name, found where its tools keep what they downloaded. Nothing is downloaded here.

The layout is documented: models--ORG--NAME/refs/main holds a commit, snapshots/COMMIT the files of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from strata.files.weight_index import INDEX, SINGLE, read_index

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Whether it is written as `org/model`; a folder of that name comes first."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where downloads are kept: HF_HUB_CACHE, or `hub` in HF_HOME, or the cache of the user."""
    if given := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home).expanduser() / "hub"


def find_snapshot(name: str) -> Path:
    """The folder of the newest download of a model. Raises ValueError, with the command that downloads it, if there is
    none with a config.json.
    """
    kept = cache_folder() / f"models--{name.replace('/', '--')}"
    if not kept.is_dir():
        raise ValueError(
            f"{name!r} is no folder here and not in the Hugging Face cache ({kept.parent}), and Strata downloads "
            f"nothing: run `hf download {name}` and this again, or give a model folder or 'builtin'"
        )
    try:
        folder = kept / "snapshots" / (kept / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        raise ValueError(_incomplete(name, kept, "no revision main")) from None
    if not (folder / "config.json").is_file():
        raise ValueError(_incomplete(name, folder, "no config.json"))
    return folder


def check_weights(name: str, folder: Path) -> None:
    """Raises ValueError if files of weights are missing from a snapshot: its download was cut off, or left them out."""
    if (folder / SINGLE).is_file():
        return
    if not (folder / INDEX).is_file():
        raise ValueError(_incomplete(name, folder, "no weights (safetensors)"))
    missing = [file for file in sorted(set(read_index(folder / INDEX).values())) if not (folder / file).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
        raise ValueError(_incomplete(name, folder, f"no {missing[0]}{more}"))


def _incomplete(name: str, where: Path, lacks: str) -> str:
    return (
        f"{name!r} is in the Hugging Face cache, but not whole: {where} has {lacks}; run `hf download {name}`, which "
        "goes on where a download was cut off, and this again"
    )


def why_no_folder(folder: Path, asked_as: str = "model folder") -> str:
    """For a path that is no folder: whether something else stands there."""
    return f"{asked_as} {str(folder)!r} " + ("is a file" if folder.exists() else "does not exist")
