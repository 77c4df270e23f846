"""Bytes of int8 become the numbers that they are: assembly of the decode kernel, run in Python."""

from __future__ import annotations

import random

import pytest

from tests.kernels.linear.assembly import float16_halves, run

decode_rounded = pytest.importorskip("strata.kernels.attention.decode_rounded")


def text_of(name: str) -> str:
    found = getattr(decode_rounded, name)
    return str(getattr(found, "value", found))


def signed(word: int) -> list[int]:
    return [byte - 256 if byte > 127 else byte for byte in word.to_bytes(4, "little")]


def test_int8_by_halves_and_by_pairs() -> None:
    drawn = random.Random(3)
    for _ in range(70):
        first, second = (drawn.getrandbits(32) for _ in "ab")
        low, high = run(text_of("_INT8_HALVES"), first, 2)
        assert float16_halves(low) + float16_halves(high) == signed(first)
        for place in range(4):
            (pair,) = run(text_of(f"_INT8_{place}"), first, 1, second)
            assert float16_halves(pair) == [signed(first)[place], signed(second)[place]]
