"""Expert parallelism (Lepikhin et al. 2021): ranks hold different experts, and tokens travel to them and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata.comm.collectives import all_to_all
from strata.comm.experts.sent_rows import journey
from strata.comm.mesh import Axis
from strata.kernels.moe.combine import summed, take_rows
from strata.kernels.moe.experts import experts
from strata.models.experts import Experts


class DispatchedExperts(nn.Module):
    """`Experts` of which this rank holds an equal part, those of lower numbers on the ranks before it.

    Ranks may have different numbers of tokens, and an expert none. How many rows travel has to be known to the host,
    so each forward pass waits once for the device; the backward pass does not.
    """

    def __init__(self, whole: Experts, axis: Axis) -> None:
        super().__init__()
        self.axis, self.count = axis, whole.down_proj.shape[0]
        for name, parameter in whole.named_parameters():
            part = parameter.detach().chunk(axis.size)[axis.index].clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(part, parameter.requires_grad))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [tokens, hidden], weights and chosen [tokens, per_token] -> the weighted sums [tokens, hidden].

        A token's row travels once to each rank that has experts of it, with the numbers and weights of them all; what
        comes back is one row, the weighted sum over the experts there.
        """
        own = self.count // self.axis.size
        known = journey(chosen // own, self.axis)

        def on_its_ranks(given: Tensor) -> Tensor:
            return all_to_all(take_rows(given, known.order), self.axis, known.sent, known.received)

        # The rows first: the longest message gives the host time to ask for what follows.
        rows, scales = on_its_ranks(x), on_its_ranks(weights)
        numbers = on_its_ranks(chosen.int()) - self.axis.index * own
        numbers.masked_fill_((numbers < 0) | (numbers >= own), -1)
        made = experts(rows, scales, numbers, self.gate_up_proj, self.down_proj, known.products)
        # From here on nothing is saved for the backward pass, so that a layer that is computed again ends above.
        return summed(all_to_all(made, self.axis, known.received, known.sent), known.order.source, known.order.inverse)


def shard_experts(model: nn.Module, axis: Axis) -> None:
    """Make `model`, in place, hold this rank's part of the experts of every layer, under the same parameter names.

    axis: "ep" of the mesh. Ranks call the model with different tokens. An expert's gradient is complete over the axis;
    those of all other parameters are each rank's own part. The axis divides the experts (`Layout.check`).
    """
    if axis.group is None:
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, DispatchedExperts(module, axis))
