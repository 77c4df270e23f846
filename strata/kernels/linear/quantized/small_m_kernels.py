"""How the kernels of products with few rows read packed weights, and x beside these.

Rows of x are not rounded: a weight is converted in registers to x's type, in which its values are exact, and scales
multiply sums, those of groups of columns the sum over each group. Four-bit floats are multiplied by their scales
themselves: both have so few bits that bfloat16 holds the product.
"""

from __future__ import annotations

from strata.kernels.quant.dequantize import wide_scale
from strata.kernels.triton_import import jit, tl


@jit
def scale_of_rows(scales, row_scales, weight_row, scale_stride, ROW_GROUP: tl.constexpr, GROUP: tl.constexpr):
    """What the sums of rows of the weight [BLOCK_N] are multiplied by at their end, float32; or None."""
    scale = None
    if GROUP == 0:
        group = weight_row // ROW_GROUP if ROW_GROUP > 0 else weight_row * 0
        scale = wide_scale(tl.load(scales + group.to(tl.int64) * scale_stride))
    if row_scales is not None:
        own = tl.load(row_scales + weight_row)
        scale = own if GROUP > 0 else scale * own
    return scale


@jit
def scales_of_bytes(start, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, EACH: tl.constexpr, kind: tl.constexpr):
    """Scales of groups of EACH bytes from pointers start [BLOCK_N] on, for each of BYTES: [BLOCK_N, BYTES]."""
    groups: tl.constexpr = BYTES // EACH
    one = wide_scale(tl.load(start[:, None] + tl.arange(0, groups)[None, :])).to(kind)
    spread = tl.broadcast_to(one[:, :, None], (BLOCK_N, groups, EACH))
    return tl.reshape(spread, (BLOCK_N, BYTES))


@jit
def halves_of_x(tile, held, FULL: tl.constexpr, kind: tl.constexpr):
    """Elements of even and of odd columns, from pointers to pairs of them."""
    pair = tl.load(tile) if FULL else tl.load(tile, mask=held, other=0)
    if kind == tl.float32:
        even = (pair & 0xFFFFFFFF).to(tl.uint32).to(kind, bitcast=True)
        odd = (pair >> 32).to(tl.uint32).to(kind, bitcast=True)
    else:
        even = (pair & 0xFFFF).to(tl.uint16).to(kind, bitcast=True)
        odd = (pair >> 16).to(tl.uint16).to(kind, bitcast=True)
    return even, odd


@jit
def four_dots(a, b, c, d, tile, held, total, FULL: tl.constexpr, kind: tl.constexpr):
    """total plus the products of four columns of a weight and of x, from pointers to four 16-bit floats of x."""
    four = tl.load(tile) if FULL else tl.load(tile, mask=held, other=0)
    total = tl.dot(a, (four & 0xFFFF).to(tl.uint16).to(kind, bitcast=True), total)
    total = tl.dot(b, ((four >> 16) & 0xFFFF).to(tl.uint16).to(kind, bitcast=True), total)
    total = tl.dot(c, ((four >> 32) & 0xFFFF).to(tl.uint16).to(kind, bitcast=True), total)
    return tl.dot(d, (four >> 48).to(tl.uint16).to(kind, bitcast=True), total)
