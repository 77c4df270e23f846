"""Rounded parts of sums over ranks on the GPU: the bits of their references, and a whole sum within its bound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.kernels.collective.rounded_parts import GROUP, part_bytes, round_parts, sum_parts, widen_parts


def same(found: Tensor, wanted: Tensor, width: int) -> bool:
    """But for signs of zeros, and what fills parts up."""
    behind = -(-width // 16) * 16
    exponents = slice(behind, behind - (-width // GROUP))
    assert found.shape[2] == wanted.shape[2] == part_bytes(width)
    values, others = (one[..., :width].cpu().contiguous().view(torch.float8_e4m3fn).float() for one in (found, wanted))
    return torch.equal(found[..., exponents].cpu(), wanted[..., exponents]) and torch.equal(values, others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("ranks", "width", "rows"), [(2, 2048, 1024), (8, 512, 77), (2, 300, 5), (3, 7, 9)])
def test_kernels_have_the_bits_of_their_references(ranks: int, width: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [
        (torch.randn(rows, ranks * width) * torch.randn(rows, ranks * width).exp()).to(dtype) for _ in range(ranks)
    ]
    parts[0][1], parts[0][2, 3], parts[1][4, 0] = 0.0, float("inf"), float("nan")
    sent = [round_parts.reference(part, ranks) for part in parts]
    for part, wanted in zip(parts, sent, strict=True):
        # A view whose rows lie further apart, as those of a product with more columns.
        wide = torch.zeros(rows, ranks * width + 16, dtype=dtype, device="cuda")
        wide[:, : ranks * width] = part
        assert same(round_parts.bind("cuda")(part.cuda(), ranks), wanted, width)
        assert same(round_parts.bind("cuda")(wide[:, : ranks * width], ranks), wanted, width)
    received = torch.stack([one[0] for one in sent])
    total = sum_parts.reference(received, width)
    assert same(sum_parts.bind("cuda")(received.cuda(), width), total, width)
    every = torch.cat([sum_parts.reference(torch.stack([one[rank] for one in sent]), width) for rank in range(ranks)])
    wanted, found = widen_parts.reference(every, width, dtype), widen_parts.bind("cuda")(every.cuda(), width, dtype)
    assert torch.equal(found.cpu().isnan(), wanted.isnan())
    assert torch.equal(found.cpu().nan_to_num(0.0), wanted.nan_to_num(0.0))


def test_own_kernels_run() -> None:
    x = torch.zeros(4, 512, dtype=torch.bfloat16, device="cuda")
    sent = round_parts(x, 2)
    for operation, arguments in ((round_parts, (x, 2)), (sum_parts, (sent, 256)), (widen_parts, (sent, 256, x.dtype))):
        assert operation.bind("cuda").choose(*arguments).name == "triton"
