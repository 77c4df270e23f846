"""What the recurrences over a state of fixed size are called with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from strata.kernels.recurrent.sequences import RecurrentBatch


class StateSpaceSpec(NamedTuple):
    """What is the same in every call of one layer. layer: whose states are kept. least, most: bounds of a time step."""

    layer: int
    least: float
    most: float


class StateSpaceCall(NamedTuple):
    """The operands of `state_space`. x: [tokens, heads, head_dim]; dt: [tokens, heads]; b, c: [tokens, groups,
    state_size], group h // (heads // groups) serving head h; dt_bias, a_log, skip: [heads]."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    dt_bias: Tensor
    a_log: Tensor
    skip: Tensor
    batch: RecurrentBatch
    spec: StateSpaceSpec


class GatedDeltaCall(NamedTuple):
    """The operands of `gated_delta`. q, k: [tokens, key_heads, key_dim], key head h // (heads // key_heads) serves head
    h; v: [tokens, heads, value_dim]; a, b: [tokens, heads]; dt_bias, a_log: [heads]. layer: whose states are kept."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    dt_bias: Tensor
    a_log: Tensor
    batch: RecurrentBatch
    layer: int
