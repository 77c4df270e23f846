"""What `gemv_kernel` does with one row and a weight in int4: integers times integers, on the CUDA cores.

32 columns of x become integers of 16 bits, by one power of two: each is kept to 2^-15 of the largest of them. So a sum
errs by no more than 2^-15 of what it were if all 32 magnitudes were the largest and nothing cancelled, beside what
float32 loses. One x far beyond its neighbours takes their bits: beside 10,000, those to 0.25 become 0. Halves of bytes
are four bytes after one or two instructions, and `dp4a` multiplies these by the high or by the low bytes of x; sums of
32 columns are exact, and below 2^24. So a weight takes some 1.3 instructions, where one that becomes a float takes 2 to
4, and all that a program reads is under way, in registers, before its turn has come.
"""

from __future__ import annotations

from strata.kernels.quant.dequantize import wide_scale
from strata.kernels.triton_import import constant, jit, tl

# Columns that a thread takes together, 16 bytes of the weight.
CHUNK = 32


def _as_bytes(first: int, high: int, low: int) -> str:
    """PTX: every other of eight floats, from operand `first` on, times operand 13, as integers of 16 bits, whose bytes
    become operands `high` and `low`. 0f4B400000 is 1.5 * 2^23, beside which a float has the bits of an integer."""
    integers = "".join(
        f"fma.rn.f32 t, ${first + 2 * place}, $13, 0f4B400000;\nmov.b32 {name}, t;\n"
        for place, name in enumerate("abcd")
    )
    return f"""{integers}prmt.b32 ab, a, b, 0x5410;
prmt.b32 cd, c, d, 0x5410;
prmt.b32 ${low}, ab, cd, 0x6420;
prmt.b32 ${high}, ab, cd, 0x7531;
"""


# Eight floats (operands 5 to 12) times a power of two, as integers: the high bytes (signed) of those with even and with
# odd numbers, their low bytes (unsigned), and the sum of all.
INTEGERS_ASSEMBLY = constant(f"""{{
.reg .f32 t;
.reg .b32 a, b, c, d, ab, cd, high, low;
{_as_bytes(5, 0, 2)}{_as_bytes(6, 1, 3)}dp4a.s32.u32 high, $0, 0x01010101, 0;
dp4a.s32.u32 high, $1, 0x01010101, high;
dp4a.u32.u32 low, $2, 0x01010101, 0;
dp4a.u32.u32 low, $3, 0x01010101, low;
mad.lo.s32 $4, high, 256, low;
}}""")
# Eight codes of a word times what `INTEGERS_ASSEMBLY` made of their columns, and what came before.
DOT_ASSEMBLY = constant("""{
.reg .b32 even, odd, high, low;
and.b32 even, $1, 0x0f0f0f0f;
shr.u32 odd, $1, 4;
and.b32 odd, odd, 0x0f0f0f0f;
dp4a.u32.s32 high, even, $2, 0;
dp4a.u32.s32 high, odd, $3, high;
dp4a.u32.u32 low, even, $4, $6;
dp4a.u32.u32 low, odd, $5, low;
mad.lo.s32 $0, high, 256, low;
}""")


def in_chunks(width: int, group: int) -> bool:
    """Whether a row of so many columns, of which a group shares a scale (0: all), is one of whole chunks."""
    return width % CHUNK == group % CHUNK == 0


@jit
def _eight(columns):
    """columns [chunks, 8] one by one, each [chunks]."""
    even, odd = tl.split(tl.reshape(columns, (columns.shape[0], 2, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    zero, four = tl.split(first)
    two, six = tl.split(third)
    one, five = tl.split(second)
    three, seven = tl.split(fourth)
    return zero, one, two, three, four, five, six, seven


@jit
def _four(words):
    """words [rows, chunks, 4] one by one, each [rows, chunks]."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1], 2, 2)))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@jit
def _largest(columns):
    """The bits of the largest magnitude of columns [chunks, 8] float32, a NaN being the largest: int32 [chunks]."""
    return tl.max(columns.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@jit
def _integers(columns, factor):
    """Columns [chunks, 8] float32 times factor [chunks] as bytes, and their sum: each int32 [chunks]."""
    a, b, c, d, e, f, g, h = _eight(columns)
    return tl.inline_asm_elementwise(
        INTEGERS_ASSEMBLY,
        "=r,=r,=r,=r,=r,f,f,f,f,f,f,f,f,f",
        [a, b, c, d, e, f, g, h, factor],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@jit
def _add_dot(total, words, integers):
    """total [rows, chunks] int32 plus the products of eight codes in words [rows, chunks] and of their columns."""
    high_even, high_odd, low_even, low_odd, _ = integers
    return tl.inline_asm_elementwise(
        DOT_ASSEMBLY,
        "=r,r,r,r,r,r,r",
        [words, high_even[None, :], high_odd[None, :], low_even[None, :], low_odd[None, :], total],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def _dots(x, words, zero, scale, held, CENTERED: tl.constexpr):
    """Sums [rows] float32 of words [rows, chunks, 4] times x, pointers to the first column of each chunk; zero, scale:
    of each chunk of each row. All are NaN where x has a NaN or an infinity."""
    start = x[:, None] + tl.arange(0, 8)[None, :]
    first = tl.load(start, mask=held[:, None], other=0.0).to(tl.float32)
    second = tl.load(start + 8, mask=held[:, None], other=0.0).to(tl.float32)
    third = tl.load(start + 16, mask=held[:, None], other=0.0).to(tl.float32)
    fourth = tl.load(start + 24, mask=held[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.maximum(_largest(first), _largest(second)), tl.maximum(_largest(third), _largest(fourth)))
    # The largest is then from 2^14 to just below 2^15, of one under 2^-112 less: `back` has to have an exponent.
    exponent = tl.maximum(largest >> 23, 15)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    back = tl.where(largest >= 0x7F800000, float("nan"), back)
    one, two, three, four = _four(words)
    of_first, of_second = _integers(first, factor), _integers(second, factor)
    of_third, of_fourth = _integers(third, factor), _integers(fourth, factor)
    total = tl.zeros((words.shape[0], words.shape[1]), tl.int32)
    total = _add_dot(_add_dot(total, one, of_first), two, of_second)
    total = _add_dot(_add_dot(total, three, of_third), four, of_fourth)
    sums = (of_first[4] + of_second[4] + of_third[4] + of_fourth[4])[None, :]
    exact = (total - 8 * sums).to(tl.float32) if CENTERED else total.to(tl.float32) - zero * sums.to(tl.float32)
    return tl.sum(exact * (scale * back[None, :]), 1)


@jit
def _plain_dots(x, words, zero, scale, held):
    """The same in floats, which Triton's interpreter knows."""
    one, two, three, four = _four(words)
    total = tl.zeros((words.shape[0], words.shape[1]), tl.float32)
    for place in tl.static_range(8):
        code = 4 * place
        total += ((one >> code & 15) - zero) * tl.load(x + place, mask=held, other=0.0)[None, :]
        total += ((two >> code & 15) - zero) * tl.load(x + 8 + place, mask=held, other=0.0)[None, :]
        total += ((three >> code & 15) - zero) * tl.load(x + 16 + place, mask=held, other=0.0)[None, :]
        total += ((four >> code & 15) - zero) * tl.load(x + 24 + place, mask=held, other=0.0)[None, :]
    return tl.sum(total * scale, 1)


@jit
def load_chunks(
    weight,
    scales,
    zeros,
    sizes,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """All that `dot_chunks` reads of rows of a weight: chunks [chunks], which are held, words [rows, chunks, 4], and of
    each chunk of each row its scale and zero. GROUP: columns that share a scale, a multiple of 32; 0: all."""
    weight_row, weight_stride, scale_stride, width = sizes
    chunk = tl.arange(0, BLOCK_K // 32)
    held = chunk < width // 32
    start = (weight + weight_row.to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int32))
    word = tl.arange(0, BLOCK_K // 8)[None, :]
    words = tl.load(start[:, None] + word, mask=word < width // 8, other=0, eviction_policy="evict_first")
    words = tl.reshape(words, (BLOCK_N, BLOCK_K // 32, 4))
    group = (weight_row // ROW_GROUP if ROW_GROUP > 0 else weight_row * 0).to(tl.int64)[:, None] * scale_stride
    group += (chunk // (GROUP // 32) if GROUP > 0 else chunk * 0)[None, :]
    scale = wide_scale(tl.load(scales + group, mask=held[None, :], other=0.0))
    zero = 8.0
    if zeros is not None:
        zero = tl.load(zeros + group, mask=held[None, :], other=0.0).to(tl.float32)
    return chunk, held, words, scale, zero


@jit
def dot_chunks(x, chunks, row_scales, CENTERED: tl.constexpr):
    """Sums [rows, 1] float32 of a row x times what `load_chunks` has loaded."""
    chunk, held, words, scale, zero = chunks
    if x.dtype.element_ty == tl.float32:
        total = _plain_dots(x + chunk * 32, words, zero, scale, held)
    else:
        total = _dots(x + chunk * 32, words, zero, scale, held, CENTERED)
    if row_scales is not None:
        total *= row_scales
    return total[:, None]
