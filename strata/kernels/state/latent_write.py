"""The row that latent attention keeps of a token: finished, and put into the page where it stays (DeepSeek-V2, 2024,
section 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.norm.norm import inverse_rms, rms_norm, scaled
from strata.kernels.op import operation
from strata.kernels.rotary.rope import rotated_pairs, turned
from strata.kernels.state.paged import PagedKV
from strata.kernels.triton_import import jit, tl


class LatentWriteCall(NamedTuple):
    """The operands of `latent_write`.

    product: [tokens, rank + dims], the latent and that part side by side. weight: [rank] of the `rms_norm` of the
    latent. cos, sin, paired: as for `tail_rope`, [tokens, 1, dims]. pages: the rows of a layer are `pages.keys[layer]`,
    [pages, page_size, 1, rank + dims], written at `pages.slot_mapping`; -1 writes nothing; None: nothing is written.
    """

    product: Tensor
    weight: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    pages: PagedKV | None
    layer: int
    paired: bool


def _cost(call: LatentWriteCall, *, workload: Workload) -> Cost:
    """The norm of the latents: four operations an element; a rotation of a pair: six. A second row goes to the page."""
    product, weight, _, cos, sin, pages, layer, _ = call
    tokens, rank, dims = product.shape[0], weight.shape[0], cos.shape[-1]
    read = product.nbytes + weight.nbytes + (cos.nbytes + sin.nbytes) // 2
    stored = 0
    if pages is not None:
        read, stored = read + pages.slot_mapping.nbytes, tokens * (rank + dims) * pages.keys[layer].element_size()
    return Cost(tokens * (4 * rank + 3 * dims), read, product.nbytes + stored, weights=weight.nbytes)


@operation(_cost, operands=LatentWriteCall, mutates=("pages",))
def latent_write(call: LatentWriteCall) -> Tensor:
    """Normalize the latent of each token, rotate the part of its key that has a position, and write both into a page.

    Returns the rows, like `product`.
    """
    return _written(call, rms_norm.reference)


def _written(call: LatentWriteCall, norm: Callable[..., Tensor]) -> Tensor:
    product, weight, eps, cos, sin, pages, layer, paired = call
    rank = weight.shape[0]
    latent, key = norm(product[:, :rank], weight, eps), turned(product[:, None, rank:], cos, sin, paired)[:, 0]
    row = torch.cat((latent, key), -1)
    if pages is None:
        return row
    index, kept = pages.index, row
    if index is None:
        held = pages.slot_mapping >= 0
        index, kept = pages.slot_mapping[held].long(), row[held]
    pool = pages.keys[layer]
    pool.flatten(0, 1).index_copy_(0, index, kept[:, None].to(pool.dtype))
    return row


def _without_pages(call: LatentWriteCall) -> bool:
    return call.pages is None


_norm = rms_norm.bind("cpu", deterministic=True).candidates[0].run
latent_write.implement("index_copy", "cpu", invariant=True)(partial(_written, norm=_norm))


# What stands in a step's buffer begins at any address.
@partial(jit, unspecialized=("slots",))
def latent_write_kernel(
    product,
    weight,
    cos,
    sin,
    result,
    rows,
    slots,
    rank,
    half,
    product_stride,
    eps,
    PAIRED: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
):
    """A program a token."""
    token = tl.program_id(0).to(tl.int64)
    width = rank + 2 * half
    column = tl.arange(0, RANK)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    product += token * product_stride
    values = tl.load(product + column, mask=column < rank, other=0.0)
    factor = tl.load(weight + column, mask=column < rank, other=0.0)
    latent = scaled(values, inverse_rms(values, rank, eps), factor)
    angle = token * (2 * half) + half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0)
    first, second = rotated_pairs(product + rank, c, s, pair, half, pair < half, PAIRED)
    first, second = first.to(values.dtype), second.to(values.dtype)
    result += token * width
    tl.store(result + column, latent, mask=column < rank)
    tl.store(result + rank + pair, first, mask=pair < half)
    tl.store(result + rank + half + pair, second, mask=pair < half)
    if rows is not None:
        slot = tl.load(slots + token).to(tl.int64)
        rows += slot * width
        tl.store(rows + column, latent, mask=(column < rank) & (slot >= 0))
        tl.store(rows + rank + pair, first, mask=(pair < half) & (slot >= 0))
        tl.store(rows + rank + half + pair, second, mask=(pair < half) & (slot >= 0))


_WARPS = 4


def _triton(call: LatentWriteCall) -> Tensor:
    product, weight, eps, cos, sin, pages, layer, paired = call
    result = torch.empty(product.shape, dtype=product.dtype, device=product.device)
    rank, half = weight.shape[0], cos.shape[-1] // 2
    if result.numel():
        latent_write_kernel[(product.shape[0],)](
            *(product, weight, cos, sin, result),
            *((None, None) if pages is None else (pages.keys[layer], pages.slot_mapping)),
            *(rank, half, product.stride(0), eps),
            PAIRED=paired,
            RANK=next_power_of_2(rank),
            HALF=next_power_of_2(half),
            num_warps=_WARPS,
        )
    return result


def _fits(call: LatentWriteCall) -> bool:
    product, pages, layer = call.product, call.pages, call.layer
    return (
        product.dtype != torch.float64
        and product.stride(-1) == 1
        and (pages is None or (pages.keys[layer].dtype == product.dtype and pages.keys[layer].is_contiguous()))
    )


latent_write.in_triton(_triton, invariant=True, supports=_fits, kernels=(latent_write_kernel,))
latent_write.by_definition("cpu", "cuda", differentiable=True, supports=_without_pages)
