"""Blocks of keys and values in 8 bits in the decode kernel, multiplied in float16 by tensor cores.

float16 holds every value of e4m3 and of int8, and an instruction makes two of it, where two of bfloat16 take four: with
twice as many keys a second, a decode is limited by its instructions. What reaches further than float16 is brought into
its range by powers of two, queries by one for each row, weights by one for each block. A thread's part of the values
is loaded four columns a word, so that results are those of every fourth column.
"""

from __future__ import annotations

from strata.kernels.state.quantized_triton import powers_of
from strata.kernels.triton_import import constant, jit, tl

# Byte `place` of two words side by side as numbers in float16. An int8 is put, 128 more than it is, at the end of 1024
# (0x6400), and 1152 (0xe480 is -1152) are taken off; lop3 with 0x6a is (a & b) ^ c.
_E4M3_PAIR = """{{
.reg .b32 t;
.reg .b16 pair, none;
prmt.b32 t, $1, $2, 0x{after}{place};
mov.b32 {{pair, none}}, t;
cvt.rn.f16x2.e4m3x2 $0, pair;
}}"""
_INT8_PAIR = """{{
.reg .b32 t, less;
mov.b32 less, 0xe480e480;
prmt.b32 t, $1, $2, 0x0{after}0{place};
lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6a;
add.rn.f16x2 $0, t, less;
}}"""
_E4M3_0, _E4M3_1, _E4M3_2, _E4M3_3 = (constant(_E4M3_PAIR.format(place=n, after=n + 4)) for n in range(4))
_INT8_0, _INT8_1, _INT8_2, _INT8_3 = (constant(_INT8_PAIR.format(place=n, after=n + 4)) for n in range(4))
_INT8_HALVES = constant("""{
.reg .b32 a, b, less;
mov.b32 less, 0xe480e480;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 a, a, 0x00ff00ff, 0x64806480, 0x6a;
lop3.b32 b, b, 0x00ff00ff, 0x64806480, 0x6a;
add.rn.f16x2 $0, a, less;
add.rn.f16x2 $1, b, less;
}""")


@jit
def in_range(rows):
    """Rows [ROWS, WIDTH] of bfloat16 in float16, the largest of each just below its end, and by what each is to be
    multiplied to be what it was, float32 [ROWS]."""
    wide = rows.to(tl.float32)
    exponents = tl.maximum(tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23, 15)
    factors = ((268 - exponents) << 23).to(tl.float32, bitcast=True)
    return (wide * factors[:, None]).to(tl.float16), ((exponents - 14) << 23).to(tl.float32, bitcast=True)


@jit
def load_quantized(keys, words, slots, kv_heads, HEAD_DIM: tl.constexpr):
    """Keys [BLOCK_N, HEAD_DIM] in 8 bits, and values [BLOCK_N, HEAD_DIM / 4] as words of four columns, of one head of
    the tokens at slots [BLOCK_N] int32. keys, words: pointers to what the first slot has of that head."""
    slots = slots.to(tl.int64)[:, None]
    block_keys = tl.load(keys + slots * (kv_heads * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :])
    return block_keys, tl.load(words + slots * (kv_heads * (HEAD_DIM // 4)) + tl.arange(0, HEAD_DIM // 4)[None, :])


@jit
def _quarter(weights, words, total, shrink, PAIR: tl.constexpr):
    """total times shrink, plus weights [rows, BLOCK_N] times a byte of each word."""
    values = tl.inline_asm_elementwise(PAIR, "=r,r,r", [words], tl.float16, is_pure=True, pack=2)
    return tl.dot(weights, values, total * shrink)


@jit
def attend_quantized(
    queries,
    back,
    maximum,
    weight,
    unit,
    result,
    block_keys,
    block_words,
    key_exponents,
    value_exponents,
    start,
    end,
    lowest,
    scale,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """As `_attend` of the decode kernel: a block of keys joins the running softmax.

    queries [rows, HEAD_DIM] float16, back [rows]: from `in_range`. block_keys, block_words: from `load_quantized`;
    key_exponents, value_exponents: uint8 [BLOCK_N], of their rows. result: four of [rows, HEAD_DIM / 4] float32, of
    every fourth column from the first, second, third and fourth on, times 2^15 and less the power of two that the
    exponent `unit` stands for, the largest of values so far.
    """
    position = start + tl.arange(0, BLOCK_N)
    visible = position < end
    if WINDOW > 0:
        visible = visible & (position >= lowest)
    if IS_INTEGER:
        keys = tl.inline_asm_elementwise(_INT8_HALVES, "=r,=r,r", [block_keys], tl.float16, is_pure=True, pack=4)
    else:
        keys = block_keys.to(tl.float16)
    scores = tl.dot(queries, tl.trans(keys)) * (back * scale)[:, None] * powers_of(key_exponents)[None, :]
    scores = tl.where(visible[None, :], scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - largest[:, None])
    shrink = tl.exp2(maximum - largest)
    weight = weight * shrink + tl.sum(weights, 1)
    # By 2^15 more, float16 has room for small weights.
    exponents = tl.where(visible, value_exponents.to(tl.int32), 0)
    highest = tl.maximum(unit, tl.max(exponents, 0))
    powers = _power(exponents - highest + 142)
    powers = tl.where(exponents == 255, float("nan"), powers)
    shares = (weights * powers[None, :]).to(tl.float16)
    kept = (shrink * _power(unit - highest + 127))[:, None]
    first, second, third, fourth = result
    if IS_INTEGER:
        first = _quarter(shares, block_words, first, kept, _INT8_0)
        second = _quarter(shares, block_words, second, kept, _INT8_1)
        third = _quarter(shares, block_words, third, kept, _INT8_2)
        fourth = _quarter(shares, block_words, fourth, kept, _INT8_3)
    else:
        first = _quarter(shares, block_words, first, kept, _E4M3_0)
        second = _quarter(shares, block_words, second, kept, _E4M3_1)
        third = _quarter(shares, block_words, third, kept, _E4M3_2)
        fourth = _quarter(shares, block_words, fourth, kept, _E4M3_3)
    return largest, weight, highest, (first, second, third, fourth)


@jit
def _power(exponent):
    """2^(exponent - 127), 0 if the exponent is not positive."""
    return (tl.maximum(exponent, 0) << 23).to(tl.float32, bitcast=True)


@jit
def joined_columns(result, unit, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """What `attend_quantized` made, [ROWS, HEAD_DIM]."""
    first, second, third, fourth = result
    whole = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (ROWS, HEAD_DIM))
    return whole * (powers_of(unit) * 0.000030517578125)
