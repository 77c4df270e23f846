"""Packed values become floats: inside Triton kernels, several in a few instructions, and whole weights in memory.

In bfloat16 the bits of an integer are put beside those of a power of two, and that number is subtracted, which is
exact; converting integers as such has a quarter of the throughput of other instructions on Hopper. Four-bit floats are
put where bfloat16 has exponents and multiplied by the difference of the biases. Eight-bit floats the hardware converts.
Other types (float16; float32, which Triton's interpreter knows) have the arithmetic spelled out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.quant.quantized import TWO_OF_FOUR, QuantizedWeight, dense
from strata.kernels.triton_import import HAS_TRITON, constant, jit, tl

# The first with a type for e4m3.
E4M3_CAPABILITY = (8, 9)


# Four bytes a turn, spread over the halves of two registers. 0x4300 is 128 in bfloat16, 0xc300 -128, 0xc308 -136,
# 0x3f80 1 and 0x7e80 2^126; lop3 with 0xea is (a & b) | c.
INT8_ASSEMBLY = constant("""{
.reg .b32 a, b, c, d, one;
mov.b32 one, 0x3f803f80;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 c, a, 0x00800080, 0xc300c300, 0xea;
lop3.b32 d, b, 0x00800080, 0xc300c300, 0xea;
lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, b, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, a, one, c;
fma.rn.bf16x2 $1, b, one, d;
}""")
# The same of float32: a byte, 128 more than it stands for, at the end of 2^23 (0x4b000000).
WIDE_INT8_ASSEMBLY = constant("""{
.reg .b32 a, b, base;
mov.b32 base, 0x4b000000;
xor.b32 a, $4, 0x80808080;
prmt.b32 b, a, base, 0x7440;
add.rn.f32 $0, b, 0fcb000080;
prmt.b32 b, a, base, 0x7441;
add.rn.f32 $1, b, 0fcb000080;
prmt.b32 b, a, base, 0x7442;
add.rn.f32 $2, b, 0fcb000080;
prmt.b32 b, a, base, 0x7443;
add.rn.f32 $3, b, 0fcb000080;
}""")
_INT4 = """{{
.reg .b32 a, b, c, d, one, base;
mov.b32 one, 0x3f803f80;
mov.b32 base, {base};
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, a, one, base;
fma.rn.bf16x2 $1, b, one, base;
fma.rn.bf16x2 $2, c, one, base;
fma.rn.bf16x2 $3, d, one, base;
}}"""
# Of codes from 0 to 15, and those less 8.
UINT4_ASSEMBLY = constant(_INT4.format(base="0xc300c300"))
INT4_ASSEMBLY = constant(_INT4.format(base="0xc308c308"))
_E2M1 = """{
.reg .b32 a, b, c, d, s, factor, none;
mov.b32 factor, 0x7e807e80;
mov.b32 none, 0x80008000;
prmt.b32 a, $4, 0, 0x1404;
prmt.b32 b, $4, 0, 0x3424;
shl.b32 c, a, 4;
shl.b32 d, b, 4;
and.b32 s, a, 0x80008000;
shr.b32 a, a, 6;
lop3.b32 a, a, 0x01c001c0, s, 0xea;
and.b32 s, b, 0x80008000;
shr.b32 b, b, 6;
lop3.b32 b, b, 0x01c001c0, s, 0xea;
and.b32 s, c, 0x80008000;
shr.b32 c, c, 6;
lop3.b32 c, c, 0x01c001c0, s, 0xea;
and.b32 s, d, 0x80008000;
shr.b32 d, d, 6;
lop3.b32 d, d, 0x01c001c0, s, 0xea;
fma.rn.bf16x2 $0, c, factor, none;
fma.rn.bf16x2 $1, d, factor, none;
fma.rn.bf16x2 $2, a, factor, none;
fma.rn.bf16x2 $3, b, factor, none;
}"""


def _scaled(text: str) -> str:
    """The same, each number times its scale: two operands more for the first pair of bytes, and two for the second."""
    for result, register, scale in (("$0", "c", "$5"), ("$1", "d", "$7"), ("$2", "a", "$5"), ("$3", "b", "$7")):
        ended = f"fma.rn.bf16x2 {result}, {register}, factor, none;"
        multiplied = f"fma.rn.bf16x2 {result}, {register}, {scale}, none;"
        text = text.replace(ended, f"fma.rn.bf16x2 {register}, {register}, factor, none;\n{multiplied}")
    return text


E2M1_ASSEMBLY, SCALED_E2M1_ASSEMBLY = constant(_E2M1), constant(_scaled(_E2M1))


@jit
def unpack_bytes(values, KIND: tl.constexpr, kind: tl.constexpr):
    """e4m3 or int8 values in the type `kind`, which holds each of them exactly."""
    if KIND == "int8" and kind == tl.bfloat16:
        return tl.inline_asm_elementwise(INT8_ASSEMBLY, "=r,=r,r", [values], tl.bfloat16, is_pure=True, pack=4)
    # Through float32: the direct way from an 8-bit float to bfloat16 converts one at a time.
    return values.to(tl.float32).to(kind)


@jit
def unpack_wide(values, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """e4m3 or int8 values in float32. ASSEMBLY: where there is some for it."""
    if KIND == "int8" and ASSEMBLY:
        return tl.inline_asm_elementwise(
            WIDE_INT8_ASSEMBLY, "=r,=r,=r,=r,r", [values], tl.float32, is_pure=True, pack=4
        )
    return values.to(tl.float32)


@jit
def unpack_halves(pairs, KIND: tl.constexpr, CENTERED: tl.constexpr, kind: tl.constexpr):
    """The low and the high halves of bytes in the type `kind`: e2m1, or int4 from 0 to 15, less 8 if CENTERED."""
    if kind == tl.bfloat16:
        if KIND == "e2m1":
            low, high = _assembled(pairs, E2M1_ASSEMBLY)
        elif CENTERED:
            low, high = _assembled(pairs, INT4_ASSEMBLY)
        else:
            low, high = _assembled(pairs, UINT4_ASSEMBLY)
    else:
        low = _plain(pairs & 15, KIND, CENTERED).to(kind)
        high = _plain(pairs >> 4, KIND, CENTERED).to(kind)
    return low, high


@jit
def _assembled(pairs, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@jit
def twice(scales):
    """Scales of four-bit floats, uint8 (E8M0) or e4m3, as bfloat16, of which an int32 holds the bits twice."""
    # Assembly for the constants: with these in sight, the compiler does not load scales where they are wanted.
    if scales.dtype == tl.uint8:
        found = tl.inline_asm_elementwise(
            "mul.lo.u32 $0, $1, 0x00800080;", "=r,r", [scales.to(tl.uint32)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        short = scales.to(tl.float32).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        found = tl.inline_asm_elementwise(
            "mul.lo.u32 $0, $1, 0x00010001;", "=r,r", [short], dtype=tl.int32, is_pure=True, pack=1
        )
    return found


@jit
def unpack_scaled(pairs, scales):
    """The low and the high halves of bytes of e2m1 times their scales, of which two neighbours share one.

    scales: for each byte, float32 or, for bfloat16, its bits in both halves of an int32; the results are of that type.
    """
    if scales.dtype == tl.int32:
        low, high = tl.inline_asm_elementwise(
            SCALED_E2M1_ASSEMBLY,
            "=r,=r,=r,=r,r,r,r,r,r",
            [pairs, scales],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = _plain(pairs & 15, "e2m1", False) * scales
        high = _plain(pairs >> 4, "e2m1", False) * scales
    return low, high


@jit
def _plain(codes, KIND: tl.constexpr, CENTERED: tl.constexpr):
    """Codes from 0 to 15 as the float32 that they stand for."""
    if KIND == "e2m1":
        doubled = (codes & 7).to(tl.float32)
        doubled = tl.where(doubled > 4, tl.where(doubled > 5, 4 * doubled - 16, 2 * doubled - 4), doubled)
        return tl.where(codes > 7, -0.5 * doubled, 0.5 * doubled)
    return codes.to(tl.float32) - (8.0 if CENTERED else 0.0)


@jit
def wide_scale(scales):
    """Scales as float32: of uint8, which is E8M0, 2^(s - 127) (0 for the least of them, 2^-127)."""
    if scales.dtype == tl.uint8:
        return (scales.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return scales.to(tl.float32)


@jit
def dequantize_kernel(
    values,
    scales,
    zeros,
    row_scales,
    result,
    out,
    width,
    value_stride,
    scale_stride,
    KIND: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [rows / BLOCK_N, columns / BLOCK_K]; all arithmetic in float32, rounded once."""
    HALVES: tl.constexpr = KIND == "int4" or KIND == "e2m1"
    PAIR: tl.constexpr = 2 if HALVES else 1
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.program_id(1) * (BLOCK_K // PAIR) + tl.arange(0, BLOCK_K // PAIR)
    held = (row < out)[:, None] & (place * PAIR < width)[None, :]
    packed = tl.load(values + row.to(tl.int64)[:, None] * value_stride + place[None, :], mask=held, other=0.0)
    group = (row // ROW_GROUP if ROW_GROUP > 0 else row * 0).to(tl.int64) * scale_stride
    low_group = group[:, None] + (place[None, :] * PAIR // GROUP if GROUP > 0 else place[None, :] * 0)
    scale = wide_scale(tl.load(scales + low_group, mask=held))
    if row_scales is not None:
        own = tl.load(row_scales + row, mask=row < out, other=0.0)[:, None]
        scale = scale * own
    if not HALVES:
        wide = unpack_bytes(packed, KIND, tl.float32)
        if zeros is not None:
            wide -= tl.load(zeros + low_group, mask=held).to(tl.float32)
        wide *= scale
    else:
        low, high = unpack_halves(packed, KIND, zeros is None, tl.float32)
        high_scale = scale
        if GROUP % 2 == 1:
            # Groups of an odd number of columns (ranks may cut them so) can end within a byte.
            high_group = group[:, None] + (place[None, :] * 2 + 1) // GROUP
            high_scale = wide_scale(tl.load(scales + high_group, mask=held))
            if row_scales is not None:
                high_scale = high_scale * own
        if zeros is not None:
            zero = tl.load(zeros + low_group, mask=held).to(tl.float32)
            low -= zero
            if GROUP % 2 == 1:
                zero = tl.load(zeros + high_group, mask=held).to(tl.float32)
            high -= zero
        wide = tl.reshape(tl.join(low * scale, high * high_scale), (BLOCK_N, BLOCK_K))
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    target = result + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, wide.to(result.dtype.element_ty), mask=(row < out)[:, None] & (column < width)[None, :])


_BLOCK_N, _BLOCK_K, _WARPS = 16, 256, 4


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """A packed weight [out, width] on a CUDA device as floats, rounded once to `dtype`: contiguous [out, width].

    The columns are in the weight's own order, see `QuantizedWeight.order`.
    """
    out, width = weight.shape
    result = torch.empty((out, width), dtype=dtype, device=weight.values.device)
    if result.numel():
        tensors = (weight.values, weight.scales, weight.zeros, weight.row_scales, result)
        sizes = (out, width, weight.values.stride(0), weight.scales.stride(0))
        group = weight.columns if weight.columns < width else 0
        known = {"KIND": weight.kind, "ROW_GROUP": weight.rows, "GROUP": group}
        grid = (ceil_div(out, _BLOCK_N), ceil_div(width, _BLOCK_K))
        dequantize_kernel[grid](*tensors, *sizes, **known, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, num_warps=_WARPS)
    return result


def can_dequantize(weight: QuantizedWeight) -> bool:
    """Whether the kernel can read a weight where it is."""
    values, scales, zeros, rows = weight.values, weight.scales, weight.zeros, weight.row_scales
    return (
        HAS_TRITON
        and weight.kind != TWO_OF_FOUR
        and weight.dim() == 2
        and values.stride(1) == scales.stride(1) == 1
        and (zeros is None or zeros.stride() == scales.stride())
        and (rows is None or rows.is_contiguous())
        and (weight.kind != "e4m3" or DeviceLimits.of(weight.device).capability >= E4M3_CAPABILITY)
    )


def floats(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """What a packed weight [..., out, width] stands for, on any device, rounded once to `dtype`."""
    has_whole_groups = weight.rows > 0 and weight.shape[-2] % weight.rows == 0
    stacked = {name: one if name == "order" else one.flatten(0, -2) for name, one in weight.tensors.items()}
    flat = weight.with_tensors(stacked)
    if not (weight.values.is_cuda and (weight.dim() == 2 or has_whole_groups) and can_dequantize(flat)):
        return dense(weight, dtype)
    placed = dequantize(flat, dtype).view(weight.shape)
    if weight.order is None:
        return placed
    # Column j of the values belongs to column order[j] of the weight.
    return torch.empty_like(placed).index_copy_(-1, weight.order.long(), placed)
