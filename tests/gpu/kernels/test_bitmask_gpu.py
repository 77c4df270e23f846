"""Masks of ids on CUDA: bit for bit the reference, whatever the sizes, addresses and company."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.sampling.bitmask import apply_bitmask

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 50), (5, 4097), (33, 151936), (256, 32000)])
def test_it_is_its_reference(rows: int, vocab: int, dtype: torch.dtype) -> None:
    # Rows inside a wider tensor, masks at an odd address, and more words than the ids need.
    wide = torch.randn(rows, vocab + 3, device="cuda").to(dtype)
    logits = wide[:, 1 : vocab + 1]
    words = -(-vocab // 32) + 1
    buffer = torch.randint(-(2**31), 2**31, (1 + rows * words,), dtype=torch.int32, device="cuda")
    masks = buffer[1:].view(rows, words)
    which = torch.randint(-1, rows, (rows,), dtype=torch.int32, device="cuda")
    outside, last = wide[:, [0, -2, -1]], logits[-1:].clone()
    expected = apply_bitmask.reference(logits.clone(), masks, which)
    assert torch.equal(apply_bitmask(logits, masks, which), expected)
    assert torch.equal(wide[:, [0, -2, -1]], outside)
    assert torch.equal(apply_bitmask(last, masks, which[-1:]), expected[-1:])
