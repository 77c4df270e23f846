"""The Triton kernel of decoding: one query a sequence over its cached keys, in one launch with what stands around it.

The keys of a sequence are divided into splits that programs take side by side (Flash-Decoding, Dao et al. 2023); the
last of them to finish joins their results, or a kernel behind does (`decode_join.py`). The query heads that share a KV
head are rows of one tile.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.attention.decode_join import join_splits, key_splits
from strata.kernels.attention.decode_quantized import attend_quantized, in_range, joined_columns, load_quantized
from strata.kernels.attention.softmax_triton import join_sink
from strata.kernels.norm.norm import inverse_rms, scaled
from strata.kernels.state.quantized_triton import powers_of, round_rows
from strata.kernels.triton_import import gdc_launch_dependents, gdc_wait, jit, tl


@jit
def _slots(table, start, end, page_stride, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slots of the tokens at positions [start, start + BLOCK_N), int32, and where the exponents of their rows lie;
    past `end` the last one again."""
    position = tl.maximum(tl.minimum(start + tl.arange(0, BLOCK_N), end - 1), 0)
    page = tl.load(table + position // PAGE_SIZE)
    return page * PAGE_SIZE + position % PAGE_SIZE, page * page_stride + position % PAGE_SIZE


@jit
def _offsets(table, start, end, token_stride, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the tokens at positions [start, start + BLOCK_N) lie in the pools; past `end` the last one again."""
    position = tl.maximum(tl.minimum(start + tl.arange(0, BLOCK_N), end - 1), 0)
    page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
    return page * (PAGE_SIZE * token_stride) + position % PAGE_SIZE * token_stride


@jit
def _marks(table, start, end, page_stride, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """As `_offsets`, where the exponents of the rows lie."""
    position = tl.maximum(tl.minimum(start + tl.arange(0, BLOCK_N), end - 1), 0)
    page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
    return page * page_stride + position % PAGE_SIZE


@jit
def _widened(rows, exponents, kind: tl.constexpr):
    """Rows [rows, HEAD_PAD] in 8 bits as what they stand for, exactly."""
    return (rows.to(tl.float32) * powers_of(exponents)[:, None]).to(kind)


@jit
def _load_block(keys, values, offsets, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """The keys and the values of one head at `offsets` [BLOCK_N], each [BLOCK_N, HEAD_PAD]."""
    columns = tl.arange(0, HEAD_PAD)[None, :]
    elements = offsets[:, None] + columns
    if HEAD_PAD == HEAD_DIM:
        return tl.load(keys + elements), tl.load(values + elements)
    held = columns < HEAD_DIM
    return tl.load(keys + elements, mask=held, other=0.0), tl.load(values + elements, mask=held, other=0.0)


@jit
def _prefetch(pool, offsets, HEAD_PAD: tl.constexpr):
    """What lies at `offsets` of a pool, of two bytes an element, starts on its way into the L2 cache."""
    lines = pool + offsets[:, None] + tl.arange(0, (HEAD_PAD + 63) // 64)[None, :] * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@jit
def _rotate_heads(heads, partners, factor, partner_factor, cos, sin, eps, width, NORM: tl.constexpr):
    """Rows normalized and rotated as `qk_rope_kv_write` does it; partners: the elements half a head away."""
    if NORM:
        normalizer = inverse_rms(heads, width, eps)
        heads = scaled(heads, normalizer, factor)
        partners = scaled(partners, normalizer, partner_factor)
    # What `rotate` computes for either half: the sines carry the sign.
    return tl.fma(heads.to(tl.float32), cos, partners.to(tl.float32) * sin).to(heads.dtype)


@jit
def _attend(
    queries,
    maximum,
    weight,
    result,
    block_keys,
    block_values,
    start,
    end,
    lowest,
    scale,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A block of keys, from position `start` on, joins the running softmax of the queries, which see [lowest, end).

    queries [rows, HEAD_PAD]; maximum, weight [rows] and result [rows, HEAD_PAD] float32: the largest score so far (in
    powers of two), the sum of the weights, the weighted sum of the values. At least one key is visible.
    """
    position = start + tl.arange(0, BLOCK_N)
    visible = position < end
    if WINDOW > 0:
        visible = visible & (position >= lowest)
    scores = tl.dot(queries, tl.trans(block_keys), input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - largest[:, None])
    shrink = tl.exp2(maximum - largest)
    weight = weight * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(block_values.dtype), block_values, result * shrink[:, None], input_precision="ieee")
    return largest, weight, result


@partial(jit, unspecialized=("lengths", "slots", "tables", "table_stride", "min_keys", "rank"))
def decode_attention_kernel(
    product,
    keys,
    values,
    k_exponents,
    v_exponents,
    out,
    results,
    scales,
    counters,
    lengths,
    slots,
    tables,
    cos,
    sin,
    q_weight,
    k_weight,
    sinks,
    eps,
    scale,
    width,
    product_stride,
    table_stride,
    min_keys,
    sums,
    rank,
    EARLY: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    JOINED: tl.constexpr,
    EXPONENT: tl.constexpr = 0,
    MANTISSA: tl.constexpr = 0,
    IS_INTEGER: tl.constexpr = False,
    OF_HEADS: tl.constexpr = False,
    RANKS: tl.constexpr = 1,
):
    """Programs [kv_heads, sequences, splits]: the queries of a group over part of the keys of a sequence.

    Splits come last, so that those which short sequences do not use are behind the others and take no turns of theirs.

    Row s of `product` belongs to sequence s. With cos and sin it holds queries, keys and values side by side, and the
    program with the last position writes the new key and value; q_weight and k_weight may be None. Otherwise it holds
    queries, and the pages hold all keys. sinks: [heads] or None.
    EARLY: launched before the kernel ahead has ended, which may have written the product and no more.
    min_keys: of a split, a multiple of BLOCK_N.
    width: HEAD_DIM, where a division has to round as that of `rms_norm`.
    results [sequences, splits, heads, HEAD_DIM], scales [sequences, splits, heads] float32: what the splits of a
    sequence leave for the last of them, or with JOINED 0 for the kernel behind, normalized, and the logarithm (to the
    base two) of its weight.
    k_exponents, v_exponents: [pages, kv_heads, PAGE_SIZE] of pools in 8 bits, or None. EXPONENT, MANTISSA, IS_INTEGER:
    of such a pool's type, see `rounding_constants`. OF_HEADS: each KV head of a sequence has a block table of its own.
    sums: [sequences, heads] float32, takes the logarithm of each sum of exponentials; None: nobody wants it. RANKS: so
    many divide the keys of a sequence, and the pages here hold those of number `rank` (`DcpShard`); not FUSED then.
    """
    FUSED: tl.constexpr = cos is not None
    NORM: tl.constexpr = q_weight is not None
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    kv_heads = tl.num_programs(0)
    splits = tl.num_programs(2)
    heads = kv_heads * GROUP
    length, total, lowest, begin, size, used = key_splits(
        tl.load(lengths + sequence), rank, splits, min_keys, WINDOW, BLOCK_N, RANKS
    )
    cached = total - 1 if FUSED else length
    if split >= used:
        return
    start = begin + split * size
    end = tl.minimum(cached, start + size)
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    table = tables + (sequence * kv_heads + kv_head if OF_HEADS else sequence) * table_stride
    token_stride = kv_heads * HEAD_DIM
    # Earlier steps have written these keys: they are on their way before the kernel ahead has ended.
    offsets = _offsets(table, start, end, token_stride, PAGE_SIZE, BLOCK_N)
    page_stride = kv_heads * PAGE_SIZE
    if k_exponents is not None:
        k_exponents += kv_head * PAGE_SIZE
        v_exponents += kv_head * PAGE_SIZE
    if EARLY:
        _prefetch(keys, offsets, HEAD_PAD)
        _prefetch(values, offsets, HEAD_PAD)

    row = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, HEAD_PAD)[None, :]
    held = (row < GROUP) & (columns < HEAD_DIM)
    query_head = kv_head * GROUP + row
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    product += sequence * product_stride
    if FUSED:
        is_last = split == used - 1
        # Each row of a tile gets its own copy of what all share: no threads have to exchange it.
        own = columns + row * 0
        partner = (columns + HEAD_DIM // 2) % HEAD_DIM + row * 0
        inside = own < HEAD_DIM
        new = inside & is_last
        slot = tl.load(slots + sequence).to(tl.int64)
        c = tl.load(cos + sequence * HEAD_DIM + own, mask=inside, other=0.0)
        s = tl.load(sin + sequence * HEAD_DIM + own, mask=inside, other=0.0)
        q_factor, q_partner_factor, k_factor, k_partner_factor = 1.0, 1.0, 1.0, 1.0
        if NORM:
            q_factor = tl.load(q_weight + own, mask=inside, other=0.0)
            q_partner_factor = tl.load(q_weight + partner, mask=inside, other=0.0)
            k_factor = tl.load(k_weight + own, mask=new, other=0.0)
            k_partner_factor = tl.load(k_weight + partner, mask=new, other=0.0)
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()
        key = product + (heads + kv_head) * HEAD_DIM
        q_heads = tl.load(product + query_head * HEAD_DIM + own, mask=held, other=0.0)
        q_partners = tl.load(product + query_head * HEAD_DIM + partner, mask=held, other=0.0)
        k_heads = tl.load(key + own, mask=new, other=0.0)
        k_partners = tl.load(key + partner, mask=new, other=0.0)
        new_value = tl.load(key + kv_heads * HEAD_DIM + own, mask=new, other=0.0)
        queries = _rotate_heads(q_heads, q_partners, q_factor, q_partner_factor, c, s, eps, width, NORM)
        new_score = tl.full((ROWS,), float("-inf"), tl.float32)
        if is_last:
            new_key = _rotate_heads(k_heads, k_partners, k_factor, k_partner_factor, c, s, eps, width, NORM)
            if k_exponents is not None:
                key_values, key_powers = round_rows(new_key.to(tl.float32), EXPONENT, MANTISSA, IS_INTEGER)
                value_values, value_powers = round_rows(new_value.to(tl.float32), EXPONENT, MANTISSA, IS_INTEGER)
                new_key = _widened(key_values, key_powers, queries.dtype)
                new_value = _widened(value_values, value_powers, queries.dtype)
                mark = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE + tl.arange(0, ROWS) * 0
                of_first = (tl.arange(0, ROWS) == 0) & (slot >= 0)
                tl.store(k_exponents + mark, key_powers.to(tl.uint8), mask=of_first)
                tl.store(v_exponents + mark, value_powers.to(tl.uint8), mask=of_first)
            new_score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32), 1) * scale
            once = inside & (row == 0) & (slot >= 0)
            if k_exponents is not None:
                tl.store(keys + slot * token_stride + own, key_values.to(keys.dtype.element_ty), mask=once)
                tl.store(values + slot * token_stride + own, value_values.to(values.dtype.element_ty), mask=once)
            else:
                tl.store(keys + slot * token_stride + own, new_key, mask=once)
                tl.store(values + slot * token_stride + own, new_value, mask=once)
        maximum = new_score
        weight = tl.where(new_score == float("-inf"), 0.0, 1.0)
    else:
        queries = tl.load(product + query_head * HEAD_DIM + columns, mask=held, other=0.0)

    ROUNDED: tl.constexpr = k_exponents is not None and product.dtype.element_ty == tl.bfloat16
    if start < end:  # a loop that is known to run takes fewer registers: without this the compiler spills
        if ROUNDED and HEAD_PAD == HEAD_DIM and HEAD_DIM >= 64:  # `multiplies_in_float16`
            narrow, back = in_range(queries)
            words = values.to(tl.pointer_type(tl.int32), bitcast=True)
            quarter = tl.zeros((ROWS, HEAD_DIM // 4), tl.float32)
            quarters = (quarter, quarter, quarter, quarter)
            unit = 1
            at, marks = _slots(table, start, end, page_stride, PAGE_SIZE, BLOCK_N)
            next_k, next_v = tl.load(k_exponents + marks), tl.load(v_exponents + marks)
            for block in range(start, end, BLOCK_N):
                block_keys, block_words = load_quantized(keys, words, at, kv_heads, HEAD_DIM)
                k_powers, v_powers = next_k, next_v
                # A block ahead: slots for the pipeline's sake, and exponents, bytes that it does not load.
                at, marks = _slots(table, block + BLOCK_N, end, page_stride, PAGE_SIZE, BLOCK_N)
                next_k, next_v = tl.load(k_exponents + marks), tl.load(v_exponents + marks)
                maximum, weight, unit, quarters = attend_quantized(
                    narrow, back, maximum, weight, unit, quarters, block_keys, block_words, k_powers, v_powers,
                    block, end, lowest, scale, WINDOW, BLOCK_N, IS_INTEGER,
                )  # fmt: skip
            result = joined_columns(quarters, unit, ROWS, HEAD_DIM)
        else:
            if k_exponents is not None:
                marks = _marks(table, start, end, page_stride, PAGE_SIZE, BLOCK_N)
            for block in range(start, end, BLOCK_N):
                block_keys, block_values = _load_block(keys, values, offsets, HEAD_DIM, HEAD_PAD)
                if k_exponents is not None:
                    block_keys = _widened(block_keys, tl.load(k_exponents + marks), queries.dtype)
                    block_values = _widened(block_values, tl.load(v_exponents + marks), queries.dtype)
                    marks = _marks(table, block + BLOCK_N, end, page_stride, PAGE_SIZE, BLOCK_N)
                # Looked up a block ahead: loads that wait for a lookup could not be pipelined.
                offsets = _offsets(table, block + BLOCK_N, end, token_stride, PAGE_SIZE, BLOCK_N)
                maximum, weight, result = _attend(
                    queries, maximum, weight, result, block_keys, block_values,
                    block, end, lowest, scale, WINDOW, BLOCK_N,
                )  # fmt: skip
    if FUSED and is_last:
        result += tl.exp2(new_score - maximum)[:, None] * new_value.to(tl.float32)
    if sinks is not None and split == 0:  # once a sequence
        member = tl.arange(0, ROWS)
        maximum, weight, result = join_sink(maximum, weight, result, sinks, kv_head * GROUP + member, member < GROUP)
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]

    out += sequence * heads * HEAD_DIM
    if used == 1:
        tl.store(out + query_head * HEAD_DIM + columns, result.to(out.dtype.element_ty), mask=held)
        if sums is not None:
            own_sums = (maximum + tl.log2(weight)) * 0.6931471805599453
            tl.store(sums + sequence * heads + query_head, own_sums[:, None], mask=row < GROUP)
    else:
        results += sequence * splits * heads * HEAD_DIM
        scales += sequence * splits * heads
        part = split * heads + query_head
        tl.store(results + part * HEAD_DIM + columns, result, mask=held)
        tl.store(scales + part, (maximum + tl.log2(weight))[:, None], mask=row < GROUP)
        if JOINED > 0:
            tl.debug_barrier()
            counter = counters + sequence * kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                joined_member = tl.arange(0, GROUP_PAD)
                head = kv_head * GROUP + joined_member
                joined, joined_sums = join_splits(
                    results, scales, used, heads, head, joined_member < GROUP, HEAD_DIM, HEAD_PAD, GROUP_PAD, JOINED
                )
                if sums is not None:
                    tl.store(
                        sums + sequence * heads + head, joined_sums * 0.6931471805599453, mask=joined_member < GROUP
                    )
                mask = (joined_member < GROUP)[:, None] & (columns < HEAD_DIM)
                tl.store(out + head[:, None] * HEAD_DIM + columns, joined.to(out.dtype.element_ty), mask=mask)
                tl.store(counter, 0)
