"""Activations that the backward pass computes again instead of keeping them (Chen et al. 2016).

All of a layer, or only what costs little (Korthikanti et al. 2022).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strata.graph.trace import operation_of
from strata.kernels.linear.fp8 import linear_silu_mul_fp8
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.moe.experts import experts
from strata.kernels.norm.norm import add_rms_norm, rms_norm
from strata.models.layers import Layer

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

Sizes = tuple[int, int]  # inner and columns of a matrix


def recompute_layers(
    graph: fx.GraphModule, recompute: str, prepare: Callable[[fx.GraphModule], None]
) -> fx.GraphModule:
    """The same function with each decoder layer computed again in the backward pass, from the one tensor that enters.

    recompute: "layers"; "operations", which computes only what lies between products and attention again, from the
    results of these; or "mlp", which also computes gate's and up's product again, whose result is the largest of all.
    graph: captured, merged and fused, with `meta["layer"]` at its nodes; changed in place. prepare: changes it, in
    place, before it is divided; operations need not stay what they were.
    """
    sums = _end_layers_with_sums(graph)
    computed = _last_products(graph, sums) | (_gated_products(graph) if recompute == "mlp" else frozenset())
    prepare(graph)
    parts: dict[fx.Node, int] = {}
    after = 2 + max(node.meta["layer"] for node in sums)

    def part_of(node: fx.Node) -> int:
        """Layer n is part n + 1, and a node never stands before what it reads."""
        read = [parts[given] for given in node.all_input_nodes if given in parts]
        layer = node.meta.get("layer")
        if node.target is getattr:
            own = 0  # attributes of the batch are fetched where the first layer reads them, but they are everyone's
        elif layer is None:
            own = after if any(read) else 0
        else:
            own = layer + 1
        parts[node] = max([own, *read])
        return parts[node]

    divided = split_module(graph, graph, part_of, keep_original_order=True)
    contexts = None
    if recompute != "layers":
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, computed))
    for part in range(1, after):
        name = f"submod_{part}"
        setattr(divided, name, _Recomputed(divided.get_submodule(name), contexts))
    return divided


def _end_layers_with_sums(graph: fx.GraphModule) -> list[fx.Node]:
    """Take additions out of the norms that follow them in another layer, in place; returns the additions that end
    layers, those in front of other norms too.

    So a layer gives the next one their sum, and not two tensors, both of which would be kept.
    """
    for fused in graph.graph.find_nodes(op="call_function", target=add_rms_norm):
        x, residual, weight, eps = fused.args
        layer = max(given.meta["layer"] for given in (x, residual) if given.meta["layer"] is not None)
        if fused.meta["layer"] == layer:
            continue
        with graph.graph.inserting_before(fused):
            total = graph.graph.call_function(operator.add, (x, residual))
            normed = graph.graph.call_function(rms_norm, (total, weight, eps))
        total.meta, normed.meta = {"layer": layer}, dict(fused.meta)
        for item in list(fused.users):
            item.replace_all_uses_with((total, normed)[item.args[1]])
            graph.graph.erase_node(item)
        graph.graph.erase_node(fused)
    graph.recompile()
    return [node for node in graph.graph.find_nodes(op="call_function", target=operator.add) if _ends_layer(node)]


def _ends_layer(node: fx.Node) -> bool:
    layer = node.meta.get("layer")
    return layer is not None and all(user.meta.get("layer") != layer for user in node.users)


def recompute_modules(model: nn.Module, recompute: str) -> None:
    """Let layers of a model that is no graph, in place, be computed again in the backward pass.

    recompute: one of `strata.train.config.RECOMPUTE_OF_MODULES`; "mlp" is a layer's MLP, with its experts, from what
    enters it; nothing of layers without one.
    """
    if recompute == "none":
        return
    for layer in model.modules():
        if not isinstance(layer, Layer):
            continue
        again = getattr(layer, "mlp", None) if recompute == "mlp" else layer
        if again is not None:
            again.forward = partial(checkpoint, again.forward, use_reentrant=False, preserve_rng_state=False)


def _last_products(graph: fx.GraphModule, sums: Sequence[fx.Node]) -> frozenset[Sizes]:
    """Of the matrices whose products are only added up: nothing in a backward pass needs their results, and torch stops
    to compute a layer again where the last tensor that is needed is there (see `kernels/custom_gradient.py`). Not if
    other products have matrices of these sizes: selective checkpoints see sizes alone, and would not keep theirs.
    """
    operations = ((node, operation_of(node)) for node in graph.graph.nodes)
    products = {node for node, one in operations if one is not None and one.product and not one.gated}
    last = {given for total in sums for given in total.all_input_nodes if given in products}
    mine, others = ({_sizes(graph, one.args[1]) for one in some} for some in (last, products - last))
    return frozenset(mine - others)


def _gated_products(graph: fx.GraphModule) -> frozenset[Sizes]:
    """Of gate's and up's matrices."""
    nodes = (node for node in graph.graph.nodes if node.target in _GATED)
    return frozenset(_sizes(graph, node.args[_GATED[node.target]]) for node in nodes)


def _sizes(graph: fx.GraphModule, weight: Any) -> Sizes:
    """Of the matrix [inner, columns] that a weight [columns, inner] is in a product."""
    columns, inner = attrgetter(str(weight.target))(graph).shape[-2:]
    return inner, columns


def _policy(computed: frozenset[Sizes], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """computed: results of products with matrices of these sizes are computed again, not kept."""
    kept = operation.name() in _KEPT
    if kept and operation.name() in _PRODUCTS:
        kept = tuple(args[_PRODUCTS[operation.name()]].shape[-2:]) not in computed
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
