"""Attention of a step's prompts by cuDNN over pages, as virtual sequences."""

from __future__ import annotations

from torch import Tensor

from strata.kernels.attention import cudnn_plan
from strata.kernels.attention.cudnn_plan import PlanShape, plan_for
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.attention.virtual_sequences import VirtualSequences
from strata.kernels.state.paged import PagedKV


def takes(pages: PagedKV, spec: AttentionSpec) -> bool:
    """Whether a layer's prompts can be attended for in a step that has virtual sequences: it knows no windows."""
    return spec.window is None and pages.tables.is_contiguous()


def attend(out: Tensor, q: Tensor, pages: PagedKV, virtual: VirtualSequences, spec: AttentionSpec) -> None:
    """Into the rows of `out` [tokens, heads, head_dim] that belong to a virtual sequence; the others stay as they are.

    q: [tokens, heads, head_dim] with virtual.rows.queries elements from one token to the next. What the pages hold
    behind the last token of a sequence, in its last page and in the rest of a block of keys, has to be finite.
    """
    if q.device.type == "meta":  # where only kernels that Triton compiles are of interest
        return
    keys, values = pages.keys[spec.layer], pages.values[spec.layer]
    count, page_size, kv_heads, head_dim = keys.shape
    shape = PlanShape(
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        query_row=q.stride(0),
        pages=count,
        page_size=page_size,
        most_pages=pages.tables.shape[1],
        scale=spec.scale,
    )
    plan_for(shape, q.device).run(
        {
            cudnn_plan.QUERY: q,
            cudnn_plan.KEY: keys,
            cudnn_plan.VALUE: values,
            cudnn_plan.RESULT: out,
            cudnn_plan.QUERY_STARTS: virtual.starts[0],
            cudnn_plan.RESULT_STARTS: virtual.starts[1],
            cudnn_plan.KEY_TABLE_STARTS: virtual.starts[2],
            cudnn_plan.VALUE_TABLE_STARTS: virtual.starts[2],
            cudnn_plan.QUERY_LENGTHS: virtual.lengths[0],
            cudnn_plan.KEY_LENGTHS: virtual.lengths[1],
            cudnn_plan.KEY_TABLE: pages.tables,
            cudnn_plan.VALUE_TABLE: pages.tables,
        }
    )
