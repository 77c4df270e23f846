"""What a layer keeps of each sequence from step to step, as data that a family declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strata.models.config import ModelConfig


@dataclass(frozen=True)
class PagedRows:
    """A row for each token of the sequence, in pages.

    shape: of a row. tensors: 2 for keys and values, 1 where both are read from one row. dtype: None for the weights'.
    """

    shape: tuple[int, ...]
    tensors: int = 2
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class WindowRows:
    """`rows` of the latest `window` tokens, the one that is computed included: no later token reads those before."""

    rows: PagedRows
    window: int


@dataclass(frozen=True)
class RecurrentState:
    """Tensors whose size does not depend on the sequence's length.

    shapes: of each, for one sequence. dtypes: None for the weights'. Those of all sequences stand in
    `RecurrentStates.tensors[layer]`, which `Batch.states` brings.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype | None, ...]


LayerState = PagedRows | WindowRows | RecurrentState


@dataclass(frozen=True)
class StateGroup:
    """The layers, by their numbers, that keep state of one kind."""

    state: LayerState
    layers: tuple[int, ...]


def attention_rows(config: ModelConfig) -> PagedRows:
    """What a layer that attends keeps of a token: a key and a value of each KV head, or one row for all heads."""
    if config.latent is not None:
        return PagedRows((1, config.latent.width), tensors=1)
    return PagedRows((config.num_kv_heads, config.head_dim))


def attention_states(config: ModelConfig) -> tuple[LayerState, ...]:
    """Of each layer of a model whose layers all attend: rows of all tokens or of `config.windows`."""
    rows = attention_rows(config)
    return tuple(rows if window is None else WindowRows(rows, window) for window in config.windows)


def state_groups(states: Sequence[LayerState]) -> tuple[StateGroup, ...]:
    """The layers by what they keep: rows of all tokens come first, then windows, then fixed states."""
    order = (PagedRows, WindowRows, RecurrentState)
    kinds = sorted(dict.fromkeys(states), key=lambda state: order.index(type(state)))
    return tuple(
        StateGroup(kind, tuple(layer for layer, state in enumerate(states) if state == kind)) for kind in kinds
    )


def group_numbers(states: Sequence[LayerState]) -> tuple[int, ...]:
    """Of each layer, the place of its group in `state_groups`: what `of_group` is asked for. 0 for fixed states, which
    are in the batch itself."""
    places = {group.state: place for place, group in enumerate(state_groups(states))}
    return tuple(0 if isinstance(state, RecurrentState) else places[state] for state in states)
