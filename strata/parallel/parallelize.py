"""From a whole model and a layout to this rank's shard of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from strata.comm.mesh import Mesh
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.parallel.buckets import BUCKET_ELEMENTS
from strata.parallel.context import parallelize_attention
from strata.parallel.data_parallel import Gradients, all_ranks, gradient_axes
from strata.parallel.expert import shard_experts
from strata.parallel.families import sharding_table
from strata.parallel.layout import Layout
from strata.parallel.quantized_sums import QuantizedSums
from strata.parallel.stages import ModelStages
from strata.parallel.tensor import TensorSharding, shard_model
from strata.parallel.zero import ZeroGradients

# Puts parameters into a model that is divided along "tp" and "ep", and says how: the sharding with them.
Adapt = Callable[[nn.Module, TensorSharding], TensorSharding]


@dataclass(frozen=True)
class Parallel:
    """How a model was divided: along the tensor axis, and what its optimizer is given. quantized: what sums gradients
    over ranks in 8 bits, if they are."""

    sharding: TensorSharding
    gradients: Gradients
    quantized: QuantizedSums | None = None


def parallelize(
    model: CausalLM | ModelStages,
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    *,
    adapt: Adapt | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Parallel:
    """Divide `model`, in place, along "tp" and "ep" and over the data-parallel axes, and let it attend across "cp".

    model: whole, or the stages of this rank; on its device and alike on all ranks, or without values on the meta
    device, for `checkpoints.state.fill`, so that no rank ever holds it whole. Its dtype is that of the masters. layout:
    checked, and that of the mesh. Batches are divided along "cp" by `strata.parallel.context.divide_batch`.
    adapt: is called before gradients are shared out. compute_dtype, reduce_dtype, bucket_elements: see `ZeroGradients`;
    FSDP2 sends a layer at a time.
    """
    sharding = shard_model(
        model,
        mesh.axis("tp"),
        sharding_table(config.architecture),
        sequence_parallel=layout.sequence_parallel,
        overlap=layout.overlap,
    )
    if layout.ep > 1:
        shard_experts(model, mesh.axis("ep"))
        sharding = replace(sharding, experts=mesh.axis("ep"))
    if layout.cp > 1:
        parallelize_attention(model)
    if adapt is not None:
        sharding = adapt(model, sharding)
    quantized = QuantizedSums() if layout.message_dtype == "fp8" else None
    axes, world_axis = gradient_axes(mesh, sharding, layout.zero), all_ranks(mesh)
    gradients: Gradients
    if layout.zero == 3:
        from strata.parallel.fsdp import FsdpGradients  # imports DTensor and with it SymPy: a second

        gradients = FsdpGradients(
            model,
            mesh,
            sharding,
            axes,
            world_axis,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            quantized=quantized,
        )
    else:
        gradients = ZeroGradients(
            model,
            axes,
            world_axis,
            mesh.world.device,
            reduce_every_pass=layout.zero == 2,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            bucket_elements=bucket_elements,
            quantized=quantized,
        )
    return Parallel(sharding, gradients, quantized)
