"""Sizes of grids and blocks on the host. Triton's functions of these names take microseconds of every launch."""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """How many blocks of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`, at least 1."""
    return 1 << max(0, count - 1).bit_length()
