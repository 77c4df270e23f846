"""Draws from logits of a whole vocabulary and of a rank's part of one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from strata.kernels.sampling.filters import apply_bitmask, filter_bounds
from strata.kernels.sampling.sampling import gumbel_sample, token_logprobs
from strata.kernels.sampling.shards import best_in_shard, best_of_shards, exponential_sums
from tests.kernels.compiled_for import CompileCase

from .noted import BF16, FP32, empty, ints, noted

ROWS, VOCABULARY, PART = 10, 151_669, 37_917


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=FP32)


def compile_cases() -> Iterator[CompileCase]:
    whole, part = empty(ROWS, VOCABULARY), empty(ROWS, PART)
    draw = (floats(ROWS), empty(ROWS, dtype=torch.int64), ints(ROWS))
    bounds = floats(ROWS), ints(ROWS)
    yield from noted("within bounds", partial(gumbel_sample.bind("cuda"), whole, *draw, bounds))
    yield from noted("of a part", partial(best_in_shard.bind("cuda"), part, *draw, PART))
    yield from noted("of 8", partial(best_of_shards.bind("cuda"), empty(ROWS, 8, dtype=torch.int64)))
    masks = ints(ROWS, 4740), ints(ROWS)
    yield from noted("of all ids", partial(apply_bitmask.bind("cuda"), whole, *masks))
    yield from noted("from an id on", partial(apply_bitmask.bind("cuda"), part, *masks, PART))
    filters = floats(ROWS), ints(ROWS), floats(ROWS), floats(ROWS)
    for dtype in (BF16, FP32):
        yield from noted(
            f"of {dtype}", partial(filter_bounds.bind("cuda"), empty(ROWS, VOCABULARY, dtype=dtype), *filters)
        )
    ids = empty(ROWS, 21, dtype=torch.int64)
    yield from noted("of logits", partial(token_logprobs.bind("cuda"), floats(ROWS, VOCABULARY), ids))
    yield from noted("of a part", partial(exponential_sums.bind("cuda"), floats(ROWS, PART)))
