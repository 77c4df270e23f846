"""Attention of a decode step from the product of its projections on: `qk_rope_kv_write` and `attention` in one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.attention import attention
from strata.kernels.op import operation
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.kernels.triton_import import HAS_TRITON


def _cost(
    product: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor,
    pages: PagedKV,
    layer: int,
    scale: float,
    window: int | None,
    *,
    workload: Workload,
) -> Cost:
    given = (product, heads, kv_heads, q_weight, k_weight, eps, cos, sin, pages, layer)
    q, k, v = qk_rope_kv_write.meta(*given)
    made = qk_rope_kv_write.cost(*given, workload=workload)
    read = attention.cost(q, k, v, offsets, 1, pages, layer, scale, window, workload=workload)
    # Queries and keys are not written to be read again, nor are the new keys and values read from the pages.
    new = 2 * k.numel() * pages.keys[layer].element_size()
    return Cost(
        made.flops + read.flops,
        made.read + read.read - q.nbytes - new,
        made.written + read.written - q.nbytes - k.nbytes,
        made.weights,
    )


def _meta(
    product: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor,
    pages: PagedKV,
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    return product.new_empty((product.shape[0], heads, cos.shape[-1]), device="meta")


@operation(_cost, meta=_meta, mutates=("pages",), reads_state=True)
def decode_attention(
    product: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor,
    pages: PagedKV,
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Queries, keys and values of one token a sequence are finished and written; each query sees its own sequence.

    product, heads, kv_heads, q_weight, k_weight, eps, cos, sin: as for `qk_rope_kv_write`.
    offsets, pages, layer, scale, window: as for `attention`; every sequence has exactly one new token, a padding row
    length 0 and slot -1.
    Returns [tokens, heads, head_dim] in the product's dtype. Rows of a sequence with length 0 are unspecified but
    finite.
    """
    given = (product, heads, kv_heads, q_weight, k_weight, eps, cos, sin, pages, layer)
    q, k, v = qk_rope_kv_write.reference(*given)
    return attention.reference(q, k, v, offsets, 1, pages, layer, scale, window)  # type: ignore[no-any-return]


def _triton(
    product: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor,
    pages: PagedKV,
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    unfinished = decode_attention_cuda.Unfinished(q_weight, k_weight, eps, cos, sin)
    return decode_attention_cuda.decode(product, heads, cos.shape[-1], pages, layer, scale, window, unfinished)


def _fits(
    product: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor,
    pages: PagedKV,
    layer: int,
    scale: float,
    window: int | None,
) -> bool:
    head_dim, pools = cos.shape[-1], (pages.keys[layer], pages.values[layer])
    return (
        product.dtype in (torch.bfloat16, torch.float16)
        and product.stride(-1) == 1
        and all(pool.dtype == product.dtype and pool.is_contiguous() for pool in pools)
        and all(angle.dtype == torch.float32 and angle.is_contiguous() for angle in (cos, sin))
        and head_dim >= 64  # rows of at least as many, a multiple of 16, are summed in the order of `rms_norm`
        and head_dim % 16 == 0
        and decode_attention_cuda.fits(pages, heads, kv_heads, head_dim)
    )


def _composed(device: str) -> Callable[..., Tensor]:
    """The two operations one after the other, each by what suits it on the device."""
    finish, attend = qk_rope_kv_write.bind(device), attention.bind(device)

    def run(
        product: Tensor,
        heads: int,
        kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        offsets: Tensor,
        pages: PagedKV,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        q, k, v = finish(product, heads, kv_heads, q_weight, k_weight, eps, cos, sin, pages, layer)
        result: Tensor = attend(q, k, v, offsets, 1, pages, layer, scale, window)
        return result

    return run


decode_attention.implement("composed", "cpu")(_composed("cpu"))
if HAS_TRITON:
    decode_attention.implement("triton", "cuda", supports=_fits)(_triton)
decode_attention.implement("composed", "cuda")(_composed("cuda"))
