"""A shuffle without an index: a keyed permutation of 0 .. n - 1 that is computed where it is needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6


def permuted(places: NDArray[np.int64], count: int, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where a permutation of 0 .. `count` - 1 sends `places` [n]; `key` [n] or [1] chooses the permutation of each.

    A balanced Feistel network (Luby and Rackoff 1988) over the next even power of two; a value past the end goes
    through it again until it falls inside (cycle walking, Black and Rogaway 2002), fewer than four times on average.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = np.broadcast_to(key, places.shape)
    values = _network(places.astype(np.uint64), half, keys)
    while (outside := values >= count).any():
        values[outside] = _network(values[outside], half, keys[outside])
    return values.astype(np.int64)


def mixed(*parts: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """A 64-bit key [n] or [1] from integers; each part is an integer or an array [n]."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = _scrambled(key ^ _scrambled(np.atleast_1d(np.asarray(part, np.int64)).astype(np.uint64)))
    return key


def _network(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & low
    for number in range(_ROUNDS):
        left, right = right, left ^ (_scrambled(right + keys * np.uint64(2 * number + 1)) & low)
    return (left << np.uint64(half)) | right


def _scrambled(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014), modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
