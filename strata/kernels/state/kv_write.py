"""Put the keys and values of new tokens where they stay: into the pages of their sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.quantized_rows import round_rows, widen_rows
from strata.kernels.state.quantized_triton import quantized_write_kernel, write_quantized
from strata.kernels.triton_import import jit, tl


def _cost(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int, *, workload: Workload) -> Cost:
    if pages is None:
        return Cost()
    given = k.nbytes + v.nbytes
    written = given
    if pages.is_quantized:  # and what the rows then stand for, for attention of this step
        rows = 2 * k.shape[0] * k.shape[1]
        written += rows * (k.shape[2] + 1)
    return Cost(read=given + pages.slot_mapping.nbytes, written=written)


def _meta(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int) -> tuple[Tensor, Tensor]:
    return k.to("meta"), v.to("meta")


@operation(_cost, meta=_meta, mutates=("pages",))
def kv_write(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int) -> tuple[Tensor, Tensor]:
    """Write k and v [tokens, kv_heads, head_dim] into the pools of a layer at `pages.slot_mapping`; -1 writes nothing.

    Returns k and v themselves; of pools in 8 bits, what those hold of them, so that the step attends as later ones do.
    Without pages nothing is written.
    """
    if pages is None:
        return k, v
    if pages.is_quantized:
        return _write_rounded(k, v, pages, layer)
    index, new = pages.index, (k, v)
    if index is None:
        kept = pages.slot_mapping >= 0
        index, new = pages.slot_mapping[kept].long(), (k[kept], v[kept])
    for one, pool in zip(new, (pages.keys[layer], pages.values[layer]), strict=True):
        pool.flatten(0, 1).index_copy_(0, index, one.to(pool.dtype))
    return k, v


def _write_rounded(k: Tensor, v: Tensor, pages: PagedKV, layer: int) -> tuple[Tensor, Tensor]:
    kept, held = pages.slot_mapping >= 0, []
    slots = pages.slot_mapping[kept].long()
    pools = (k, pages.keys, pages.key_exponents), (v, pages.values, pages.value_exponents)
    for new, pool, exponents in pools:
        values, powers = round_rows(new, pool[layer].dtype)
        pool[layer].flatten(0, 1)[slots] = values[kept]
        exponents[layer][slots // pages.page_size, :, slots % pages.page_size] = powers[kept]
        held.append(widen_rows(values, powers, new.dtype))
    return held[0], held[1]


kv_write.by_definition("cpu", name="index_copy", invariant=True)


# What stands in a step's buffer begins at any address.
@partial(jit, unspecialized=("slots", "tokens"))
def kv_write_kernel(
    k,
    v,
    keys,
    values,
    slots,
    tokens,
    k_token,
    k_head,
    v_token,
    v_head,
    heads,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [tokens / TOKENS]: all heads of TOKENS tokens, padded to BLOCK elements a token."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)[:, None]
    token = token[:, None]
    element = tl.arange(0, BLOCK)[None, :]
    head = element // HEAD_DIM
    column = element % HEAD_DIM
    held = (token < tokens) & (element < heads * HEAD_DIM)
    # Whatever the slot, so that nothing waits for it before the stores.
    key = tl.load(k + token * k_token + head * k_head + column, mask=held)
    value = tl.load(v + token * v_token + head * v_head + column, mask=held)
    target = slot * heads * HEAD_DIM + element
    held &= slot >= 0
    tl.store(keys + target, key.to(keys.dtype.element_ty), mask=held)
    tl.store(values + target, value.to(values.dtype.element_ty), mask=held)


# Elements of keys, and of values, that a program moves, and its warps.
_TILE_ELEMENTS = 2048
TILE_WARPS = 4


def token_tile(width: int) -> dict[str, int]:
    """Tokens of a program that moves keys and values between pages and rows, `width` elements each, padded to BLOCK."""
    block: int = next_power_of_2(width)
    return {"TOKENS": max(1, _TILE_ELEMENTS // block), "BLOCK": block}


def _triton(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int) -> tuple[Tensor, Tensor]:
    if pages is None:
        return k, v
    if pages.is_quantized:
        return write_quantized(k, v, pages, layer)
    tokens, heads, head_dim = k.shape
    if tokens:
        tile = token_tile(heads * head_dim)
        kv_write_kernel[(ceil_div(tokens, tile["TOKENS"]),)](
            *(k, v, pages.keys[layer], pages.values[layer], pages.slot_mapping),
            *(tokens, *k.stride()[:2], *v.stride()[:2], heads),
            HEAD_DIM=head_dim,
            **tile,
            num_warps=TILE_WARPS,
        )
    return k, v


def _kernels(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int) -> tuple[Any, ...]:
    return (quantized_write_kernel if pages is not None and pages.is_quantized else kv_write_kernel,)


kv_write.in_triton(_triton, invariant=True, kernels=_kernels)
