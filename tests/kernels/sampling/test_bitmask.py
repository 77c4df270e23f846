"""Masks of ids against single bits in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from strata.hardware.roofline import Workload
from strata.kernels.sampling.bitmask import apply_bitmask

BF16 = torch.bfloat16


def packed(allowed: set[int], words: int) -> list[int]:
    """The words of a mask as int32 numbers, from the ids that it allows."""
    unsigned = [sum(1 << bit for bit in range(32) if 32 * word + bit in allowed) for word in range(words)]
    return [word - 2**32 if word >= 2**31 else word for word in unsigned]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 4097])
def test_only_allowed_ids_keep_their_logits(vocab: int) -> None:
    words = -(-vocab // 32)
    generator = torch.Generator().manual_seed(vocab)
    sets = [set(torch.randint(vocab, (vocab,), generator=generator).tolist()), {vocab - 1}, set()]
    masks = torch.tensor([packed(allowed, words) for allowed in sets], dtype=torch.int32)
    which = [2, -1, 0, 1, 0]
    logits = torch.randn(5, vocab, generator=generator)
    before = logits.tolist()
    assert apply_bitmask(logits, masks, torch.tensor(which, dtype=torch.int32)) is logits
    for row, mask in enumerate(which):
        allowed = set(range(vocab)) if mask < 0 else sets[mask]
        kept = before[row]
        assert logits[row].tolist() == [kept[id] if id in allowed else -math.inf for id in range(vocab)]


def test_nan_stays_where_it_is_allowed() -> None:
    """A row that is no distribution must still be seen to be none."""
    logits = torch.tensor([[math.nan, math.nan, 1.0]])
    found = apply_bitmask(logits, torch.tensor([[0b110]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert found[0, 0] == -math.inf
    assert found[0, 1].isnan()
    assert found[0, 2] == 1


def test_it_reads_masks_and_writes_at_most_all_logits() -> None:
    with torch.device("meta"):
        arguments = (
            torch.empty(3, 64, dtype=BF16),
            torch.empty(2, 2, dtype=torch.int32),
            torch.empty(3, dtype=torch.int32),
        )
        made = apply_bitmask.meta(*arguments)
        cost = apply_bitmask.cost(*arguments, workload=Workload((1, 1, 1), (1, 1, 1)))
    assert (made.shape, made.dtype) == ((3, 64), BF16)
    assert (cost.read, cost.written) == (2 * 2 * 4 + 3 * 4, 3 * 64 * 2)
