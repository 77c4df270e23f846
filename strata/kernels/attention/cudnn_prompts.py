"""Attention of a step's prompts by cuDNN, as virtual sequences: to keys gathered from pages, or of fresh steps."""

from __future__ import annotations

from torch import Tensor

from strata.kernels.attention import cudnn_plan
from strata.kernels.attention.cudnn_plan import PlanShape, plan_for
from strata.kernels.attention.prompt_keys import gather_prompt_keys
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.attention.virtual_sequences import MAX_TOKENS, VirtualSequences
from strata.kernels.state.paged import PagedKV


def takes(pages: PagedKV, spec: AttentionSpec, sinks: Tensor | None) -> bool:
    """Whether it attends for a layer's prompts in a step that has virtual sequences: it knows no windows or sinks."""
    return spec.window is None and sinks is None and pages.tables.is_contiguous()


def lie_as_divided(q: Tensor, k: Tensor, v: Tensor, virtual: VirtualSequences) -> bool:
    """Whether the vectors of one token lie as far from those of the next as where the starts are computed for."""
    rows = virtual.rows
    return q.stride(0) == rows.queries and (not rows.fresh or (k.stride(0), v.stride(0)) == (rows.keys, rows.values))


def attend(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, pages: PagedKV, virtual: VirtualSequences, spec: AttentionSpec
) -> None:
    """Into the rows of `out` [tokens, heads, head_dim] that belong to a virtual sequence; the others stay as they are.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], which are read in fresh steps alone, where values
    behind the last token of a sequence, in the rest of a block of keys, have to be finite; they lie as divided.
    """
    rows = virtual.rows
    longest = MAX_TOKENS if rows.fresh else pages.tables.shape[-1] * pages.page_size
    if not rows.fresh:
        k, v = gather_prompt_keys(pages, spec.layer, virtual, longest)
    if q.device.type == "meta":  # where only kernels that Triton compiles are of interest
        return
    tensors = {
        cudnn_plan.QUERY: q,
        cudnn_plan.KEY: k,
        cudnn_plan.VALUE: v,
        cudnn_plan.RESULT: out,
        cudnn_plan.QUERY_STARTS: virtual.starts[0],
        cudnn_plan.RESULT_STARTS: virtual.starts[1],
        cudnn_plan.KEY_STARTS: virtual.starts[2],
        cudnn_plan.VALUE_STARTS: virtual.starts[3],
        cudnn_plan.QUERY_LENGTHS: virtual.lengths[0],
        cudnn_plan.KEY_LENGTHS: virtual.lengths[1],
    }
    heads, head_dim = q.shape[1:]
    shape = PlanShape(q.dtype, heads, k.shape[1], head_dim, rows.queries, rows.keys, rows.values, longest, spec.scale)
    plan_for(shape, q.device).run(tensors)
