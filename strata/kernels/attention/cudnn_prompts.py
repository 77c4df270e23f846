"""Attention of a step's prompts by cuDNN, as virtual sequences: over pages, or in fresh steps over their own keys."""

from __future__ import annotations

from torch import Tensor

from strata.kernels.attention import cudnn_plan
from strata.kernels.attention.cudnn_plan import Packed, Pages, PlanShape, plan_for
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.attention.virtual_sequences import VirtualSequences
from strata.kernels.state.paged import PagedKV


def takes(pages: PagedKV, spec: AttentionSpec, sinks: Tensor | None) -> bool:
    """Whether it attends for a layer's prompts in a step that has virtual sequences: it knows no windows or sinks."""
    return spec.window is None and sinks is None and pages.tables.is_contiguous()


def lie_as_divided(q: Tensor, k: Tensor, v: Tensor, virtual: VirtualSequences) -> bool:
    """Whether the vectors of one token lie as far from those of the next as where the starts are computed for."""
    rows = virtual.rows
    fresh = rows.values is None or (k.stride(0), v.stride(0)) == (rows.key_row, rows.values)
    return q.stride(0) == rows.queries and fresh


def attend(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, pages: PagedKV, virtual: VirtualSequences, spec: AttentionSpec
) -> None:
    """Into the rows of `out` [tokens, heads, head_dim] that belong to a virtual sequence; the others stay as they are.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], which are read in fresh steps alone; they lie as
    divided. Values behind the last token of a sequence, in the rest of a block of keys, have to be finite, in whichever
    of pages and v they are read from.
    """
    if q.device.type == "meta":  # where only kernels that Triton compiles are of interest
        return
    values = virtual.rows.values
    tensors = {
        cudnn_plan.QUERY: q,
        cudnn_plan.RESULT: out,
        cudnn_plan.QUERY_STARTS: virtual.starts[0],
        cudnn_plan.RESULT_STARTS: virtual.starts[1],
        cudnn_plan.KEY_STARTS: virtual.starts[2],
        cudnn_plan.VALUE_STARTS: virtual.starts[3],
        cudnn_plan.QUERY_LENGTHS: virtual.lengths[0],
        cudnn_plan.KEY_LENGTHS: virtual.lengths[1],
    }
    source: Pages | Packed
    if values is None:
        pools = pages.keys[spec.layer], pages.values[spec.layer]
        tensors |= {cudnn_plan.KEY: pools[0], cudnn_plan.VALUE: pools[1]}
        tensors |= {cudnn_plan.KEY_TABLE: pages.tables, cudnn_plan.VALUE_TABLE: pages.tables}
        source = Pages(len(pools[0]), pages.page_size, pages.tables.shape[1])
    else:
        tensors |= {cudnn_plan.KEY: k, cudnn_plan.VALUE: v}
        source = Packed(k.stride(0), values)
    heads, head_dim = q.shape[1:]
    shape = PlanShape(q.dtype, heads, k.shape[1], head_dim, q.stride(0), spec.scale, source)
    plan_for(shape, q.device).run(tensors)
