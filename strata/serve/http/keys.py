"""API keys: read from a file and the environment, kept as hashes, looked up in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import MutableMapping, Sequence
from itertools import count
from pathlib import Path

import msgspec

from strata.files.json_object import why_no_text
from strata.serve.http.limits import Caller

ANONYMOUS = Caller(name="anonymous", salt="")
ENVIRONMENT = ("STRATA_API_KEY", "STRATA_API_KEYS")

# Visible ASCII, as it must fit into a header; a comma separates keys in the environment.
_KEY = re.compile(r"[!-+\--~]+")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class KeyHash(msgspec.Struct, frozen=True):
    """What is kept of a key. digest: SHA-256, hexadecimal. salt: also made from the key, and as little like it."""

    name: str
    digest: str
    salt: str

    @classmethod
    def of(cls, name: str, key: str) -> KeyHash:
        salt = hmac.digest(key.encode(), b"strata: salt of the prefix cache", "sha256")
        return cls(name, _digest(key), salt.hex()[:32])


class KeyRing:
    """The keys that open the server; without any it is open to all who reach it."""

    def __init__(self, keys: Sequence[KeyHash]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[KeyHash]) -> None:
        """From now on these open the server, and no others."""
        self._keys = [(key.digest, Caller(key.name, key.salt)) for key in keys]

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: str) -> Caller | None:
        """Whose key this is. Takes as long for a wrong key as for a right one, wherever it stands."""
        digest = _digest(presented)
        found = None
        for known, caller in self._keys:
            if hmac.compare_digest(digest, known):
                found = caller
        return found


class KeySource:
    """The keys of a file, which may be read again, and of STRATA_API_KEY and STRATA_API_KEYS, which are removed from
    `environment` at once and kept as hashes.

    The file has a key in each line, as `key` or `name:key`; empty lines and lines with # are left out. STRATA_API_KEYS
    separates them with commas. A key without a name is called key-1, key-2 and so on, by its place among all; it keeps
    that name whatever comes or goes before it, and no other key gets it.
    """

    def __init__(self, file: Path | None, environment: MutableMapping[str, str]) -> None:
        self.file = file
        entries = []
        for variable in ENVIRONMENT:
            for number, text in enumerate(environment.pop(variable, "").split(","), 1):
                if text.strip():
                    entries.append((f"{variable}, key {number}", text.strip()))
        self._of_environment = [_parse(where, text) for where, text in entries]
        self._numbered: dict[str, str] = {}  # names that were given here, by digest

    def read(self) -> list[KeyHash]:
        """All of them now. Raises ValueError for a file that others may read, and for what is no key; its message never
        holds a key."""
        of_file = [] if self.file is None else [_parse(where, text) for where, text in _read_file(self.file)]
        found = [*of_file, *self._of_environment]
        numbered = dict(self._numbered)
        keys = []
        for number, (_, key) in enumerate(found, 1):
            if not key.name:
                name = numbered.get(key.digest) or next(
                    free for at in count(number) if (free := f"key-{at}") not in numbered.values()
                )
                numbered[key.digest] = name
                key = msgspec.structs.replace(key, name=name)
            keys.append(key)
        for what in ("name", "digest"):
            values = [getattr(key, what) for key in keys]
            for at, value in enumerate(values):
                if value in values[:at]:
                    kind = "name" if what == "name" else "key"
                    raise ValueError(f"{found[at][0]}: this {kind} is given twice; each key needs a name of its own")
        self._numbered = numbered
        return keys


def _read_file(file: Path) -> list[tuple[str, str]]:
    """(where it stands, text) of each key."""
    try:
        with file.open("rb") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & 0o077:
                raise ValueError(f"{file} may be read or written by others (mode {mode:04o}): run chmod 600 {file}")
            text = stream.read()
    except OSError as error:
        raise ValueError(f"the API key file {file} cannot be read: {error.strerror}") from None
    try:
        lines = [line.strip() for line in text.decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError:
        raise ValueError(f"{file}, {why_no_text(text)}") from None
    entries = [(f"{file}, line {number}", line) for number, line in enumerate(lines, 1)]
    entries = [(where, line) for where, line in entries if line and not line.startswith("#")]
    if not entries:
        raise ValueError(f"{file} holds no API key: write one in each line, as key or name:key")
    return entries


def _parse(where: str, text: str) -> tuple[str, KeyHash]:
    """Where a key stands, and the key, with an empty name if it has none of its own."""
    name, colon, key = text.partition(":")
    if not colon:
        name, key = "", text
    elif not _NAME.fullmatch(name):
        raise ValueError(f"{where}: the name before the colon must be 1 to 64 of letters, digits, dot, _ and -")
    if not _KEY.fullmatch(key):
        raise ValueError(f"{where}: a key must be visible ASCII characters without spaces or commas")
    return where, KeyHash.of(name, key)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
