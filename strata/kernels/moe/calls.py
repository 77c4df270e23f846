"""What the operations that multiply by the experts of a mixture are called with."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from strata.kernels.activation.silu_mul import Clamp
from strata.kernels.quant.quantized import QuantizedWeight

Weight = TypeVar("Weight", Tensor, QuantizedWeight)


class ExpertsCall(NamedTuple, Generic[Weight]):
    """The operands of `experts`.

    x: [tokens, hidden]. chosen: [tokens, per_token] int64 or int32. weights: like chosen, of x's dtype or wider; None
    if each token has one expert, of weight 1. gate_up: [experts, 2 * width, hidden], the rows of gate before those of
    up; down: [experts, hidden, width]; both of x's dtype, or packed. filled: how many of `chosen` are experts if the
    others are -1, which are left out; None: all.
    """

    x: Tensor
    weights: Tensor | None
    chosen: Tensor
    gate_up: Weight
    down: Weight
    filled: int | None = None


class BiasedExpertsCall(NamedTuple, Generic[Weight]):
    """The operands of `biased_experts`.

    x, weights, chosen, gate_up, down: as for `experts`. gate_up_bias: [experts, 2 * width], down_bias: [experts,
    hidden], of x's dtype, are added to the products. adds_down_bias: false on the ranks that share experts' widths and
    leave that to another.
    """

    x: Tensor
    weights: Tensor
    chosen: Tensor
    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor
    down_bias: Tensor
    clamp: Clamp
    adds_down_bias: bool = True


class LocalExpertsCall(NamedTuple, Generic[Weight]):
    """The operands of `local_experts`.

    x, weights and chosen as for `experts`: all tokens and all their choices, which every rank has. gate_up, down: of
    the experts in the slots [first, first + held) of the `slots` that all ranks have together.
    placement: [experts, period] int32, the slot that computes expert e for token t at [e, t % period], so that each
    choice goes to exactly one copy of an expert that several slots hold; None: expert e is in slot e alone.
    slot_mapping: [tokens] int32 as in `PagedKV`; rows with -1 are padding and go to no expert; None: no row is.
    """

    x: Tensor
    weights: Tensor
    chosen: Tensor
    gate_up: Weight
    down: Weight
    first: int
    slots: int
    placement: Tensor | None = None
    slot_mapping: Tensor | None = None


# Any of them: the first five operands are those of all.
AnyExpertsCall = ExpertsCall[Weight] | BiasedExpertsCall[Weight] | LocalExpertsCall[Weight]


def biases_of(call: AnyExpertsCall[Any]) -> tuple[Tensor | None, Tensor | None]:
    """Of gate and up, and of down if it is added; None: there is none."""
    if not isinstance(call, BiasedExpertsCall):
        return None, None
    return call.gate_up_bias, call.down_bias if call.adds_down_bias else None


def clamp_of(call: AnyExpertsCall[Any]) -> Clamp | None:
    return call.clamp if isinstance(call, BiasedExpertsCall) else None
