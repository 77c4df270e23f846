"""Activations that the backward pass computes again instead of keeping them (Chen et al. 2016).

All of a layer, or only what costs no products (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# What is kept of a layer under "operations": results of products and of attention. The rest is memory traffic.
_KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
}


def recompute_layers(graph: fx.GraphModule, *, keep_products: bool) -> fx.GraphModule:
    """The same function with each decoder layer computed again in the backward pass, from what enters it.

    keep_products: only the operations between products and attention are computed again, from the results of these.
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
    contexts = partial(create_selective_checkpoint_contexts, _policy) if keep_products else None
    for name, layer in list(divided.named_children()):
        if name.startswith("submod_") and name != "submod_0":
            setattr(divided, name, _Recomputed(layer, contexts))
    return divided


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name() in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


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
