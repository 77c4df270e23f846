"""Attention of a decode step from the product of its projections on: `qk_rope_kv_write` and `attention` in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionBatch, AttentionSpec, HeadsSpec, pages_of
from strata.kernels.fused import Run, fused
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import HeadsCall, qk_rope_kv_write


class DecodeCall(NamedTuple):
    """The operands of `decode_attention`.

    product, q_weight, k_weight, cos, sin, heads: as for `qk_rope_kv_write`.
    batch, spec, sinks: as for `attention`; every sequence has exactly one new token, in pages, a padding row length 0
    and slot -1.
    """

    product: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor
    sin: Tensor
    batch: AttentionBatch
    heads: HeadsSpec
    spec: AttentionSpec
    sinks: Tensor | None = None

    @property
    def pages(self) -> PagedKV:
        return pages_of(self.batch)

    @property
    def unwritten(self) -> HeadsCall:
        """The call of `qk_rope_kv_write`."""
        return HeadsCall(*self[:5], self.batch.pages, self.heads)


def _saved(call: DecodeCall) -> Cost:
    """The new values are at hand, as the new keys are: they are not read from the pages."""
    values = call.pages.values[call.spec.layer]
    return Cost(read=call.product.shape[0] * call.heads.kv_heads * call.cos.shape[-1] * values.element_size())


@fused(operands=DecodeCall, mutates=("batch",), reads_state=True, attends=True, saved=_saved)
def decode_attention(run: Run, call: DecodeCall) -> Tensor:
    """Queries, keys and values of one token a sequence are finished and written; each query sees its own sequence.

    Returns [tokens, heads, head_dim] in the product's dtype. Rows of a sequence with length 0 are unspecified but
    finite.
    """
    result: Tensor = run(attention, *run(qk_rope_kv_write, *call.unwritten), call.batch, call.spec, call.sinks)
    return result


def _triton(call: DecodeCall) -> Tensor:
    product, q_weight, k_weight, cos, sin, batch, heads, spec, sinks = call
    unfinished = decode_attention_cuda.Unfinished(q_weight, k_weight, heads.eps, cos, sin)
    return decode_attention_cuda.decode(
        product, heads.heads, cos.shape[-1], pages_of(batch), spec, unfinished, sinks=sinks
    )


def _of_decodes(count: Callable[..., Any]) -> Callable[..., Any]:
    """What `count` (the kernels, the bytes to wait in) says of so many decodes, from the operation's arguments."""

    def of(call: DecodeCall) -> Any:
        sizes = call.heads.heads, call.cos.shape[-1], call.heads.kv_heads
        return count(call.product, *sizes, call.pages, call.product.shape[0])

    return of


def _fits(call: DecodeCall) -> bool:
    product, _, _, cos, sin, batch, heads, spec = call[:8]
    pages = pages_of(batch)
    head_dim, pools = cos.shape[-1], (pages.keys[spec.layer], pages.values[spec.layer])
    return (
        product.dtype in (torch.bfloat16, torch.float16)
        and product.stride(-1) == 1
        and pages.holds(spec.layer, product.dtype)
        and all(pool.is_contiguous() for pool in pools)
        and all(angle.dtype == torch.float32 and angle.is_contiguous() for angle in (cos, sin))
        and head_dim >= 64  # rows of at least as many, a multiple of 16, are summed in the order of `rms_norm`
        and head_dim % 16 == 0
        and decode_attention_cuda.fits(pages, heads.heads, heads.kv_heads, head_dim)
    )


decode_attention.in_triton(
    _triton,
    supports=_fits,
    kernels=_of_decodes(decode_attention_cuda.kernels),
    scratch=_of_decodes(decode_attention_cuda.scratch),
)
for _device in ("cpu", "cuda"):
    decode_attention.unfused("composed", _device)
