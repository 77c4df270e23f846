"""Mixed steps part by part, prompts by cuDNN: equal to the reference."""

from __future__ import annotations

import pytest
import torch

from strata.kernels import attention_parts
from strata.kernels.attention import attention
from strata.kernels.paged import BatchParts, PagedKV

PAGE = 16


@pytest.mark.parametrize("chunk", [1, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (6, 6, 80), (16, 8, 128)])
@pytest.mark.parametrize(("cached", "prompts"), [((), (600, 600, 37)), ((5, 900, 33), (777, 2)), ((64,), (2048, 2048))])
def test_every_part(
    heads: int, kv_heads: int, head_dim: int, cached: tuple[int, ...], prompts: tuple[int, ...], chunk: int
) -> None:
    """The last sequence with something cached runs `chunk` tokens, those before it one."""
    others = [1] * (len(cached) - 1) + [chunk] * bool(cached)
    counts = others + list(prompts)
    totals = [held + new for held, new in zip(cached, others, strict=True)] + list(prompts)
    pages = [-(-total // PAGE) for total in totals]
    order = torch.randperm(sum(pages) + 5, device="cuda").int()
    tables = torch.zeros(len(totals), max(pages), dtype=torch.int32, device="cuda")
    keys, values = (
        torch.full((len(order), PAGE, kv_heads, head_dim), torch.nan, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    tokens = sum(counts)
    q = torch.randn(tokens, heads, head_dim, device="cuda").bfloat16()
    k, v = (torch.randn(tokens, kv_heads, head_dim, device="cuda").bfloat16() for _ in range(2))
    slots, at, used = [], 0, 0
    for row, (total, count, held) in enumerate(zip(totals, counts, pages, strict=True)):
        mine = order[used : used + held]
        used += held
        tables[row, :held] = mine
        place = torch.arange(total, device="cuda")
        where = mine[place // PAGE].long() * PAGE + place % PAGE
        for pool, new in ((keys, k), (values, v)):
            pool.flatten(0, 1)[where] = torch.randn(total, kv_heads, head_dim, device="cuda").bfloat16()
            pool.flatten(0, 1)[where[total - count :]] = new[at : at + count]
        slots.append(where[total - count :].int())
        at += count
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    lengths = torch.tensor(totals, dtype=torch.int32, device="cuda")
    going_on = tuple(count for count in others if count > 1)
    parts = BatchParts(len(others) - len(going_on), going_on, tuple(prompts))
    paged = PagedKV((keys,), (values,), tables, lengths, torch.cat(slots), parts=parts)
    arguments = (q, k, v, offsets, max(counts), paged, 0, head_dim**-0.5, None)
    assert attention_parts.supports(*arguments)
    found = attention_parts.attend(*arguments)
    wanted = attention.reference(*arguments)
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 5e-3
