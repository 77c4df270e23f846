"""The Triton kernel of products of one or two rows with weights of two integers a byte: values stream into registers.

`packed_gemv_kernel` for integers of four bits with scales of groups. A thread holds 16 bytes of each row of the weight,
32 columns of one group. An integer q becomes the float32 16 + q by putting its bits into the mantissa of 16, one
instruction each; the sum over a group has 16 and its zero taken off at once, by the sum over x.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.compile_case import CompileCase
from strata.kernels.linear.skinny_kernels import load_residual, load_squares, store_product, weight_rows
from strata.kernels.quant.dequantize import wide_scale
from strata.kernels.triton_import import HAS_TRITON, gdc_launch_dependents, gdc_wait, jit, tl

# Columns that a thread reads at once, all of which share a scale.
CHUNK = 32
_TEXT = """{
.reg .b32 low, high, base;
mov.b32 base, 0x41000000;
shl.b32 low, $8, 3;
shr.b32 high, $8, 1;
lop3.b32 low, low, 0x78787878, 0x80808080, 0xea;
lop3.b32 high, high, 0x78787878, 0x80808080, 0xea;
prmt.b32 $0, low, base, 0x7044;
prmt.b32 $1, low, base, 0x7144;
prmt.b32 $2, low, base, 0x7244;
prmt.b32 $3, low, base, 0x7344;
prmt.b32 $4, high, base, 0x7044;
prmt.b32 $5, high, base, 0x7144;
prmt.b32 $6, high, base, 0x7244;
prmt.b32 $7, high, base, 0x7344;
}"""
# Bytes a b c d become 16 and their low, then their high halves, as float32.
SIXTEEN_AND_HALVES = tl.constexpr(_TEXT) if HAS_TRITON else _TEXT


@jit
def _sixteen_and_halves(pairs, ASSEMBLY: tl.constexpr):
    """16 more than the low and the high halves of bytes, in float32. ASSEMBLY: where there is some for it."""
    if ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            SIXTEEN_AND_HALVES,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [pairs],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        low = (pairs & 15).to(tl.float32) + 16.0
        high = (pairs >> 4).to(tl.float32) + 16.0
    return low, high


@jit
def _wide_pairs(pairs, kind: tl.constexpr):
    """Elements of even and of odd columns as float32, from pairs of them in one word."""
    if kind == tl.bfloat16:
        even = (pairs << 16).to(tl.float32, bitcast=True)
        odd = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    elif kind == tl.float16:
        even = (pairs & 0xFFFF).to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
        odd = (pairs >> 16).to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
    else:
        even = (pairs & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        odd = (pairs >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return even, odd


@jit
def _add_rows(total, pairs, scale, offset, x_pairs, held, rows, x_stride, kind: tl.constexpr, ROWS: tl.constexpr):
    """total [columns, ROWS] plus the sums of a block of the weight times each row of x.

    pairs [columns, chunks, 16]; scale [columns, chunks, 1]; offset: what the values are less than the integers, as
    scale or a number; x_pairs [1, chunks, 16]: pointers to the first row's; held: whether they are inside of the row.
    """
    low, high = _sixteen_and_halves(pairs, kind == tl.bfloat16)
    row = tl.arange(0, ROWS)[None, :]
    for index in tl.static_range(ROWS):
        place = x_pairs + tl.minimum(index, rows - 1) * (x_stride // 2)
        even, odd = _wide_pairs(tl.load(place, mask=held, other=0), kind)
        sums = tl.sum(low * even + high * odd, 2, keep_dims=True) - (16.0 + offset) * tl.sum(
            even + odd, 2, keep_dims=True
        )
        total = tl.where(row == index, total + tl.sum(tl.sum(sums * scale, 2), 1)[:, None], total)
    return total


@partial(jit, unspecialized=("rows",))
def halves_gemv_kernel(
    x,
    values,
    scales,
    zeros,
    row_scales,
    bias,
    row_squares,
    residual,
    norm_weight,
    result,
    weighted,
    squares,
    rows,
    out,
    width,
    x_stride,
    value_stride,
    scale_stride,
    residual_stride,
    blocks,
    eps,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Programs [tiles of columns], as in `gemv_kernel`. GROUP: columns that share a scale, a multiple of 32, or 0: all.

    zeros: of the integers, as the scales lie; None: 8 for all.
    """
    kind: tl.constexpr = x.dtype.element_ty
    CHUNKS: tl.constexpr = BLOCK_K // 32
    weight_row, column = weight_rows(tl.program_id(0), out, BLOCK_N, GATED)
    row = tl.arange(0, ROWS)
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    byte = chunk * 16 + tl.arange(0, 16)[None, None, :]
    held = byte < width // 2
    held_chunk = chunk * 32 < width
    tile = values + weight_row.to(tl.int64)[:, None, None] * value_stride + byte
    group_row = (weight_row // ROW_GROUP if ROW_GROUP > 0 else weight_row * 0).to(tl.int64)[:, None, None]
    group = group_row * scale_stride + (chunk * 32 // GROUP if GROUP > 0 else chunk * 0)
    STEP: tl.constexpr = BLOCK_K // GROUP if GROUP > 0 else 0
    if ONCE:
        pairs = tl.load(tile, mask=held, other=0, eviction_policy="evict_first")
        scale = wide_scale(tl.load(scales + group, mask=held_chunk, other=0))
    else:
        pairs = tl.load(tile, eviction_policy="evict_first")
        scale = wide_scale(tl.load(scales + group))
    offset = 8.0
    if zeros is not None:
        offset = tl.load(zeros + group, mask=held_chunk, other=0).to(tl.float32)
    own = None
    if row_scales is not None:
        own = tl.load(row_scales + weight_row)
    if bias is not None:
        bias = tl.load(bias + weight_row)
    if norm_weight is not None:
        norm_weight = tl.load(norm_weight + column, mask=column < out, other=0.0)
    if EARLY:
        # What precedes the wait may read what the step does not write: the model's parameters.
        gdc_wait()
        gdc_launch_dependents()
    if row_squares is not None:
        row_squares = load_squares(row_squares, row, rows, blocks, BLOCKS)
    if residual is not None:
        residual = load_residual(residual, residual_stride, row, column, rows, out)
    x_pairs = x.to(tl.pointer_type(tl.uint64 if kind == tl.float32 else tl.uint32)) + byte
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    if not ONCE:
        for start in range(BLOCK_K, width, BLOCK_K):
            # Asked for before the products of the tile before it are made.
            group += STEP
            following = tl.load(tile + start // 2, eviction_policy="evict_first")
            following_scale = wide_scale(tl.load(scales + group))
            following_offset = offset
            if zeros is not None:
                following_offset = tl.load(zeros + group).to(tl.float32)
            total = _add_rows(total, pairs, scale, offset, x_pairs, held, rows, x_stride, kind, ROWS)
            pairs = following
            scale = following_scale
            offset = following_offset
            x_pairs += BLOCK_K // 2
    total = _add_rows(total, pairs, scale, offset, x_pairs, held, rows, x_stride, kind, ROWS)
    if own is not None:
        total *= own[:, None]
    store_product(
        total,
        bias,
        row_squares,
        width,
        eps,
        residual,
        norm_weight,
        result,
        weighted,
        squares,
        row,
        column,
        rows,
        out,
        GATED,
    )


def compile_cases() -> list[CompileCase]:
    signature = dict.fromkeys(("x", "result"), "*bf16:16") | {"values": "*u8:16", "scales": "*fp32:16", "rows": "i32"}
    signature |= dict.fromkeys(("out", "width", "x_stride", "value_stride"), "i32:16") | {"scale_stride": "i32"}
    absent = "zeros row_scales bias row_squares residual norm_weight weighted squares residual_stride blocks eps"
    constants: dict[str, object] = dict.fromkeys(absent.split()) | {"ROW_GROUP": 1, "GROUP": 128, "BLOCKS": 1}
    constants |= {"GATED": True, "EARLY": True, "BLOCK_N": 4, "BLOCK_K": 4096, "ROWS": 1, "ONCE": True}
    loads = ("ld.global.L1::evict_first", "v4.b32", "prmt.b32")
    return [CompileCase("packed gemv int4", halves_gemv_kernel, signature, constants, 4, 2, loads)]
