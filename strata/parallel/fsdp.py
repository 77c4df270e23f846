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
from strata.comm.placement import Placement
from strata.models.layers import Layer
from strata.parallel.data_parallel import GradientAxes, ParameterShard, global_norm
from strata.parallel.quantized_sums import QuantizedReduceScatter, QuantizedSums
from strata.parallel.tensor import TensorSharding


class FsdpGradients:
    """`Gradients` of a model whose layers are gathered when they compute and let go afterwards.

    What is in no layer (embedding, last norm, head) stays gathered from the forward pass of the model to the end of the
    backward pass, so that the loss may read the head.
    """

    shards: Sequence[ParameterShard]
    frozen: Sequence[ParameterShard]

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        sharding: TensorSharding,
        axes: Mapping[str, GradientAxes],
        world_axis: Axis,
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        quantized: QuantizedSums | None = None,
    ) -> None:
        """Divide the parameters of `model`, which become DTensors of their dtype: of those that are trained one,
        float32 or more.

        model: alike on all ranks but for the shards that `sharding` gave them; or on the meta device, then it gets
        memory without values. axes: see `gradient_axes`. world_axis: see `all_ranks`. compute_dtype: of gathered
        weights; None is the parameters' own. reduce_dtype: of gradients while they are sent; None is float32, or the
        parameters' dtype if that is wider. quantized: what sums over the ranks of a replica in 8 bits; the sum over
        replicas stays.
        """
        self._sharding, self._axes, self._world_axis = sharding, axes, world_axis
        self._whole: FSDPModule
        wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)  # of masters, which may be elsewhere
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=reduce_dtype or wide,
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
            if quantized is not None:
                divided.set_custom_reduce_scatter(QuantizedReduceScatter(quantized, shard))  # type: ignore[arg-type]
            self._whole = divided
        if any(parameter.is_meta for parameter in model.parameters()):
            model.to_empty(device=mesh.world.device)
        self._parameters = {name: _as_dtensor(parameter) for name, parameter in model.named_parameters()}
        made = list(self._make_shards())
        self.shards = [shard for shard in made if shard.master.requires_grad]
        self.frozen = [shard for shard in made if not shard.master.requires_grad]
        self._gradients: dict[str, Tensor] = {}
        self._zero = torch.zeros((), dtype=wide, device=mesh.world.device)

    def _make_shards(self) -> Iterator[ParameterShard]:
        for name, parameter in self._parameters.items():
            local, axis = parameter.to_local().detach(), self._axes[name].reduce_scatter
            if local.numel():
                rows = -(-parameter.shape[0] // axis.size)
                start = rows * axis.index * (parameter.numel() // parameter.shape[0])
                master = nn.Parameter(local, parameter.requires_grad)
                yield ParameterShard(name, parameter.shape, start, local, master)

    def set_is_last_backward(self) -> None:
        """Nothing to do: every pass reduces its gradients while it runs."""

    def accumulate(self) -> None:
        """Nothing to do: FSDP2 adds to the shards of the gradient that it keeps."""

    def reduce(self) -> None:
        for shard in self.shards:
            gradient = self._parameters[shard.name].grad
            held = torch.zeros_like(shard.master) if gradient is None else _as_dtensor(gradient).to_local()
            self._gradients[shard.name] = shard.master.grad = held
        self._sharding.all_reduce_partial(self._gradients)

    def norm(self) -> Tensor:
        counted = [gradient for name, gradient in self._gradients.items() if self._axes[name].is_counted]
        return global_norm(counted, self._zero, self._world_axis)

    def sync_weights(self) -> None:
        self.all_gather_weights()  # the masters are the weights

    def all_gather_weights(self) -> None:
        self._whole.reshard()  # a forward pass that no backward pass followed has left the weights before gathered
        for parameter in self._parameters.values():
            parameter.grad = None
        for shard in self.shards:
            shard.master.grad = None
        self._gradients.clear()


def _units(
    model: nn.Module, sharding: TensorSharding, axes: Mapping[str, GradientAxes], dense: Axis
) -> Iterator[tuple[nn.Module, Axis]]:
    """What is gathered at once, inner modules first, with the axis that divides it: experts, layers, the rest.

    Experts that are divided are apart, because fewer ranks hold the same ones.
    """
    if sharding.experts is not None:
        owners = {name.rpartition(".")[0]: axes[name].reduce_scatter for name in axes if _is_expert(sharding, name)}
        yield from ((model.get_submodule(owner), shard) for owner, shard in owners.items())
    yield from ((module, dense) for module in model.modules() if isinstance(module, Layer))
    yield model, dense


def _is_expert(sharding: TensorSharding, name: str) -> bool:
    return sharding.placements[name] is Placement.EXPERT


def _as_dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor
