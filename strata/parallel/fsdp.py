"""Fully sharded data parallelism by PyTorch's FSDP2 (Zhao et al. 2023): weights are divided too, and gathered by layer.

With replicas it is hybrid: the weights are divided within a replica, the gradients summed over all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from strata.comm.mesh import Axis, Mesh
from strata.models.layers import DecoderLayer
from strata.parallel.data_parallel import GradientAxes, Part, global_norm
from strata.parallel.families import Placement
from strata.parallel.tensor import TensorSharding


class FsdpGradients:
    """`Gradients` of a model whose layers are gathered when they compute and let go afterwards.

    What is in no layer (embedding, last norm, head) stays gathered from the forward pass of the model to the end of the
    backward pass, so that the loss may read the head.
    """

    parts: Sequence[Part]

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        sharding: TensorSharding,
        axes: Mapping[str, GradientAxes],
        everyone: Axis,
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Divide the parameters of `model`, which become DTensors of their dtype, float32 or more.

        model: alike on all ranks but for the parts that `sharding` gave them; or on the meta device, then it gets
        memory without values. axes: see `gradient_axes`. everyone: see `all_ranks`. compute_dtype: of gathered weights;
        None is the parameters' own. reduce_dtype: of gradients while they are sent; None is float32, or the parameters'
        dtype if that is wider.
        """
        self._sharding, self._axes, self._everyone = sharding, axes, everyone
        dtype = next(model.parameters()).dtype
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=reduce_dtype or torch.promote_types(dtype, torch.float32),
            # Cosines and sines of the rotary embedding stay float32.
            cast_forward_inputs=False,
        )
        for module, shard in _units(model, sharding, axes, mesh.flattened("shard", "cp")):
            replicas = mesh.axis("dp")
            over = mesh.device_mesh(shard) if replicas.size == 1 else mesh.device_mesh(replicas, shard)
            divided = fully_shard(module, mesh=over, mp_policy=policy, reshard_after_forward=module is not model)
            assert isinstance(divided, FSDPModule)
            # The loss is a share of that of the whole step: gradients are summed, not averaged.
            divided.set_gradient_divide_factor(1.0)
            divided.set_force_sum_reduction_for_comms(True)
        if any(parameter.is_meta for parameter in model.parameters()):
            model.to_empty(device=mesh.world.device)
        self._parameters = {name: _as_dtensor(parameter) for name, parameter in model.named_parameters()}
        self.parts = list(self._make_parts())
        self._gradients: dict[str, Tensor] = {}
        self._zero = torch.zeros((), dtype=dtype, device=mesh.world.device)

    def _make_parts(self) -> Iterator[Part]:
        for name, parameter in self._parameters.items():
            local, shard = parameter.to_local().detach(), self._axes[name].divided
            if local.numel():
                rows = -(-parameter.shape[0] // shard.size)
                start = rows * shard.index * (parameter.numel() // parameter.shape[0])
                yield Part(name, parameter.shape, start, local, nn.Parameter(local))

    def announce_last(self) -> None:
        """Nothing to do: every pass reduces its gradients while it runs."""

    def accumulate(self) -> None:
        """Nothing to do: FSDP2 adds to the parts of the gradient that it keeps."""

    def reduce(self) -> None:
        for part in self.parts:
            gradient = self._parameters[part.name].grad
            held = torch.zeros_like(part.master) if gradient is None else _as_dtensor(gradient).to_local()
            self._gradients[part.name] = part.master.grad = held
        self._sharding.complete(self._gradients)

    def norm(self) -> Tensor:
        counted = [gradient for name, gradient in self._gradients.items() if self._axes[name].is_counted]
        return global_norm(counted, self._zero, self._everyone)

    def publish(self) -> None:
        self.gather()  # the masters are the weights

    def gather(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        for part in self.parts:
            part.master.grad = None
        self._gradients.clear()


def _units(
    model: nn.Module, sharding: TensorSharding, axes: Mapping[str, GradientAxes], dense: Axis
) -> Iterator[tuple[nn.Module, Axis]]:
    """What is gathered at once, inner modules first, with the axis that divides it: experts, layers, the rest.

    Experts that are shared out are apart, because fewer ranks hold the same ones.
    """
    if sharding.experts is not None:
        owners = {name.rpartition(".")[0]: axes[name].divided for name in axes if _is_expert(sharding, name)}
        yield from ((model.get_submodule(owner), shard) for owner, shard in owners.items())
    yield from ((module, dense) for module in model.modules() if isinstance(module, DecoderLayer))
    yield model, dense


def _is_expert(sharding: TensorSharding, name: str) -> bool:
    return sharding.placements[name] is Placement.EXPERT


def _as_dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor
