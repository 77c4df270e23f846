"""Four-bit integers in few instructions, inside Triton kernels: raised by 136, which the sums of a group are less of.

Four bits hold w + 8 of a weight w from -8 to 7. Put beside the bits of 128 in bfloat16 they stand for w + 136, exactly,
and sum(w x) = sum((w + 136) x) - 136 sum(x), of which tensor cores make the last sum for all rows of the weight at
once. Products are exact; both sums, float32, lose up to 2^-23 of 280 sum(|x|) together with each sixteen columns of a
group, which is a thousandth to a hundredth of what rounding the result to bfloat16 loses. x of 2^113 and more, in a
group of 128, may overflow.

Nor are columns put in their order: of eight neighbours in a register of the weight, those with even numbers come as
0, 4, 2, 6 and those with odd as 1, 5, 3, 7, and so do those of x. That takes operands of `mma.sync`, of which a thread
has four neighbouring bytes of the weight, and the pairs of x that belong to them. Source of the trick: Kim et al., "Who
Says Elephants Can't Run" (2022), for float16.
"""

from __future__ import annotations

from strata.kernels.triton_import import constant, jit, tl

# 0x4300 is 128 in bfloat16; lop3 with 0xea is (a & b) | c.
RAISED_INT4_ASSEMBLY = constant("""{
.reg .b32 a, b, c;
shr.b32 a, $4, 8;
shr.b32 b, $4, 4;
shr.b32 c, $4, 12;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
}""")
# Of four pairs of neighbours: those with even numbers, then the others.
RAISED_ORDER_ASSEMBLY = constant("""{
prmt.b32 $0, $4, $6, 0x5410;
prmt.b32 $1, $5, $7, 0x5410;
prmt.b32 $2, $4, $6, 0x7632;
prmt.b32 $3, $5, $7, 0x7632;
}""")
# -136 in bfloat16.
_OFFSET_ASSEMBLY = constant("mov.b32 $0, 0xc308c308; mov.b32 $1, 0xc308c308;")


@jit
def unpack_raised(pairs, kind: tl.constexpr):
    """The low and the high halves of bytes [rows, bytes], raised by 136; kind: bfloat16 or, in order, float32."""
    if kind == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            RAISED_INT4_ASSEMBLY, "=r,=r,=r,=r,r", [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = (pairs & 15).to(kind) + 128, (pairs >> 4).to(kind) + 128
    return low, high


@jit
def in_raised_order(pairs):
    """Pairs of bfloat16, uint32 [pairs, rows]: those with even and with odd numbers, as `unpack_raised` has columns."""
    even, odd = tl.inline_asm_elementwise(
        RAISED_ORDER_ASSEMBLY, "=r,=r,=r,=r,r,r,r,r", [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )
    return even, odd


@jit
def offsets_of(pairs, kind: tl.constexpr):
    """-136 for each of some bytes [rows, bytes], laid out as these are, which Triton's constants would not be.

    Products of x by it are the same for all rows of the weight, and ptxas leaves one for each warp.
    """
    if kind == tl.bfloat16:
        found = tl.inline_asm_elementwise(_OFFSET_ASSEMBLY, "=r,=r,r", [pairs], tl.bfloat16, is_pure=True, pack=4)
    else:
        found = tl.full(pairs.shape, -136.0, kind)
    return found


@jit
def load_scales(pointers, kind: tl.constexpr):
    """Parameters at pointers [rows], float32 or of 16 bits, by the threads that have sums of these rows.

    Other loads are divided among threads first, and pass through shared memory and a barrier to those that want them.
    """
    stored: tl.constexpr = pointers.dtype.element_ty
    if kind == tl.bfloat16 and stored == tl.float32:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], tl.float32, is_pure=True, pack=1
        )
    elif kind == tl.bfloat16 and (stored == tl.bfloat16 or stored == tl.float16):
        bits = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [pointers.to(tl.int64)], tl.int16, is_pure=True, pack=1
        )
        found = bits.to(stored, bitcast=True)
    else:
        found = tl.load(pointers)
    return found
