"""Activations that the backward pass computes again instead of keeping them (Chen et al. 2016).

All of a layer, or only what costs little (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strata.kernels.linear_fp8 import linear_silu_mul_fp8
from strata.kernels.linear_silu_mul import linear_silu_mul
from strata.kernels.moe_experts import experts
from strata.models.layers import DecoderLayer

# What is kept of a layer under "operations": results of products and of attention. The rest is memory traffic.
_KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
}
# Which argument of a product is the matrix [inner, columns], or those of experts [experts, inner, columns].
_PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::_scaled_mm": 1, "aten::_grouped_mm": 1}
# Which argument of an operation has gate's and up's rows, the last dimension but one.
_GATED = {linear_silu_mul: 1, linear_silu_mul_fp8: 1, experts: 3}


def recompute_layers(graph: fx.GraphModule, recompute: str) -> fx.GraphModule:
    """The same function with each decoder layer computed again in the backward pass, from what enters it.

    recompute: "layers"; "operations", which computes only what lies between products and attention again, from the
    results of these; or "mlp", which also computes gate's and up's product again, whose result is the largest of all.
    graph: captured, merged and fused, with `meta["layer"]` at its nodes.
    """
    parts: dict[fx.Node, int] = {}

    def part_of(node: fx.Node) -> int:
        """Layer n is part n + 1, and a node never stands before what it reads."""
        layer = node.meta.get("layer")
        # Attributes of the batch are fetched where the first layer reads them, but they are everyone's.
        own = 0 if layer is None or node.target is getattr else layer + 1
        parts[node] = max([own, *(parts[given] for given in node.all_input_nodes if given in parts)])
        return parts[node]

    divided = split_module(graph, graph, part_of, keep_original_order=True)
    contexts = None
    if recompute != "layers":
        widths = _gated_widths(graph) if recompute == "mlp" else frozenset()
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, widths))
    for name, layer in list(divided.named_children()):
        if name.startswith("submod_") and name != "submod_0":
            setattr(divided, name, _Recomputed(layer, contexts))
    return divided


def recompute_modules(model: nn.Module) -> None:
    """Let each decoder layer of a model that is no graph, in place, be computed again in the backward pass."""
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]


def _gated_widths(graph: fx.GraphModule) -> frozenset[int]:
    """How many columns the products with gate's and up's weight have."""
    gated = (node.args[_GATED[node.target]] for node in graph.graph.nodes if node.target in _GATED)
    return frozenset(attrgetter(str(weight.target))(graph).shape[-2] for weight in gated)


def _policy(widths: frozenset[int], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """widths: results of so many columns are not kept."""
    kept = operation.name() in _KEPT
    if kept and widths and operation.name() in _PRODUCTS:
        kept = args[_PRODUCTS[operation.name()]].shape[-1] not in widths
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Recomputed(nn.Module):
    """Nothing in a layer is random, so no generator's state is kept."""

    def __init__(self, layer: nn.Module, contexts: Callable[[], Any] | None) -> None:
        super().__init__()
        self.layer = layer
        self._checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        if contexts is not None:
            self._checkpoint = partial(self._checkpoint, context_fn=contexts)

    def forward(self, *inputs: Any) -> Any:
        return self._checkpoint(self.layer, *inputs)
