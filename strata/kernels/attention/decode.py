"""Attention of a decode step from the product of its projections on: `qk_rope_kv_write` and `attention` in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionSpec, HeadsSpec, PackedBatch
from strata.kernels.fused import Run, fused
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.kernels.triton_import import HAS_TRITON


def _saved(
    product: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    batch: PackedBatch,
    heads: HeadsSpec,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Cost:
    """The new values are at hand, as the new keys are: they are not read from the pages."""
    assert batch.pages is not None
    return Cost(read=product.shape[0] * heads.kv_heads * cos.shape[-1] * batch.pages.values[spec.layer].element_size())


@fused(mutates=("batch",), reads_state=True, saved=_saved)
def decode_attention(
    run: Run,
    product: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    batch: PackedBatch,
    heads: HeadsSpec,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries, keys and values of one token a sequence are finished and written; each query sees its own sequence.

    product, q_weight, k_weight, cos, sin, heads: as for `qk_rope_kv_write`.
    batch, spec, sinks: as for `attention`; every sequence has exactly one new token, in pages, a padding row length 0
    and slot -1.
    Returns [tokens, heads, head_dim] in the product's dtype. Rows of a sequence with length 0 are unspecified but
    finite.
    """
    q, k, v = run(qk_rope_kv_write, product, q_weight, k_weight, cos, sin, batch.pages, heads)
    result: Tensor = run(attention, q, k, v, batch, spec, sinks)
    return result


def _triton(
    product: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    batch: PackedBatch,
    heads: HeadsSpec,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    assert batch.pages is not None
    unfinished = decode_attention_cuda.Unfinished(q_weight, k_weight, heads.eps, cos, sin)
    return decode_attention_cuda.decode(product, heads.heads, cos.shape[-1], batch.pages, spec, unfinished, sinks=sinks)


def _of_decodes(count: Callable[..., Any]) -> Callable[..., Any]:
    """What `count` (the kernels, the bytes to wait in) says of so many decodes, from the operation's arguments."""

    def of(
        product: Tensor, _q: Any, _k: Any, cos: Tensor, _sin: Any, batch: PackedBatch, heads: HeadsSpec, *_: Any
    ) -> Any:
        return count(product, heads.heads, cos.shape[-1], heads.kv_heads, batch.pages, product.shape[0])

    return of


def _fits(
    product: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    batch: PackedBatch,
    heads: HeadsSpec,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> bool:
    pages = batch.pages
    assert pages is not None
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


def _composed(device: str) -> Callable[..., Tensor]:
    """The two operations one after the other, each by what suits it on the device."""
    finish, attend = qk_rope_kv_write.bind(device), attention.bind(device)

    def run(
        product: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: PackedBatch,
        heads: HeadsSpec,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q, k, v = finish(product, q_weight, k_weight, cos, sin, batch.pages, heads)
        result: Tensor = attend(q, k, v, batch, spec, sinks)
        return result

    return run


def _composed_kernels(*args: Any) -> tuple[str, ...]:
    given, (batch, heads, *others) = args[:5], args[5:]
    q, k, v = qk_rope_kv_write.meta(*given, batch.pages, heads)
    finish, attend = qk_rope_kv_write.bind("cuda"), attention.bind("cuda")
    return finish.launches(*given, batch.pages, heads) + attend.launches(q, k, v, batch, *others)


decode_attention.implement("composed", "cpu")(_composed("cpu"))
if HAS_TRITON:
    decode_attention.implement(
        "triton",
        "cuda",
        supports=_fits,
        kernels=_of_decodes(decode_attention_cuda.kernels),
        scratch=_of_decodes(decode_attention_cuda.scratch),
    )(_triton)
decode_attention.implement("composed", "cuda", kernels=_composed_kernels)(_composed("cuda"))
