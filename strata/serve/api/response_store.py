"""Responses that later requests may go on from, in memory: bounded for each caller, the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class StoredResponse:
    """body: the response as it was sent. messages: the conversation up to it and with it, as chat templates take it."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponseStore:
    """Keeps the responses of each caller apart: no other caller finds them, or can push them out.

    most, max_bytes: what one caller's responses may be; the least recently used make room for new ones.
    """

    def __init__(self, most: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._by_caller: dict[str, OrderedDict[str, bytes]] = {}  # the least recently used first

    def put(self, caller: str, id: str, response: StoredResponse) -> bool:
        """Keep a response; False if it is larger than all that is kept for a caller."""
        encoded = msgspec.json.encode((response.body, response.messages))
        if len(encoded) > self._max_bytes:
            return False
        own = self._by_caller.setdefault(caller, OrderedDict())
        own.pop(id, None)
        own[id] = encoded
        size = sum(map(len, own.values()))
        while len(own) > self._most or size > self._max_bytes:
            _, oldest = own.popitem(last=False)
            size -= len(oldest)
        return True

    def get(self, caller: str, id: str) -> StoredResponse | None:
        """A response of this caller, which is used by this; None if it has none of that id."""
        own = self._by_caller.get(caller, OrderedDict())
        if id not in own:
            return None
        own.move_to_end(id)
        return StoredResponse(*msgspec.json.decode(own[id]))

    def delete(self, caller: str, id: str) -> bool:
        """Whether there was such a response of this caller."""
        return caller in self._by_caller and self._by_caller[caller].pop(id, None) is not None
