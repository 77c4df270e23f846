"""The folder of a run's checkpoints: their names, which are whole, how one appears, and which are removed."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strata.train.checkpoints.index import INDEX, STATE, CorruptCheckpoint, Index, read_index

_NAME = re.compile(r"step-(\d{8,})")

# In `state.json`: steps whose checkpoints remain as long as this one.
NEEDED = "needed"

Warn = Callable[[str], None]


def checkpoints(folder: Path) -> list[Path]:
    """Those that were published in a folder, oldest first. What is still being written has another name."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step after which a checkpoint was made."""
    return int(path.name.removeprefix("step-"))


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step appears."""
    return folder / f"step-{step:08}"


def unfinished_path(folder: Path, step: int) -> Path:
    """Where it is until then."""
    return folder / f".{checkpoint_path(folder, step).name}.part"


def newest(folder: Path, warn: Warn) -> Path | None:
    """The newest checkpoint that is whole: all files are there and have their sizes. Checksums are for `load`.

    warn: is called with each newer one that is not.
    """
    return next(whole_checkpoints(folder, warn), None)


def whole_checkpoints(folder: Path, warn: Warn) -> Iterator[Path]:
    """Newest first. warn: is called with those that are left out."""
    for path in reversed(checkpoints(folder)):
        try:
            check_files(path)
        except CorruptCheckpoint as error:
            warn(str(error))
        else:
            yield path


def check_files(path: Path) -> Index:
    """The table of a checkpoint. Raises CorruptCheckpoint, naming the file, if one is missing, has another size than
    the table says, or if `state.json` has changed.
    """
    index = read_index(path)
    for name, size in index.files.items():
        file = path / name
        if not file.is_file():
            raise CorruptCheckpoint(file, "it is missing")
        if file.stat().st_size != size:
            raise CorruptCheckpoint(file, f"it has {file.stat().st_size} bytes, {size} were written")
    if absent := {STATE, *(shard.file for shard in index.shards)} - index.files.keys():
        raise CorruptCheckpoint(path / INDEX, f"it does not list {min(absent)}")
    if zlib.crc32((path / STATE).read_bytes()) != index.state_crc32:
        raise CorruptCheckpoint(path / STATE, "its checksum is not that of what was written")
    return index


def read_state(path: Path) -> dict[str, Any]:
    """What the run wrote into `state.json`. Raises CorruptCheckpoint as `check_files` does."""
    check_files(path)
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def publish(folder: Path, step: int, index: Index) -> Path:
    """Add the table to what all ranks have written for a step, and let the checkpoint appear, all at once.

    After a crash at any moment, and after a power cut, there is the whole checkpoint or none. One of the same step, of
    an earlier attempt, is replaced.
    """
    part, target = unfinished_path(folder, step), checkpoint_path(folder, step)
    write_durably(part / INDEX, index.to_json())
    _flush_folder(part)
    if target.exists():
        set_aside(target)
    part.rename(target)
    try:
        _flush_folder(folder)
    except OSError:
        set_aside(target)
        raise
    return target


def prune(folder: Path, latest: Path, keep: int) -> None:
    """Set aside those before the `keep` newest ones up to `latest`, but for those that one of these names. Later ones
    are of a run that was resumed further back; `latest` never gives way to them.
    """
    found = [one for one in checkpoints(folder) if step_of(one) <= step_of(latest)]
    named = {step for path in found[-keep:] for step in _needed(path)}
    for path in found[:-keep]:
        if step_of(path) not in named:
            set_aside(path)


def _needed(path: Path) -> list[int]:
    """The steps of which a checkpoint's run needs the checkpoints, too."""
    try:
        return list(read_state(path).get(NEEDED, []))
    except CorruptCheckpoint:
        return []


def set_aside(path: Path) -> None:
    """Let a checkpoint disappear at once, whole or in part, and be one of the `unfinished`: removing takes seconds."""
    path.rename(path.with_name(f".step-removed{path.name}.part"))


def unfinished(folder: Path) -> list[Path]:
    """What is to be removed, unless a checkpoint is being written: what was set aside, and what processes left that
    ended in the middle of one.
    """
    return sorted(folder.glob(".step-*.part"))


def remove(paths: Sequence[Path]) -> None:
    """Remove folders. What cannot be removed stays, and is tried again with the next ones."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def write_durably(file: Path, data: bytes) -> None:
    """Write a file that survives a power cut."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    """The names in a folder survive a power cut from here on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_recipe(path: Path, saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the first difference, if a checkpoint is of another recipe: values by section."""
    for section in recipe:
        for key in recipe[section].keys() | saved.get(section, {}).keys():
            was, now = saved.get(section, {}).get(key), recipe[section].get(key)
            if was != now:
                raise ValueError(
                    f"cannot resume {path}: {section}.{key} was {was!r} and is now {now!r}; "
                    f"restore it, or start a new run in another folder"
                )
