"""What stands between projection and attention, in one launch: norms of heads, rotation, and the write into pages."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.fused import Run, fused
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.norm.norm import inverse_rms, rms_norm, scaled
from strata.kernels.rotary.rope import rope
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.quantized_triton import quantized_write_kernel, write_quantized
from strata.kernels.triton_import import jit, tl


class HeadsCall(NamedTuple):
    """The operands of `qk_rope_kv_write`.

    product: [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values side by side.
    q_weight, k_weight: [head_dim] of the `rms_norm` of queries and of keys; both None: no norm.
    cos, sin: of `rope_angles`, [tokens, 1, head_dim].
    pages: as for `kv_write`; None writes nothing.
    """

    product: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor
    sin: Tensor
    pages: PagedKV | None
    spec: HeadsSpec


def _saved(call: HeadsCall) -> Cost:
    """The angles are read once for queries and keys."""
    return Cost(read=(call.cos.nbytes + call.sin.nbytes) // 2)


def _backward_cost(call: HeadsCall, *, workload: Workload) -> Cost:
    """Gradients are rotated back into one with that of the values, which is copied, behind the norms' gradients."""
    product, q_weight, k_weight, cos, sin, _, spec = call
    q, k, _ = _parts(product, spec, cos.shape[-1])
    norms = Cost()
    if q_weight is not None and k_weight is not None:
        for heads, weight in ((q, q_weight), (k, k_weight)):
            whole: Cost = rms_norm.backward_cost(heads, weight, spec.eps, workload=workload)
            norms += whole - Cost(read=heads.nbytes, written=heads.nbytes)  # what rotation writes and norms read
    angles = (cos.nbytes + sin.nbytes) // 2
    return norms + Cost(3 * (q.numel() + k.numel()), product.nbytes + angles, product.nbytes)


@fused(operands=HeadsCall, mutates=("pages",), saved=_saved, backward=_backward_cost)
def qk_rope_kv_write(run: Run, call: HeadsCall) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normalized head by head and rotated; keys and values written into the pages of a layer.

    Returns queries [tokens, heads, head_dim] and keys [tokens, kv_heads, head_dim], rotated, and the values, a view of
    `product`; of pools in 8 bits keys and values are what those hold. The bits are those of `rms_norm`, `rope` and
    `kv_write` one after the other.
    """
    product, q_weight, k_weight, cos, sin, pages, spec = call
    q, k, v = _parts(product, spec, cos.shape[-1])
    if q_weight is not None:
        q, k = run(rms_norm, q, q_weight, spec.eps), run(rms_norm, k, k_weight, spec.eps)
    k = run(rope, k, cos, sin)
    if pages is not None:
        k, v = run(kv_write, k, v, pages, spec.layer)
    return run(rope, q, cos, sin), k, v


def _parts(product: Tensor, spec: HeadsSpec, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (spec.heads, spec.kv_heads, spec.kv_heads)
    q, k, v = product.unflatten(-1, (-1, head_dim)).split_with_sizes(sizes, -2)
    return q, k, v


# What deterministic mode runs; no other implementations exist for a CPU.
_norm, _rope, _kv_write = (
    each.bind("cpu", deterministic=True).candidates[0].run for each in (rms_norm, rope, kv_write)
)


@qk_rope_kv_write.implement("torch", "cpu", invariant=True)
def _torch(call: HeadsCall) -> tuple[Tensor, Tensor, Tensor]:
    product, q_weight, k_weight, cos, sin, pages, spec = call
    heads, kv_heads, eps = spec.heads, spec.kv_heads, spec.eps
    if q_weight is None:  # neighbours, so one call rotates both
        parts = product.unflatten(-1, (-1, cos.shape[-1]))
        q, k = _rope(parts.narrow(-2, 0, heads + kv_heads), cos, sin).split_with_sizes((heads, kv_heads), -2)
        v = parts.narrow(-2, heads + kv_heads, kv_heads)
    else:
        q, k, v = _parts(product, spec, cos.shape[-1])
        q, k = _rope(_norm(q, q_weight, eps), cos, sin), _rope(_norm(k, k_weight, eps), cos, sin)
    k, v = _kv_write(k, v, pages, spec.layer)
    return q, k, v


@jit
def _halves_swapped(rows, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [ROWS, WIDTH] float32 with the halves of each exchanged, among the threads that hold the row."""
    bits = tl.reshape(rows.to(tl.int32, bitcast=True), (ROWS, 2, WIDTH // 2))
    bits ^= tl.xor_sum(bits, 1, keep_dims=True)  # a ^ (a ^ b) is b
    return tl.reshape(bits, (ROWS, WIDTH)).to(tl.float32, bitcast=True)


@jit
def _weights(q_weight, k_weight, is_query, column, within):
    """Each row's weights of the norm at these columns [1, WIDTH]: [ROWS, WIDTH]."""
    queries = tl.load(q_weight + column, mask=within, other=0.0)
    return tl.where(is_query, queries, tl.load(k_weight + column, mask=within, other=0.0))


# What stands in a step's buffer begins at any address.
@partial(jit, unspecialized=("slots",))
def qk_rope_kv_write_kernel(
    product,
    q_weight,
    k_weight,
    cos,
    sin,
    rotated,
    keys,
    values,
    slots,
    heads,
    kv_heads,
    head_dim,
    token_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Programs [tokens, blocks of heads]: ROWS neighbouring heads of one token, whatever they are: q, k, v.

    A row has as many threads and is summed in the same order as in `rms_norm_kernel`; head_dim is HEAD_DIM, passed as
    a number as well because the compiler would divide rows of a known width among threads in another way.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    last_key = heads + kv_heads
    within = column < HEAD_DIM
    held = (head < last_key + kv_heads) & within
    offset = head * head_dim + column
    product += token * token_stride
    given = tl.load(product + offset, mask=held, other=0.0)
    row = given
    if q_weight is not None:
        scale = inverse_rms(given, head_dim, eps)
        row = scaled(given, scale, _weights(q_weight, k_weight, head < heads, column, within))
    wide = row.to(tl.float32)
    HALF: tl.constexpr = HEAD_DIM // 2
    if WIDTH == HEAD_DIM:
        other = _halves_swapped(wide, ROWS, WIDTH)
    else:
        partner = (column + HALF) % HEAD_DIM
        row = tl.load(product + head * head_dim + partner, mask=held, other=0.0)
        if q_weight is not None:
            row = scaled(row, scale, _weights(q_weight, k_weight, head < heads, partner, within))
        other = row.to(tl.float32)
    # Both halves of the cosines and sines are alike but for the sign of the sines, so only the second is read.
    angle = token * head_dim + HALF + column % HALF
    c = tl.load(cos + angle, mask=within, other=0.0)
    s = tl.load(sin + angle, mask=within, other=0.0)
    turned = tl.fma(wide, c, other * tl.where(column < HALF, -s, s)).to(given.dtype)
    tl.store(rotated + token * last_key * head_dim + offset, turned, mask=held & (head < last_key))
    if keys is not None:
        slot = tl.load(slots + token).to(tl.int64)
        stored = held & (head >= heads) & (slot >= 0)
        keys += (slot * kv_heads - heads) * head_dim
        values += (slot * kv_heads - last_key) * head_dim
        tl.store(keys + offset, turned.to(keys.dtype.element_ty), mask=stored & (head < last_key))
        tl.store(values + offset, given.to(values.dtype.element_ty), mask=stored & (head >= last_key))


# Elements of a tile, and its warps: enough that a cosine serves several heads and that many loads are under way.
_TILE_ELEMENTS = 4096
_WARPS = 8


def _tile(head_dim: int) -> dict[str, int]:
    width: int = next_power_of_2(head_dim)
    return {"ROWS": max(1, _TILE_ELEMENTS // width), "WIDTH": width}


def _triton(call: HeadsCall) -> tuple[Tensor, Tensor, Tensor]:
    product, q_weight, k_weight, cos, sin, pages, spec = call
    heads, kv_heads = spec.heads, spec.kv_heads
    tokens, head_dim = product.shape[0], cos.shape[-1]
    rotated = torch.empty((tokens, heads + kv_heads, head_dim), dtype=product.dtype, device=product.device)
    into: tuple[Tensor | None, ...] = (None, None, None)
    if pages is not None and not pages.is_quantized:
        into = pages.keys[spec.layer], pages.values[spec.layer], pages.slot_mapping
    if tokens:
        tile = _tile(head_dim)
        qk_rope_kv_write_kernel[(tokens, ceil_div(heads + 2 * kv_heads, tile["ROWS"]))](
            *(product, q_weight, k_weight, cos, sin, rotated, *into),
            *(heads, kv_heads, head_dim, product.stride(0), spec.eps),
            HEAD_DIM=head_dim,
            **tile,
            num_warps=_WARPS,
        )
    q, k = rotated.split_with_sizes((heads, kv_heads), 1)
    v = product.unflatten(-1, (-1, head_dim)).narrow(1, heads + kv_heads, kv_heads)
    if pages is not None and pages.is_quantized:
        k, v = write_quantized(k, v, pages, spec.layer)
    return q, k, v


def _fits(call: HeadsCall) -> bool:
    return call.product.dtype != torch.float64 and call.product.stride(-1) == 1


def _kernels(call: HeadsCall) -> tuple[Any, ...]:
    rounds = call.pages is not None and call.pages.is_quantized
    return (qk_rope_kv_write_kernel, *[quantized_write_kernel] * rounds)


qk_rope_kv_write.in_triton(_triton, invariant=True, supports=_fits, kernels=_kernels)
