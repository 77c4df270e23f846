"""Attention to the keys that a rank keeps, on a CPU, by the library's kernel that tells the sums of exponentials."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from strata.kernels.attention.cpu_plan import QUERY_ROWS
from strata.kernels.attention.spec import KeptCall, pages_of


def supports(call: KeptCall) -> bool:
    dtype, pages = call.q.dtype, call.batch.pages
    return dtype in (torch.float32, torch.bfloat16) and pages is not None and pages.holds(call.spec.layer, dtype)


def attend(call: KeptCall) -> tuple[Tensor, Tensor]:
    """One sequence after another; of a prompt so many queries at once that the mask stays small."""
    q, _, _, batch, spec, kept = call
    pages = pages_of(batch)
    out = torch.zeros(q.shape, dtype=torch.float32)
    sums = torch.full(q.shape[:2], -torch.inf)
    lengths = pages.lengths.tolist()
    for sequence, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        total, new = lengths[sequence], last - first
        here = kept.count(total)
        if not 0 < new <= total or here <= 0:
            continue
        used = pages.tables[sequence, : -(-here // pages.page_size)].long()
        key, value = (rows.flatten(0, 1)[:here] for rows in pages.rows(spec.layer, used, q.dtype))
        # The first queries of a sequence may see none of the keys here.
        blind = max(0, kept.rank + new - total)
        for start in range(blind, new, QUERY_ROWS):
            rows = slice(first + start, first + min(start + QUERY_ROWS, new))
            seen = kept.count(torch.arange(total - new + start, total - new + rows.stop - first) + 1)
            out[rows], sums[rows] = _attend(q[rows], key, value, seen, spec.scale)
    return out, sums


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [queries, heads, head_dim], of which the i-th sees the first seen[i] >= 1 of k and v."""
    kv_heads, most = k.shape[1], int(seen[-1])
    group = q.shape[1] // kv_heads
    rows = q.unflatten(1, (kv_heads, group)).permute(1, 0, 2, 3).flatten(1, 2)[None]
    keys, values = (one[:most].transpose(0, 1)[None] for one in (k, v))
    mask = None
    if int(seen[0]) < most:
        hidden = torch.arange(most) >= seen.repeat_interleave(group)[:, None]
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)[None, None]
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    found = out[0].unflatten(1, (-1, group)).permute(1, 0, 2, 3).flatten(1, 2)
    return found.float(), sums[0].unflatten(1, (-1, group)).permute(1, 0, 2).flatten(1, 2)
