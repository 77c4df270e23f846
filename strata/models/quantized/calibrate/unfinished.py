"""A folder that grows layer by layer beside the one that it becomes, and goes on after an interruption."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from strata.files.json_object import read_object
from strata.files.locks import lock
from strata.files.weight_index import INDEX
from strata.models.save import write_json, write_shard

_JOURNAL, _LOCK = "journal.json", "lock"


def unfinished_folder(out: Path) -> Path:
    """Where shards of `out` lie until all are there."""
    return out.parent / f".{out.name}.unfinished"


class UnfinishedFolder:
    """Shards of `out` that are there, each whole. Use as a context manager: one process at a time works on it.

    A shard counts once the journal says so, which is written last: what an interruption leaves besides is written
    again, with the same bytes.
    """

    def __init__(self, out: Path, settings: dict[str, Any], shards: int) -> None:
        """settings: what `out` is made of and how. Raises ValueError if `out` exists, or if it was begun otherwise
        or lacks a shard."""
        if out.exists():
            raise ValueError(f"{out} exists; give another folder, or remove it")
        self.out, self.shards = out, shards
        self.folder = unfinished_folder(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self.notes: list[list[str]] = []
        self._lock = (self.folder / _LOCK).open("w")
        try:
            lock(self._lock, f"another process is writing {out}; wait for it, or give another folder")
            self._read_journal()
        except ValueError:
            self._lock.close()
            raise

    @property
    def done(self) -> int:
        """How many shards are there."""
        return len(self.notes)

    def add(self, tensors: dict[str, Tensor], notes: list[str], hidden: dict[str, Tensor] | None = None) -> None:
        """Write the next shard. hidden: what the next layer is given, kept until the shard after this one is there."""
        number = self.done
        self._write(tensors, self._shard(number))
        if hidden is not None:
            self._write(hidden, self._hidden(number + 1))
        self.notes.append(notes)
        self._write_journal()
        self._hidden(number).unlink(missing_ok=True)

    def hidden(self) -> dict[str, Tensor]:
        """What the shard before gave as `hidden`."""
        with self._opened(self._hidden(self.done)) as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118, which is no dict

    def finish(self) -> None:
        """Write the index of all shards, and give the folder its name."""
        homes: dict[str, str] = {}
        size = 0
        for number in range(self.shards):
            file = self._shard(number)
            with self._opened(file) as reader:
                homes |= dict.fromkeys(reader.keys(), file.name)
            with file.open("rb") as stream:  # of the file the header, and 8 bytes that say how long it is, are no data
                size += file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")
        write_json(self.folder / INDEX, {"metadata": {"total_size": size}, "weight_map": homes})
        self._hidden(self.shards).unlink(missing_ok=True)
        (self.folder / _JOURNAL).unlink()
        (self.folder / _LOCK).unlink()
        self.folder.rename(self.out)

    def __enter__(self) -> UnfinishedFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.close()
        if not self.done:
            for name in (_JOURNAL, _LOCK):
                (self.folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # shards are there that no journal has
                self.folder.rmdir()

    def _shard(self, number: int) -> Path:
        return self.folder / f"model-{number + 1:05}-of-{self.shards:05}.safetensors"

    def _hidden(self, number: int) -> Path:
        return self.folder / f"hidden-{number:05}.safetensors"

    @contextlib.contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        """Raises ValueError where a file that the journal tells of is not there, or not whole."""
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                yield reader
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(
                f"{file}, of an interrupted run, cannot be read ({error}): remove {self.folder} and run this again"
            ) from None

    def _write(self, tensors: dict[str, Tensor], file: Path) -> None:
        begun = file.with_suffix(".begun")
        write_shard(tensors, begun)
        os.replace(begun, file)

    def _read_journal(self) -> None:
        """Or begin one."""
        found = read_object(self.folder / _JOURNAL)
        before = found.get("settings", self._settings)
        if different := [key for key, value in self._settings.items() if before.get(key) != value]:
            raise ValueError(
                f"{self.folder} holds what an interrupted run made with other {', '.join(different)}; run it again as "
                "it was, or remove that folder"
            )
        self.notes = found.get("notes", [])
        shards = [self._shard(number) for number in range(self.done)]
        if absent := [shard.name for shard in shards if not shard.is_file()]:  # names hold how many there are
            raise ValueError(
                f"{self.folder}, of an interrupted run, lacks {absent[0]}, maybe because another version of Strata "
                f"wrote it in other shards; remove {self.folder} and run this again"
            )
        self._write_journal()

    def _write_journal(self) -> None:
        begun = self.folder / f"{_JOURNAL}.begun"
        begun.write_text(json.dumps({"settings": self._settings, "notes": self.notes}), encoding="utf-8")
        os.replace(begun, self.folder / _JOURNAL)
