"""A model becomes the graph that trains: the passes that serving uses too, with operations that have gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import cast

from torch import Tensor, fx, nn

from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.merge import merge
from strata.graph.trace import operation_of, trace
from strata.kernels.activation import silu_mul_grad  # noqa: F401  registers gradients on CUDA
from strata.kernels.gradient_target import GradientTarget
from strata.kernels.linear.fp8 import fits_fp8, linear_fp8, linear_fp8_into, linear_silu_mul_fp8
from strata.kernels.linear.into import linear_into, linear_silu_mul_fp8_into, linear_silu_mul_into
from strata.kernels.linear.linear import linear
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.norm import norm_grad  # noqa: F401  registers gradients on CUDA
from strata.kernels.rotary import rope_grad  # noqa: F401  registers gradients on CUDA
from strata.models.batch import Batch
from strata.models.layers import CausalLM
from strata.parallel.zero import ZeroGradients
from strata.train.recompute import recompute_layers


class TrainingGraph:
    """`model(batch)` with merged products and fused operations.

    The model's parameters are views of the merged weights from now on. Move or cast the model before, not after.

    merged: the merged weights, which get the gradients, and the parameters that lie in each one after another.
    """

    def __init__(
        self, model: CausalLM, precision: str = "bf16", recompute: str = "none", gradients: ZeroGradients | None = None
    ) -> None:
        """precision: of the layers' products, one of `PRECISIONS`; all else stays as the model has it.

        recompute: what the backward pass computes again, one of `RECOMPUTE` (see `recompute_layers`). gradients: if
        several ranks share the parameters; the graph then waits for weights, and writes gradients into messages.
        """
        self._graph = fuse_gated_products(fuse(merge(trace(model))))
        if precision != "bf16":
            _use_fp8(self._graph, per_row=precision == "fp8-row")
        self.merged: list[tuple[Tensor, Sequence[nn.Parameter]]] = []
        for node in self._graph.graph.find_nodes(op="get_attr"):
            names = node.meta["parameters"]
            if len(names) > 1:
                whole: Tensor = attrgetter(str(node.target))(self._graph).requires_grad_()
                self.merged.append((whole, [model.get_parameter(name) for name in names]))
        prepare = partial(_exchange, gradients=gradients)
        if recompute == "none":
            prepare(self._graph)
        else:
            self._graph = recompute_layers(self._graph, recompute, prepare)

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm."""
        return cast(Callable[[Batch], Tensor], self._graph)(batch)


def _exchange(graph: fx.GraphModule, gradients: ZeroGradients | None) -> None:
    """Let the graph, in place, wait for weights that are under way, and products write their weights' gradients into
    the messages that carry them.
    """
    if gradients is None:
        return
    gradients.wait_in_graph(graph)
    for node in graph.graph.nodes:
        operation = operation_of(node)
        if operation is None or not operation.product:
            continue
        weight = node.args[1]
        # A second reader's gradient could come after the first was sent.
        if weight.op == "get_attr" and len(weight.users) == 1:
            into = _Into(gradients.target(attrgetter(str(weight.target))(graph)))
            node.target = getattr(into, operation.name)
    graph.recompile()


@dataclass(frozen=True, eq=False)
class _Into:
    """What takes the place of each product of a training graph, by its name, for one weight, whose gradient goes to a
    place."""

    target: GradientTarget

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_into(x, weight, bias, self.target)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_silu_mul_into(x, weight, bias, self.target)

    def linear_fp8(self, x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool) -> Tensor:
        return linear_fp8_into(x, weight, bias, per_row, self.target)

    def linear_silu_mul_fp8(self, x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool) -> Tensor:
        return linear_silu_mul_fp8_into(x, weight, bias, per_row, self.target)


def _use_fp8(graph: fx.GraphModule, per_row: bool) -> None:
    """Dense layers whose sizes allow it compute in 8 bits, in place."""
    replaced = {linear: linear_fp8, linear_silu_mul: linear_silu_mul_fp8}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in replaced:
            x, weight, bias = (*node.args, None)[:3]
            if weight.op == "get_attr" and fits_fp8(attrgetter(str(weight.target))(graph)):
                node.target, node.args = replaced[node.target], (x, weight, bias, per_row)
    graph.recompile()
