"""Which weights of a model are packed, decided before any of them is read."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from strata.graph.quantize import weights_of_products
from strata.graph.trace import operation_of, trace, trace_head
from strata.kernels.moe.experts import experts, local_experts
from strata.kernels.op import Operation
from strata.kernels.quant.quantized import TWO_OF_FOUR, QuantizedWeight, Scheme
from strata.kernels.quant.schemes import scheme_of, sparsity_of
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.quantized.assembly import meta_weights
from strata.models.quantized.checkpoint import Checkpoint, quantized_format
from strata.models.quantized.choice import pruned, quantized_by, quantized_there
from strata.parallel.serving_shard import RankShard

_GIB = 1 << 30


@dataclass(frozen=True)
class Packing:
    """Of a rank's parameters that are packed: how, and on the meta device what each will be.

    operations: that multiply by them. name: of the scheme, or of a checkpoint's method and schemes.
    """

    schemes: Mapping[str, Scheme]
    planned: Mapping[str, QuantizedWeight]
    operations: tuple[Operation, ...] = ()
    name: str = ""

    @staticmethod
    def of(
        quantization: str | None,
        model: CausalLM,
        shard: RankShard | None = None,
        folder: Path | None = None,
        sparsity: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Packing:
        """By a scheme's name all that products alone read, but for the head and routers, of which errors would change
        which token or expert is chosen; so also by a pattern of zeros (`sparsity`) those that `strata prune` prunes; by
        None what the checkpoint in `folder` has packed of all that they read.

        model: on the meta device; of the rank of `shard`, where there are several. dtype: of floats. Raises ValueError
        for an unknown scheme, for a parameter that it cannot pack, for one where the checkpoint is packed already,
        and for both names.
        """
        if quantization is not None and sparsity is not None:
            raise ValueError(
                f"quantization={quantization!r} and sparsity={sparsity!r} pack the same weights: leave out one of them"
            )
        format = None if folder is None else quantized_format(folder)
        given, option = quantization or sparsity, "quantization" if quantization else "sparsity"
        if format is not None and given is not None:
            raise ValueError(
                f"{option}={given!r}: the weights of {folder} are packed already ({format.scheme}); leave it out"
            )
        if given is None and format is None:
            return NOTHING_PACKED
        layers = complete = model
        if shard is not None:
            with torch.device("meta"):
                layers, complete = build(shard.divided), build(shard.whole)
        graph, own = trace(layers), {name for name, _ in model.named_parameters()}
        products = weights_of_products([graph, trace_head(layers)])
        candidates = [name for name in products if name in own]
        checkpoint = None
        if sparsity is not None:
            schemes = quantized_by(sparsity_of(sparsity), pruned(candidates, complete), layers)
        elif quantization is not None:
            schemes = quantized_by(scheme_of(quantization), candidates, layers)
        else:
            assert folder is not None
            checkpoint = Checkpoint.of(folder, complete)
            schemes = quantized_there(checkpoint, candidates, complete, layers)
        operations = _multiplied(graph, schemes)
        if shard is not None and shard.slots is not None:
            operations = tuple(local_experts if one is experts else one for one in operations)
        name = given if format is None else format.scheme
        planned = meta_weights(model, complete, shard, schemes, checkpoint, dtype)
        return Packing(schemes, planned, operations, name or "")

    def check_kernels(self, kind: str, *, deterministic: bool) -> None:
        """Raises ValueError if an operation that multiplies has nothing for packed weights on such a device."""
        for operation in self.operations:
            candidates = operation.bind(kind, deterministic=deterministic, packed=True).candidates
            # On a GPU the reference would unpack a weight in every call, and some wait for the device.
            found = any(kind != "cuda" or candidate.name != "reference" for candidate in candidates)
            sparse = any(weight.kind == TWO_OF_FOUR for weight in self.planned.values())
            if not found or (kind == "cuda" and sparse and operation in (experts, local_experts)):
                how = "deterministic " if deterministic else ""
                raise ValueError(
                    f"weights packed as {self.name}: {operation.name} has no {how}kernel for them on {kind} yet; take "
                    "weights that are not packed, or another device"
                )

    def largest_in_floats(self, dtype: torch.dtype) -> int:
        """Bytes of the largest matrix, gate and up joined, that products of many rows turn into floats: where the
        scheme keeps activations as they are."""
        kept = (one for one in self.planned.values() if not one.activations and one.dim() == 2)
        return max((2 * one.numel() * dtype.itemsize for one in kept), default=0)

    def line(self, dtype: torch.dtype) -> str:
        """What is packed, for the log of a start. dtype: of what is not."""
        inside = sum(weight.numel() for weight in self.planned.values())
        size = sum(weight.nbytes for weight in self.planned.values())
        kind = str(dtype).removeprefix("torch.")
        return (
            f"weights: {len(self.planned):,} parameters are packed as {self.name}, {size / _GIB:.3f} GiB instead of "
            f"{inside * dtype.itemsize / _GIB:.3f} in {kind}"
        )


NOTHING_PACKED = Packing({}, {})


def _multiplied(graph: fx.GraphModule, names: Container[str]) -> tuple[Operation, ...]:
    """The operations that read these parameters, each once."""
    found: dict[Operation, None] = {}
    for node in graph.graph.nodes:
        operation = operation_of(node)
        read = (name for source in node.all_input_nodes for name in source.meta.get("parameters", ()))
        if operation is not None and any(name in names for name in read):
            found[operation] = None
    return tuple(found)
