"""The tensors that hold fixed states: for each group of layers, of every sequence that runs, and of snapshots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata.kernels.state.recurrent import RecurrentStates
from strata.models.state import LayerState, RecurrentState, StateGroup, state_groups


@dataclass(frozen=True)
class StateShape:
    """What decides the size of the pool. groups: of layers, of as many as the model has. dtype: of the weights."""

    groups: tuple[StateGroup, ...]
    layers: int
    dtype: torch.dtype

    @staticmethod
    def of(states: Sequence[LayerState], dtype: torch.dtype) -> StateShape | None:
        """None if no layer keeps a fixed state."""
        groups = tuple(group for group in state_groups(states) if isinstance(group.state, RecurrentState))
        return StateShape(groups, len(states), dtype) if groups else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one sequence's states, of all layers."""
        return sum(len(layers) * math.prod(shape) * dtype.itemsize for layers, shape, dtype in self.tensors())

    def tensors(self) -> Iterable[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
        """Layers, shape and dtype of each tensor of a row."""
        for group in self.groups:
            assert isinstance(group.state, RecurrentState)
            for shape, dtype in zip(group.state.shapes, group.state.dtypes, strict=True):
                yield group.layers, shape, self.dtype if dtype is None else dtype


def meta_states(shape: StateShape | None, sequences: int) -> RecurrentStates | None:
    """Of so many sequences, on the meta device."""
    if shape is None:
        return None
    device = torch.device("meta")
    return RecurrentStates(
        StatePool(shape, 1, device).tensors, torch.empty(sequences, dtype=torch.int32, device=device)
    )


class StatePool:
    """Fixed states, zeroed. tensors: for each layer those that it declares, [rows, *shape], see `RecurrentStates`.

    Row `slot` is that of the sequence in a slot. One behind the slots is that of padding; the rest are snapshots.
    """

    def __init__(self, shape: StateShape, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._all: list[Tensor] = []  # [layers, rows, *shape] each
        tensors: list[tuple[Tensor, ...]] = [()] * shape.layers
        for layers, size, dtype in shape.tensors():
            self._all.append(torch.zeros((len(layers), rows, *size), dtype=dtype, device=device))
            for place, layer in enumerate(layers):
                tensors[layer] = (*tensors[layer], self._all[-1][place])
        self.tensors = tuple(tensors)

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy rows (from, to) of all layers, one after the other."""
        for source, target in copies:
            for states in self._all:
                states[:, target].copy_(states[:, source])
