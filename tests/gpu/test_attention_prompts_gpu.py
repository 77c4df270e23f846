"""Prompts with nothing cached, by cuDNN, beside decoding sequences: equal to the reference in float64 precision."""

from __future__ import annotations

import pytest
import torch

from strata.kernels import attention_prompts
from strata.kernels.attention import attention
from strata.kernels.paged import FreshPrompts, PagedKV

PAGE = 16


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (6, 6, 80), (16, 8, 128)])
@pytest.mark.parametrize(("cached", "prompts"), [((), (600, 600, 37)), ((5, 900, 33), (1, 777)), ((64,), (2048, 2048))])
def test_fresh_prompts(
    heads: int, kv_heads: int, head_dim: int, cached: tuple[int, ...], prompts: tuple[int, ...]
) -> None:
    totals = [*(length + 1 for length in cached), *prompts]
    counts = [1] * len(cached) + list(prompts)
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
    fresh = FreshPrompts(len(cached), tuple(prompts))
    paged = PagedKV((keys,), (values,), tables, lengths, torch.cat(slots), prompts=fresh)
    arguments = (q, k, v, offsets, max(counts), paged, 0, head_dim**-0.5, None)
    assert attention_prompts.supports(*arguments)
    found = attention_prompts.attend(*arguments)
    wanted = attention.reference(*arguments)
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 5e-3
