"""What joins the splits of a decoding sequence, for the last of their programs that ends."""

from __future__ import annotations

from strata.kernels.triton_import import jit, tl


@jit
def join_splits(
    results,
    scales,
    used,
    heads,
    head,
    held,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    JOINED: tl.constexpr,
):
    """The weighted mean of the first `used` splits of heads [GROUP_PAD], JOINED at a time, always in their order; and
    the logarithm (to the base two) of their weight."""
    columns = tl.arange(0, HEAD_PAD)
    maximum = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    weight = tl.zeros((GROUP_PAD,), tl.float32)
    result = tl.zeros((GROUP_PAD, HEAD_PAD), tl.float32)
    for start in tl.range(0, used, JOINED, num_stages=1):
        split = start + tl.arange(0, JOINED)
        there = (split < used)[:, None] & held[None, :]
        source = split[:, None] * heads + head[None, :]
        # Past the nearest cache, which does not see what other processors write.
        each = tl.load(scales + source, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            results + source[:, :, None] * HEAD_DIM + columns[None, None, :],
            mask=there[:, :, None] & (columns < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        largest = tl.maximum(maximum, tl.max(each, 0))
        share = tl.exp2(each - largest[None, :])
        shrink = tl.exp2(maximum - largest)
        weight = weight * shrink + tl.sum(share, 0)
        result = result * shrink[:, None] + tl.sum(part * share[:, :, None], 0)
        maximum = largest
    return result / weight[:, None], maximum + tl.log2(weight)
