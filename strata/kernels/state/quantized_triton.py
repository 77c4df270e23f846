"""What Triton kernels do with rows in 8 bits: rounding them, widening them, and writing them into pages.

The arithmetic is that of `quantized_rows`, bit for bit: all of it is exact but the one rounding of a value.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.quantized_rows import LARGEST
from strata.kernels.triton_import import jit, tl


@jit
def powers_of(exponents):
    """What E8M0 exponents stand for, in float32; 255 for NaN."""
    wide = exponents.to(tl.int32)
    return tl.where(wide == 255, float("nan"), (wide << 23).to(tl.float32, bitcast=True))


@jit
def exponent_at(slots, kv_head, kv_heads, PAGE_SIZE: tl.constexpr):
    """Where the exponents of a head's rows at `slots` lie: [pages, kv_heads, PAGE_SIZE]."""
    return (slots // PAGE_SIZE * kv_heads + kv_head) * PAGE_SIZE + slots % PAGE_SIZE


@jit
def round_rows(rows, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, IS_INTEGER: tl.constexpr):
    """Rows [ROWS, WIDTH] float32, zeros past their ends -> values that the type has, in float32, and exponents int32
    [ROWS]. A row of which not all is finite has the exponent 255.

    Floats are rounded by their bits: registers that were converted to 8 bits and back held other values on an H200
    (Triton 3.6), where a store of the same registers was right.
    """
    finite = tl.abs(rows) < float("inf")
    numbers = tl.where(finite, rows, 0.0)
    bits = tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True)
    exponents = (bits >> 23) - EXPONENT + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    exponents = tl.minimum(tl.maximum(exponents, 1), 253)
    scaled = numbers * ((254 - exponents) << 23).to(tl.float32, bitcast=True)[:, None]
    if IS_INTEGER:
        # To the nearest, ties to even: there float32 has integers alone.
        scaled = (scaled + 12582912.0) - 12582912.0
        scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
    else:
        # To the nearest with three bits after the first, ties to even; below 2^-6, where e4m3 has no first bit, to the
        # nearest multiple of 2^-9, which 1.5 * 2^14 has no bits below. Zeros keep the sign.
        bits = scaled.to(tl.int32, bitcast=True)
        kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = ((tl.abs(scaled) + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | (bits & -0x80000000)
        scaled = tl.where(tl.abs(scaled) < 0.015625, small, kept).to(tl.float32, bitcast=True)
    return scaled, tl.where(tl.min(finite.to(tl.int32), 1) == 1, exponents, 255)


# What stands in a step's buffer begins at any address.
@partial(jit, unspecialized=("slots",))
def quantized_write_kernel(
    k,
    v,
    keys,
    values,
    key_exponents,
    value_exponents,
    slots,
    held,
    k_token,
    k_head,
    v_token,
    v_head,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Programs [tokens, blocks of heads, 2]: ROWS heads of a token's key, or of its value.

    held: [2, tokens, kv_heads, HEAD_DIM], what the pages hold of keys and of values, also of what no page takes.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_value = tl.program_id(2)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head < kv_heads)[:, None] & (column < HEAD_DIM)
    held += is_value.to(tl.int64) * tl.num_programs(0) * kv_heads * HEAD_DIM
    pool = keys
    powers = key_exponents
    source = k + token * k_token + head[:, None] * k_head + column
    if is_value == 1:
        pool = values
        powers = value_exponents
        source = v + token * v_token + head[:, None] * v_head + column
    rows = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    rounded, exponents = round_rows(rows, EXPONENT, MANTISSA, IS_INTEGER)
    packed = rounded.to(pool.dtype.element_ty)
    slot = tl.load(slots + token).to(tl.int64)
    there = inside & (slot >= 0)
    place = head[:, None] * HEAD_DIM + column
    tl.store(pool + slot * kv_heads * HEAD_DIM + place, packed, mask=there)
    at = exponent_at(slot, head, kv_heads, PAGE_SIZE)
    tl.store(powers + at, exponents.to(tl.uint8), mask=(head < kv_heads) & (slot >= 0))
    wide = packed.to(tl.float32) * powers_of(exponents)[:, None]
    tl.store(held + token * kv_heads * HEAD_DIM + place, wide.to(held.dtype.element_ty), mask=inside)


_TILE_ELEMENTS = 1024
_WARPS = 4


def rounding_constants(dtype: torch.dtype) -> dict[str, int | bool]:
    """What kernels that round to a type of `LARGEST` are compiled for."""
    exponent, mantissa = LARGEST[dtype]
    return {"EXPONENT": exponent, "MANTISSA": mantissa, "IS_INTEGER": not dtype.is_floating_point}


def write_quantized(k: Tensor, v: Tensor, pages: PagedKV, layer: int) -> tuple[Tensor, Tensor]:
    """`kv_write` into pools in 8 bits: one launch."""
    tokens, heads, head_dim = k.shape
    held = torch.empty((2, tokens, heads, head_dim), dtype=k.dtype, device=k.device)
    if tokens:
        width = next_power_of_2(head_dim)
        rows = min(next_power_of_2(heads), max(1, _TILE_ELEMENTS // width))
        quantized_write_kernel[(tokens, -(-heads // rows), 2)](
            *(k, v, pages.keys[layer], pages.values[layer], *pages.exponents(layer), pages.slot_mapping, held),
            *(*k.stride()[:2], *v.stride()[:2], heads),
            HEAD_DIM=head_dim,
            PAGE_SIZE=pages.page_size,
            **rounding_constants(pages.keys[layer].dtype),
            ROWS=rows,
            WIDTH=width,
            num_warps=_WARPS,
        )
    return held[0], held[1]
