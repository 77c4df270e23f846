"""How deterministic attention divides the keys of a sequence and the sequences of a batch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from strata.kernels.attention import batch_invariant as attention_fixed
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.softmax_triton import SEGMENT_KEYS, SEGMENTS, segment_at, segment_start
from strata.kernels.attention.varlen_triton import invariant_tile
from strata.kernels.split_counters import MAX_COUNTERS
from strata.kernels.state.paged import PagedKV

TYPES = [torch.bfloat16, torch.float16, torch.float32]


def starts(until: int) -> list[int]:
    """Where parts begin, counted one by one: the size doubles whenever the position has."""
    found, size, doubles_at = [0], SEGMENT_KEYS, 2 * SEGMENTS * SEGMENT_KEYS
    while found[-1] < until:
        if found[-1] == doubles_at:
            size, doubles_at = 2 * size, 2 * doubles_at
        found.append(found[-1] + size)
    return found


def test_parts_cover_every_position_once() -> None:
    expected = starts(1 << 20)
    assert [segment_start.fn(part, SEGMENT_KEYS, SEGMENTS) for part in range(len(expected))] == expected
    for part, start in enumerate(expected[:-1]):
        for position in (start, start + 1, expected[part + 1] - 1):
            assert segment_at.fn(position, SEGMENT_KEYS, SEGMENTS) == part


def test_long_sequences_have_few_parts() -> None:
    assert segment_at.fn(131072 - 1, SEGMENT_KEYS, SEGMENTS) < 128
    for position in (1 << 14, 1 << 17, 1 << 20):
        part = segment_at.fn(position, SEGMENT_KEYS, SEGMENTS)
        size = segment_start.fn(part + 1, SEGMENT_KEYS, SEGMENTS) - segment_start.fn(part, SEGMENT_KEYS, SEGMENTS)
        assert size * SEGMENTS <= position, "the last part is a small share"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_prefill_and_decoding_take_the_same_blocks_of_keys(head_dim: int, dtype: torch.dtype) -> None:
    prefill, decode = (invariant_tile(head_dim, dtype, decode=decode) for decode in (False, True))
    assert prefill.keys == decode.keys
    assert SEGMENT_KEYS % decode.keys == 0, "a block lies in one part"
    if dtype == torch.float32 or head_dim > 128:
        assert prefill == decode
    else:  # 64 rows for each group of four warps: one instruction, whatever the tile
        assert prefill.rows * decode.warps == decode.rows * prefill.warps == 64 * prefill.warps


def test_sequences_with_one_token_decode() -> None:
    index = torch.zeros(0, dtype=torch.int32)

    def decodes(sequences: int, longest: int, parts: BatchSplit | None, kv_heads: int = 8) -> int:
        pages = PagedKV((), (), index, index, index, parts=parts)
        return attention_fixed._decodes(sequences, longest, pages, kv_heads)

    assert decodes(5, 1, None) == 5
    assert decodes(5, 9, BatchSplit(index, index, index, decodes=3)) == 3
    assert decodes(5, 9, BatchSplit(index, index, index)) == 0, "in a recording nobody knows"
    assert decodes(5, 9, None) == 0
    most = MAX_COUNTERS // 8
    assert decodes(most, 1, None) == most
    assert decodes(most + 1, 1, None) == 0, "as many counters as there are"
