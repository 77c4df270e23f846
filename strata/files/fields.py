"""Strict reading of a JSON object: every field has a type, and a field that nobody read is an error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

_REQUIRED: Any = object()
Value = TypeVar("Value")


class Fields:
    """The fields of one JSON object, taken one by one. `where` names the object in error messages."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._unread = dict(values)
        self.where = where

    def has(self, key: str) -> bool:
        """Whether `key` is there, not yet taken and not null."""
        return self._unread.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether `key` is there, not yet taken and null."""
        return key in self._unread and self._unread[key] is None

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The raw value of `key`; `default` when the field is absent."""
        if key in self._unread:
            return self._unread.pop(key)
        if default is _REQUIRED:
            raise ValueError(f"{self.where}: the field {key!r} is missing")
        return default

    def count(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """An integer that is at least `least`; a null counts as absent."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, value, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, *, positive: bool = True) -> float:
        """A finite number, greater than 0 or (`positive` false) at least 0; a null counts as absent."""
        value = self._present(key, default)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not 0 <= value <= sys.float_info.max or (positive and value == 0):
            raise self.wrong(key, value, f"a finite number {'greater than' if positive else 'of at least'} 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false; a null counts as absent where that is false, and is an error where that is true: to programs
        that ask whether a value is true it says false."""
        value = self.take(key, default) if default else self._present(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """A token id, a list of them, or null. Some checkpoints write -1 for "none"."""
        value = self.take(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
            raise self.wrong(key, value, "a token id, a list of token ids, or null")
        return tuple(one for one in ids if one >= 0)

    def optional(self, read: Callable[..., Value], key: str, **bounds: Any) -> Value | None:
        """What `read`, a method of this, makes of a field; None if it is absent or null."""
        return read(key, **bounds) if self.has(key) else self.take(key, None)

    def choice(self, key: str, accepted: Collection[Any], default: Any = _REQUIRED) -> Any:
        """One of the accepted values."""
        value = self.take(key, default)
        if not any(type(value) is type(one) and value == one for one in accepted):
            raise self.wrong(key, value, "one of " + ", ".join(map(repr, accepted)))
        return value

    def only(self, key: str, accepted: Any, reason: str) -> None:
        """Refuse any value of `key` but the accepted one and null: another would change the mathematics."""
        value = self.take(key, None)
        if value is not None and value != accepted:
            raise self.wrong(key, value, f"{accepted!r}, because {reason}")

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raise for fields that were neither taken nor are known to be without effect."""
        unknown = [f"{key} = {_short(value)}" for key, value in self._unread.items() if key not in ignored]
        if unknown:
            raise ValueError(f"{self.where}: unknown field {', '.join(unknown)}; it may change the mathematics")

    def wrong(self, key: str, value: Any, accepted: str) -> ValueError:
        return ValueError(f"{self.where}: {key} = {_short(value)} is not supported; accepted is {accepted}")

    def _present(self, key: str, default: Any) -> Any:
        value = self.take(key, default)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.where}: the field {key!r} is null")
            return default
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
