"""Steps of attention by hand, on whatever device: pages in no order, and what nobody wrote is not a number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention.spec import AttentionSpec, HeadsSpec, Sequences
from strata.kernels.rotary.rope import rope_angles
from strata.kernels.state.dcp_shard import DcpShard
from strata.kernels.state.paged import PagedKV

PAGE = 16


@dataclass(frozen=True)
class Case:
    """Sequences with all their keys and values; `batch` makes the step that runs the last `new` tokens of each."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def random(cls, lengths, heads, kv_heads, head_dim, dtype=torch.float32, seed=0, device="cpu"):
        """seed: None draws others each time."""
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)

        def draw(count):
            shapes = [(n, count, head_dim) for n in lengths]
            return [torch.randn(*shape, generator=generator, device=device).to(dtype) for shape in shapes]

        return cls(draw(heads), draw(kv_heads), draw(kv_heads))

    def batch(self, new, totals=None, consecutive=False, seed=0, layers=1, page_size=PAGE, width=1):
        """Arguments of `attention` but the spec, with every unused entry of the pools not a number, and tables of at
        least so many pages."""
        device, totals = self.q[0].device, [len(q) for q in self.q] if totals is None else totals
        pages = [-(-total // page_size) for total in totals]
        count = sum(pages) + 3
        generator = torch.Generator().manual_seed(seed) if device.type == "cpu" else None
        order = torch.arange(count) if consecutive else torch.randperm(count, generator=generator)
        order = order.int().to(device)
        shape, kind = (count, page_size, *self.k[0].shape[1:]), {"dtype": self.k[0].dtype, "device": device}
        pool = torch.full(shape, torch.nan, **kind)
        keys, values = [[pool.clone() for _ in range(layers)] for _ in range(2)]
        tables = order[-1].repeat(len(totals), max(*pages, width))
        slots, at = [], 0
        for s, total in enumerate(totals):
            tables[s, : pages[s]] = order[at : at + pages[s]]
            places = tables[s, : pages[s], None] * page_size + torch.arange(page_size, device=device)
            own = places.flatten()[:total].long()
            keys[-1].flatten(0, 1)[own] = self.k[s][:total]
            values[-1].flatten(0, 1)[own] = self.v[s][:total]
            slots.append(own[total - new[s] :])
            at += pages[s]
        parts = [slice(total - n, total) for n, total in zip(new, totals, strict=True)]
        q, k, v = (torch.cat([x[p] for x, p in zip(xs, parts, strict=True)]) for xs in (self.q, self.k, self.v))
        lengths = torch.tensor(totals, dtype=torch.int32, device=device)
        kv = PagedKV(tuple(keys), tuple(values), tables, lengths, torch.cat(slots).int())
        return q, k, v, Sequences(cumulative(new, device), max(new), kv)

    def packed(self):
        q, k, v = torch.cat(self.q), torch.cat(self.k), torch.cat(self.v)
        lengths = [len(x) for x in self.q]
        return q, k, v, Sequences(cumulative(lengths, q.device), max(lengths))

    def spec(self, window=None) -> AttentionSpec:
        return AttentionSpec(0, self.q[0].shape[-1] ** -0.5, window)

    def wanted(self, new, window=None, totals=None, sinks=None, scale=None) -> Tensor:
        """In float64, the queries of `batch`: a softmax over the keys that each sees, and over its head's sink."""
        out, device, scale = [], self.q[0].device, self.spec().scale if scale is None else scale
        totals = [len(q) for q in self.q] if totals is None else totals
        for s, (n, total) in enumerate(zip(new, totals, strict=True)):
            group = self.q[s].shape[1] // self.k[s].shape[1]
            k, v = (x[s][:total].double().repeat_interleave(group, 1) for x in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", self.q[s][total - n : total].double(), k) * scale
            at, keys = torch.arange(total - n, total, device=device)[:, None], torch.arange(total, device=device)
            hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :total], v))
        return torch.cat(out)


def cumulative(counts, device: Any = "cpu") -> Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


# Of the first two, the ranks behind the first keep nothing that some queries, or any, see.
KEPT_LENGTHS, KEPT_NEW = [2, 1, 40, 17, 37], [2, 1, 1, 17, 20]


def kept_batch(case: Case, new: list[int], kept: DcpShard) -> tuple[Any, ...]:
    """Arguments of `dcp_attention` but the last two, of a rank that keeps some keys; the rest is not a number."""
    own = [[one[kept.rank :: kept.ranks] for one in of_all] for of_all in (case.k, case.v)]
    counts = [len(one) for one in own[0]]
    pages = Case(case.q, *own).batch([0] * len(counts), counts)[3].pages
    q, k, v = (
        torch.cat([one[len(one) - count :] for one, count in zip(of_all, new, strict=True)])
        for of_all in (case.q, case.k, case.v)
    )
    pages = replace(pages, lengths=torch.tensor([len(q) for q in case.q], dtype=torch.int32))
    return q, k, v, Sequences(cumulative(new), max(new), pages)


def decode_step(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype, **more: Any
) -> tuple[tuple[Any, ...], PagedKV]:
    """The arguments of `decode_attention` but for the last, and their pages: not a number where no token was written
    before. A length of 0 is a padding row. more: page_size, width of tables at least, layers, device, and how many
    columns stand beside the product, whose rows are those of a wider tensor as in a merged product."""
    options = {"page_size": 4, "width": 4, "layers": 2, "device": "cpu", "beside": 5} | more
    page_size, device, layers = options["page_size"], options["device"], options["layers"]
    needed = [-(-length // page_size) for length in lengths]
    order, at = torch.randperm(sum(needed) + 2, device=device).int(), 0
    # Tables lead past the end of their sequence, too.
    tables = order[-1].repeat(len(lengths), max(*needed, options["width"]))
    shape = (len(order), page_size, kv_heads, head_dim)
    nothing = torch.full(shape, torch.nan, dtype=dtype, device=device)
    keys, values = (tuple(nothing.clone() for _ in range(layers)) for _ in "kv")
    slots = []
    for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        tables[row, :count] = order[at : at + count]
        at += count
        places = tables[row, :count, None] * page_size + torch.arange(page_size, device=device)
        places = places.flatten()[:length].long()
        slots.append(int(places[-1]) if length else -1)
        for pool in (keys[-1], values[-1]):
            drawn = torch.randn(max(0, length - 1), kv_heads, head_dim, device=device)
            pool.flatten(0, 1)[places[:-1]] = drawn.to(dtype)
    indices = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths, slots))
    pages = PagedKV(keys, values, tables, *indices)
    beside = options["beside"]
    product = torch.randn(len(lengths), (heads + 2 * kv_heads) * head_dim + beside, device=device).to(dtype)[:, beside:]
    weights = [torch.randn(head_dim, device=device).to(dtype) if normed else None for _ in "qk"]
    table = torch.randn(max(lengths) + 1, head_dim, device=device)
    angles = rope_angles.reference((pages.lengths - 1).clamp(min=0), table)
    batch = Sequences(torch.arange(len(lengths) + 1, dtype=torch.int32, device=device), 1, pages)
    return (product, *weights, *angles, batch, HeadsSpec(layers - 1, heads, kv_heads, 1e-5)), pages


def copied(pages: PagedKV) -> PagedKV:
    """With pools of their own."""
    keys, values = (tuple(pool.clone() for pool in pools) for pools in (pages.keys, pages.values))
    return replace(pages, keys=keys, values=values)
