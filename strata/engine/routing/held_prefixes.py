"""The prefixes that a replica holds, as far as that follows from the prompts it was sent."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

# Tokens that are told apart by one key: several pages, so that a prompt of 128k tokens has few enough of them.
BLOCK_TOKENS = 64
_KEY_BYTES = 16


def prefix_keys(prompt: Sequence[int], salt: str = "") -> list[bytes]:
    """A key for every full block of a prompt, of all tokens up to the block's end and of the salt.

    At least one token is left over, as in the engine's prefix cache: something must be computed to sample from.
    Raises OverflowError for a number outside [-2^63, 2^63).
    """
    try:
        numbers = array("I", prompt)
    except OverflowError:  # some stand for other content than text
        numbers = array("q", prompt)
    ids, width = memoryview(numbers).cast("B"), BLOCK_TOKENS * numbers.itemsize
    # Of the salt a digest of fixed length, so that no salt and tokens read like another salt and other tokens.
    hashed = blake2b(blake2b(salt.encode()).digest(), digest_size=_KEY_BYTES)
    keys = []
    for block in range((len(prompt) - 1) // BLOCK_TOKENS):
        hashed.update(ids[block * width : (block + 1) * width])
        keys.append(hashed.digest())
    return keys


class HeldPrefixes:
    """An approximation from what was routed alone: at most as many blocks as the replica has room for, of which those
    not asked for longest are forgotten first, the end of a prompt before its beginning.

    The engine evicts in the same order, but its pages hold what was generated too; so it may hold less than this says.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Blocks."""
        return len(self._keys)

    def matched(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks are held, counted from its beginning."""
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def note(self, keys: Sequence[bytes]) -> list[bytes]:
        """The replica is sent a prompt of these blocks; returns those that are forgotten for them."""
        for key in reversed(keys[: self._most]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        return [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self._most)]

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._keys.clear()
