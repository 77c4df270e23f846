"""Triton's cache on the disk, believed only as far as checksums go.

Triton itself names an entry by the kernel's source, its own version, the compiler of the target and the architecture:
other versions are other entries. But it reads what it finds: half a file ends a start with an error, and a flipped bit
runs as a wrong kernel. Here each file has its SHA-256 beside it. What does not match is not there, and is made anew;
what a folder does not take goes into one that does. The layout is Triton's own, so that other programs can share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import CacheManager, FileCacheManager

_SUM = ".sha256"
# What Triton puts before the name of a listing.
_GROUP = "__grp__"


class CheckedCache(CacheManager):  # type: ignore[misc]  # triton is untyped
    """The files of one entry. key: the folder's name. Nothing raises because of what the disk holds or refuses."""

    def __init__(self, key: str) -> None:
        self._key = key

    def exists(self) -> bool:
        """Whether there is a group of files of which none is missing; whether they are whole is left to reading."""
        return any(self._has_group(folder / self._key) for folder in _folders())

    def get_file(self, filename: str) -> str | None:
        """The path of a file that is whole, else None. What the cache's folder did not take once goes there now if it
        can, since that is what is kept and shared."""
        found = self._whole(filename)
        if found is None:
            return None
        path, content = found
        kept = _folders()[0] / self._key
        if path.parent != kept:
            with suppress(OSError):
                return _write(kept, filename, content)
        return str(path)

    def read(self, filename: str) -> bytes | None:
        """What is in a file that is whole, else None."""
        found = self._whole(filename)
        return None if found is None else found[1]

    def put(self, data: bytes | object, filename: str, binary: bool = True) -> str:
        """Write a file in one move, and say where. Raises OSError only if the spare folder takes none either."""
        content = data if isinstance(data, bytes) else str(data).encode()
        folder, *spare = _folders()
        try:
            return _write(folder / self._key, filename, content)
        except OSError:  # not writable, or full
            if not spare:
                raise
            return _write(spare[0] / self._key, filename, content)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of all files of a group by their names; None unless every one is whole."""
        listing = self.read(f"{_GROUP}{filename}")
        if listing is None:
            return None
        found = {name: self.get_file(name) for name in json.loads(listing)["child_paths"]}
        if not all(found.values()):
            return None
        self.get_file(f"{_GROUP}{filename}")  # after its files: other programs believe it
        return {name: path for name, path in found.items() if path}

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return self.put(json.dumps({"child_paths": group}), f"{_GROUP}{filename}")

    def _whole(self, filename: str) -> tuple[Path, bytes] | None:
        paths = (folder / self._key / filename for folder in _folders())
        read = ((path, _read_whole(path)) for path in paths)
        return next(((path, content) for path, content in read if content is not None), None)

    def _has_group(self, folder: Path) -> bool:
        try:
            names = set(os.listdir(folder))
        except OSError:  # also where nobody may look
            return False
        listings = (self.read(name) for name in names if name.startswith(_GROUP) and not name.endswith(_SUM))
        return any(listing is not None and names.issuperset(json.loads(listing)["child_paths"]) for listing in listings)


def checked_cache(key: str, override: bool = False, dump: bool = False) -> Any:
    """What Triton keeps an entry in. override, dump: for its own debugging, which is left as it is."""
    return FileCacheManager(key, override, dump) if override or dump else CheckedCache(key)


def use_checked_cache() -> None:
    """Have all kernels of this process kept so, unless TRITON_CACHE_MANAGER names another way."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = checked_cache


def require_writable() -> None:
    """Raises ValueError, with the system's reason, if the cache's own folder takes no files."""
    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"0")
    except OSError as error:
        raise ValueError(
            f"kernels cannot be kept in {folder}: {error.strerror}; set TRITON_CACHE_DIR to a folder that takes files"
        ) from None


def _folders() -> list[Path]:
    """The cache's, TRITON_CACHE_DIR or ~/.triton/cache, and the spare one if there can be any."""
    spare = _spare_folder()
    return [Path(knobs.cache.dir), *([] if spare is None else [spare])]


@cache
def _spare_folder() -> Path | None:
    """For what the cache's folder does not take: one that is this user's alone, which all their processes share. None
    where there is no folder for temporary files."""
    with suppress(OSError):
        shared = Path(tempfile.gettempdir(), f"strata-kernels-{os.getuid()}")
        shared.mkdir(mode=0o700, exist_ok=True)
        found = shared.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return shared
    with suppress(OSError):
        return Path(tempfile.mkdtemp(prefix="strata-kernels-"))
    return None


def _read_whole(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
        return content if hashlib.sha256(content).hexdigest() == Path(f"{path}{_SUM}").read_text() else None
    except (OSError, ValueError):
        return None


def _write(folder: Path, name: str, content: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    for target, written in ((path, content), (Path(f"{path}{_SUM}"), hashlib.sha256(content).hexdigest().encode())):
        descriptor, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(written)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except OSError:
            with suppress(OSError):
                os.remove(temporary)
            raise
    return str(path)
