"""Matrices of recurrent layers whose rows stand in stacks: gates, channels and time steps of all heads each."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from strata.models.family_config import RecurrenceConfig
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig
from strata.models.recurrence.state_space_config import StateSpaceConfig


class Stack(NamedTuple):
    """`heads` times `rows` rows of a matrix, by heads, or by groups of heads."""

    heads: int
    rows: int


def stacks(recurrence: RecurrenceConfig, name: str) -> tuple[Stack, ...]:
    """How the rows of the parameter `name` stand, whose placement is STACKED."""
    if isinstance(recurrence, GatedDeltaConfig):
        keys = Stack(recurrence.key_heads, recurrence.key_dim)
        return keys, keys, Stack(recurrence.heads, recurrence.value_dim)
    assert isinstance(recurrence, StateSpaceConfig)
    inner, shared = Stack(recurrence.heads, recurrence.head_dim), Stack(recurrence.groups, recurrence.state_size)
    channels = inner, shared, shared
    return channels if ".conv1d." in name else (inner, *channels, Stack(recurrence.heads, 1))


def local_ranges(stacked: tuple[Stack, ...], size: int, index: int) -> list[tuple[int, int]]:
    """First and end of the rows that rank `index` of `size` has of each stack; that of all heads it has whole."""
    found, begin = [], 0
    for heads, rows in stacked:
        first, end = (0, 1) if heads == 1 else (heads * index // size, heads * (index + 1) // size)
        found.append((begin + first * rows, begin + end * rows))
        begin += heads * rows
    return found


def divided(recurrence: RecurrenceConfig, size: int) -> RecurrenceConfig:
    """Of one of `size` ranks, which `fault` has nothing against."""
    heads = recurrence.heads // size
    if isinstance(recurrence, GatedDeltaConfig):
        return replace(recurrence, heads=heads, key_heads=recurrence.key_heads // size)
    return replace(recurrence, heads=heads, groups=max(1, recurrence.groups // size))


def shares_groups(recurrence: RecurrenceConfig | None, size: int) -> bool:
    """Whether ranks have a part each of what one norm behind a state space is over, and not whole groups."""
    return not isinstance(recurrence, StateSpaceConfig) or recurrence.groups < size


def fault(recurrence: RecurrenceConfig, size: int) -> str:
    """Why so many ranks cannot divide the heads; empty if they can."""
    if recurrence.heads % size:
        return f"does not divide the {recurrence.heads} recurrent heads"
    if isinstance(recurrence, GatedDeltaConfig) and recurrence.key_heads % size:
        return f"does not divide the {recurrence.key_heads} key heads of recurrent layers"
    if isinstance(recurrence, StateSpaceConfig) and recurrence.groups > 1 and recurrence.groups % size:
        return f"does not divide the {recurrence.groups} groups of state spaces, and these are more than one"
    return ""
