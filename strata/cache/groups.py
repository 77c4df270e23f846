"""The pools of a model: one for each group of layers that keep rows of one kind, with pages of its own; and who holds
what of them and of fixed states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from strata.cache.pages import PageAllocator
from strata.cache.pool import KVPool, PoolShape
from strata.cache.prefix import PrefixTree
from strata.cache.snapshots import Snapshots
from strata.cache.window_pages import WindowPages, page_limit
from strata.models.state import LayerState, PagedRows, WindowRows, state_groups

# Of what all sequences hold of a window at once, as much again is for the windows of prefixes.
_WINDOWS_KEPT = 2


@dataclass(frozen=True)
class PageGroup:
    """Layers that share block tables. layers: their numbers. window: None where rows of all tokens are kept. shape: of
    their pool."""

    layers: tuple[int, ...]
    window: int | None
    shape: PoolShape

    def max_useful(self, max_sequences: int, max_tokens: int, max_length: int) -> int | None:
        """Pages beyond which more are of no use, where so many sequences run and steps have so many tokens; None: there
        is no such number."""
        if self.window is None:
            return None
        size = self.shape.page_tokens
        one = min(page_limit(self.window, size), -(-max_length // size))
        return _WINDOWS_KEPT * max_sequences * one + -(-max_tokens // size)


def page_groups(states: Sequence[LayerState], pool: PoolShape, max_length: int) -> tuple[PageGroup, ...]:
    """The groups of layers that keep rows, those of all tokens first. pool: of all layers, were they alike. A single
    group without a window if no sequence, of at most `max_length` tokens, outgrows one; it has no layers if none keeps
    rows."""
    groups = []
    for group in state_groups(states):
        if isinstance(group.state, PagedRows | WindowRows):
            window = group.state.window if isinstance(group.state, WindowRows) else None
            has_bounds = pool.has_bounds and window is None
            shape = replace(pool, layers=len(group.layers), has_bounds=has_bounds)
            groups.append(PageGroup(group.layers, window, shape))
    if all(group.window is None or group.window >= max_length for group in groups):
        layers = tuple(sorted(layer for group in groups for layer in group.layers))
        return (PageGroup(layers, None, replace(pool, layers=len(layers))),)
    return tuple(groups)


def divide_pages(groups: Sequence[PageGroup], room: int, most: Sequence[int | None]) -> tuple[int, ...]:
    """Pages of each group in `room` bytes: as many for all, but no more than `most` for one; the others share the rest.
    Nobody has use for more pages of a window than of all tokens."""
    found = [0] * len(groups)
    limits = [room if limit is None else limit for limit in most]
    if all(limit is not None for limit in most):
        limits[0] = room  # the first takes what is left: it holds more prefixes then
    left = sorted(range(len(groups)), key=lambda place: limits[place])
    for order, place in enumerate(left):
        each = room // sum(groups[other].shape.page_bytes for other in left[order:])
        found[place] = min(limits[place], each)
        room -= found[place] * groups[place].shape.page_bytes
    return tuple(found)


@dataclass(frozen=True)
class Books:
    """Who holds which pages, on the host: `pages` of all tokens, and `windows` beside them; and `snapshots`, where
    layers keep fixed states.

    only_windows: no layer keeps all tokens. Then `pages` are numbers, enough for all sequences, that stand for no
    memory.
    """

    pages: PageAllocator
    windows: tuple[WindowPages, ...]
    only_windows: bool
    snapshots: Snapshots | None = None

    @property
    def filled(self) -> PageAllocator:
        """Those whose use tells how full the memory is."""
        return self.windows[0].books if self.only_windows else self.pages

    def tree(self) -> PrefixTree:
        """A prefix tree that keeps pages of all kinds, and snapshots."""
        return PrefixTree(self.pages, self.windows if self.snapshots is None else (*self.windows, self.snapshots))


def books(
    groups: Sequence[PageGroup],
    pages: Sequence[int],
    max_sequences: int,
    max_length: int,
    snapshots: int | None = None,
) -> Books:
    """pages: of each group. snapshots: rows for those of fixed states, behind the slots and the row of padding; None:
    no layer keeps one."""
    size = groups[0].shape.page_tokens
    kept = zip(groups, pages, strict=True)
    windows = tuple(WindowPages(count, size, group.window) for group, count in kept if group.window is not None)
    alone = groups[0].window is not None
    numbers = max_sequences * -(-max_length // size) + pages[0] if alone else pages[0]
    rows = None if snapshots is None else Snapshots(max_sequences + 1, snapshots, size)
    return Books(PageAllocator(numbers, size), windows, alone, rows)


def pools(groups: Sequence[PageGroup], pages: Sequence[int], layers: int, device: torch.device) -> tuple[KVPool, ...]:
    """The tensors of each group of a model with so many layers, zeroed. pages: of each group."""
    made = []
    for group, count in zip(groups, pages, strict=True):
        made.append(KVPool(group.shape, count, device, None if len(group.layers) == layers else (group.layers, layers)))
    return tuple(made)
