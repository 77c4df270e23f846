"""A model becomes the graph that trains: the passes that serving uses too, with operations that have gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import cast

from torch import Tensor, nn

from strata.graph.capture import capture
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.merge import merge

# Imported for what they register: gradients of operations on CUDA.
from strata.kernels import activation_grad, norm_grad, rope_grad  # noqa: F401
from strata.models.batch import Batch
from strata.models.layers import CausalLM


class TrainingGraph:
    """`model(batch)` with merged products and fused operations; its gradients become those of the model's parameters.

    The model's parameters are views of the merged weights from now on. Move or cast the model before, not after.
    """

    def __init__(self, model: CausalLM) -> None:
        self._graph = fuse_gated_products(fuse(merge(capture(model))))
        self._merged: list[tuple[Tensor, Sequence[nn.Parameter]]] = []
        for node in self._graph.graph.find_nodes(op="get_attr"):
            names = node.meta["parameters"]
            if len(names) > 1:
                whole: Tensor = attrgetter(str(node.target))(self._graph).requires_grad_()
                self._merged.append((whole, [model.get_parameter(name) for name in names]))

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm."""
        return cast(Callable[[Batch], Tensor], self._graph)(batch)

    def hand_out_gradients(self) -> None:
        """Give every parameter the rows of its merged weight's gradient, as a view; call after a backward pass."""
        for whole, parameters in self._merged:
            if whole.grad is None:
                continue
            pieces = whole.grad.split([parameter.shape[0] for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece

    def clear_gradients(self) -> None:
        """Let go of the merged weights' gradients; the parameters' are the optimizer's to clear."""
        for whole, _ in self._merged:
            whole.grad = None
