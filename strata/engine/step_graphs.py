"""The graphs of one model that the steps of an engine run: each kind of step has the one that suits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, fx, nn

from strata.graph.bind import bind
from strata.graph.capture import capture, capture_head
from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.fuse_attention import fuse_decode_attention
from strata.graph.fuse_products import fuse_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.models.batch import Batch

# Up to so many rows, products that take up norms, gating and residuals are faster than the library's with kernels
# between them: as whole steps of the 0.6B and the 8B shape show on an H200 (docs/log.md).
MOST_FUSED_ROWS = 128


@dataclass(frozen=True)
class StepGraphs:
    """One model bound to one device.

    hidden: Batch to hidden [tokens, hidden]; head: hidden [rows, hidden] to logits [rows, vocabulary].
    logits: Batch and rows [rows] int32 to the logits of these tokens alone.
    few, many: for batches in which every sequence has one new token, Batch to logits [tokens, vocabulary]; `few` for
        up to MOST_FUSED_ROWS of them. None where no steps are recorded.
    """

    hidden: Callable[[Batch], Tensor]
    head: Callable[[Tensor], Tensor]
    logits: Callable[[Batch, Tensor], Tensor]
    few: Callable[[Batch], Tensor] | None = None
    many: Callable[[Batch], Tensor] | None = None

    def decode(self, sequences: int) -> Callable[[Batch], Tensor]:
        """The graph for decode steps of so many sequences."""
        graph = self.few if sequences <= MOST_FUSED_ROWS else self.many
        assert graph is not None
        return graph


def step_graphs(model: nn.Module, kind: str, deterministic: bool) -> StepGraphs:
    """Capture a model, run the passes, and bind for `kind` (see `Operation.bind`).

    Raises NotImplementedError if an operation has no implementation there. Only on CUDA, and not in deterministic mode,
    are there implementations for which the passes pay that look at the number of rows.
    """
    captured, head = capture(model), capture_head(model)
    by_rows = kind == "cuda" and not deterministic

    def whole() -> fx.GraphModule:
        return fuse(merge(compose(captured, head)))

    def bound(graph: fx.GraphModule) -> fx.GraphModule:
        return bind(graph, kind, deterministic)

    # The methods themselves: calling a module costs a Python frame or two on the way, every step.
    few = many = None
    if by_rows:
        few = bound(fuse_products(fuse_decode_attention(whole()))).forward
        many = bound(fuse_decode_attention(whole())).forward
    elif kind == "cuda":
        few = many = bound(whole()).forward
    logits = bound(gather_after_attention(fuse_gated_products(whole()) if by_rows else whole()))
    hidden, head = bound(fuse(merge(captured))), bound(head)
    return StepGraphs(hidden.forward, head.forward, logits.forward, few, many)
