"""Expert parallelism (Lepikhin et al. 2021): ranks hold different experts, and tokens travel to them and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata.comm.collectives import all_to_all, start_all_to_all
from strata.comm.mesh import Axis
from strata.kernels.moe_experts import Order, experts, give_back, take_rows
from strata.models.experts import Experts


class DispatchedExperts(nn.Module):
    """`Experts` of which this rank holds an equal part, those of lower numbers on the ranks before it.

    Ranks may have different numbers of tokens, and an expert none. How many rows travel has to be known to the host,
    so each forward pass waits once for the device; the backward pass does not.
    """

    def __init__(self, whole: Experts, axis: Axis) -> None:
        super().__init__()
        self.axis, self.count = axis, whole.down_proj.shape[0]
        if self.count % axis.size:
            raise ValueError(f"ep = {axis.size} does not divide the {self.count} experts; choose ep among its divisors")
        for name, parameter in whole.named_parameters():
            part = parameter.detach().chunk(axis.size)[axis.index].clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(part, parameter.requires_grad))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = Order.of(chosen, self.count)
        counts = order.ends.diff(prepend=order.ends.new_zeros(1)).view(self.axis.size, -1)
        # [ranks, own experts]: rows that come from each rank for each of them.
        arriving = start_all_to_all(counts, self.axis).wait()
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = all_to_all(take_rows(x, order), self.axis, sent, received)
        own = torch.arange(counts.shape[1], device=x.device).repeat(self.axis.size)
        numbers = own.repeat_interleave(arriving.flatten(), output_size=sum(received))
        # The weights stay at home and are applied to what comes back.
        made = experts(rows, None, numbers[:, None], self.gate_up_proj, self.down_proj)
        return give_back(all_to_all(made, self.axis, received, sent), order, weights)


def shard_experts(model: nn.Module, axis: Axis) -> None:
    """Make `model`, in place, hold this rank's part of the experts of every layer, under the same parameter names.

    axis: "ep" of the mesh. Ranks call the model with different tokens. An expert's gradient is complete over the axis;
    those of all other parameters are each rank's own part. Raises ValueError if the axis does not divide the experts.
    """
    if axis.group is None:
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, DispatchedExperts(module, axis))
