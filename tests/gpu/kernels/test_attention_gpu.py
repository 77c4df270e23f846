"""Attention on CUDA against float64, with everything that must not be read filled with values that are no numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.state.paged import PagedKV
from tests.gpu.tensors import captured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-6}


class Case:
    """Random sequences on the GPU; `batch` makes the step that runs the last `new` tokens of the first `totals`."""

    def __init__(self, lengths, heads, kv_heads, head_dim, dtype):
        self.scale = head_dim**-0.5
        self.q, self.k, self.v = (
            [torch.randn(n, count, head_dim, device="cuda").to(dtype) for n in lengths]
            for count in (heads, kv_heads, kv_heads)
        )

    def batch(self, new, totals=None, page_size=16, width=None):
        totals = [len(q) for q in self.q] if totals is None else totals
        pages = [-(-total // page_size) for total in totals]
        count = sum(pages) + 2
        order = torch.randperm(count, device="cuda").int()
        shape = (count, page_size, *self.k[0].shape[1:])
        keys, values = (torch.full(shape, torch.nan, dtype=self.k[0].dtype, device="cuda") for _ in range(2))
        tables = order[-1].repeat(len(totals), width or max(*pages, 1))
        for s, at in enumerate(torch.tensor([0, *pages]).cumsum(0)[:-1].tolist()):
            tables[s, : pages[s]] = order[at : at + pages[s]]
            slots = tables[s, : pages[s], None] * page_size + torch.arange(page_size, device="cuda")
            slots = slots.flatten()[: totals[s]].long()
            keys.flatten(0, 1)[slots] = self.k[s][: totals[s]]
            values.flatten(0, 1)[slots] = self.v[s][: totals[s]]
        parts = [slice(total - n, total) for n, total in zip(new, totals, strict=True)]
        q, k, v = (torch.cat([x[p] for x, p in zip(xs, parts, strict=True)]) for xs in (self.q, self.k, self.v))
        lengths = torch.tensor(totals, dtype=torch.int32, device="cuda")
        kv = PagedKV((keys,), (values,), tables, lengths, torch.zeros(len(q), dtype=torch.int32, device="cuda"))
        return q, k, v, Sequences(cumulative(new), max(new), kv)

    def packed(self):
        lengths = [len(x) for x in self.q]
        q, k, v = (torch.cat(x) for x in (self.q, self.k, self.v))
        return q, k, v, Sequences(cumulative(lengths), max(lengths))

    def spec(self, window=None) -> AttentionSpec:
        return AttentionSpec(0, self.scale, window)

    def wanted(self, new, window=None, totals=None) -> Tensor:
        """In float64, the queries of `batch`."""
        totals = [len(q) for q in self.q] if totals is None else totals
        out = []
        for s, (n, total) in enumerate(zip(new, totals, strict=True)):
            group = self.q[s].shape[1] // self.k[s].shape[1]
            k, v = (x[s][:total].double().repeat_interleave(group, 1) for x in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", self.q[s][total - n : total].double(), k) * self.scale
            at, keys_at = torch.arange(total - n, total, device="cuda")[:, None], torch.arange(total, device="cuda")
            hidden = keys_at > at
            if window is not None:
                hidden |= keys_at <= at - window
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return torch.cat(out)


def cumulative(counts) -> Tensor:
    return torch.tensor([0, *counts], device="cuda").cumsum(0).int()


def check(arguments, wanted: Tensor, spec: AttentionSpec, deterministic) -> None:
    bound = attention.bind("cuda", deterministic=deterministic)
    assert bound.choose(*arguments, spec).name.startswith("triton")
    out = bound(*arguments, spec)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[out.dtype])


# heads, kv_heads, head_dim, dtype, window. Every line is a compilation of each kernel, so the tests share them.
CONFIGURATIONS = [
    (8, 2, 64, torch.bfloat16, None),
    (32, 8, 128, torch.bfloat16, None),
    (8, 1, 256, torch.bfloat16, None),
    (7, 1, 80, torch.float16, 100),
    (8, 2, 32, torch.float32, 700),
]
MIXED_TOTALS = [1, 700, 16, 17, 300, 1025, 64, 63, 5, 2]
MIXED_NEW = [1, 1, 16, 1, 100, 1025, 64, 7, 2, 1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype", "window"), CONFIGURATIONS)
def test_mixed_batches(heads, kv_heads, head_dim, dtype, window, deterministic):
    case = Case(MIXED_TOTALS, heads, kv_heads, head_dim, dtype)
    check(case.batch(MIXED_NEW), case.wanted(MIXED_NEW, window), case.spec(window), deterministic)
    check(case.packed(), case.wanted(MIXED_TOTALS, window), case.spec(window), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype", "window"), CONFIGURATIONS)
def test_decode_at_page_and_split_boundaries(heads, kv_heads, head_dim, dtype, window, deterministic):
    totals = [1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1300]
    new = [1] * len(totals)
    case = Case(totals, heads, kv_heads, head_dim, dtype)
    check(case.batch(new, width=300), case.wanted(new, window), case.spec(window), deterministic)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("batch", [1, 3, 512])
def test_decode_of_many_sequences(batch, page_size):
    totals = torch.randint(1, 400, (batch,)).tolist()
    case = Case(totals, 8, 2, 64, torch.bfloat16)
    new = [1] * batch
    for deterministic in (False, True):
        check(case.batch(new, page_size=page_size), case.wanted(new), case.spec(), deterministic)


def test_a_long_sequence_has_larger_splits():
    case = Case([20000], 8, 2, 64, torch.bfloat16)
    check(case.batch([1], width=4096), case.wanted([1]), case.spec(), False)


@pytest.mark.parametrize("window", [1, 65])
def test_narrow_windows(window):
    totals = [500, 64, 3]
    case = Case(totals, 4, 2, 64, torch.bfloat16)
    for deterministic in (False, True):
        for new in (totals, [1, 1, 1]):
            check(case.batch(new), case.wanted(new, window), case.spec(window), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_rows_are_finite_and_harmless(deterministic):
    case = Case([50, 400], 8, 2, 64, torch.bfloat16)
    q, k, v, (_, _, pages) = case.batch([1, 1])
    tables = torch.cat([pages.tables, torch.zeros(3, pages.tables.shape[1], dtype=torch.int32, device="cuda")])
    lengths = torch.cat([pages.lengths, torch.zeros(3, dtype=torch.int32, device="cuda")])
    padded = PagedKV(pages.keys, pages.values, tables, lengths, pages.slot_mapping)
    q, k, v = (torch.cat([x, x, x[:1]]) for x in (q, k, v))
    run = attention.bind("cuda", deterministic=deterministic)
    out = run(q, k, v, Sequences(cumulative([1] * 5), 1, padded), case.spec())
    torch.testing.assert_close(out[:2].double(), case.wanted([1, 1]), rtol=0, atol=TOLERANCE[out.dtype])
    assert out.isfinite().all()


def test_views_of_a_merged_projection():
    case = Case([300, 20], 8, 2, 64, torch.bfloat16)
    q, k, v, batch = case.packed()
    merged = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    views = [x.unflatten(-1, (-1, 64)) for x in merged.split([512, 128, 128], 1)]
    for deterministic in (False, True):
        run = attention.bind("cuda", deterministic=deterministic)
        assert torch.equal(run(*views, batch, case.spec()), run(q, k, v, batch, case.spec()))


@pytest.mark.parametrize("deterministic", [False, True])
def test_decode_replays_in_a_cuda_graph(deterministic):
    case = Case([900, 31, 257], 8, 2, 64, torch.bfloat16)
    run = attention.bind("cuda", deterministic=deterministic)
    q, k, v, batch = case.batch([1, 1, 1], width=64)
    graph, out = captured(lambda: run(q, k, v, batch, case.spec()))
    shorter = [130, 31, 256]  # the same pages with other lengths, as a replay meets them
    batch.pages.lengths.copy_(torch.tensor(shorter))
    q.copy_(torch.stack([case.q[s][n - 1] for s, n in enumerate(shorter)]))
    graph.replay()
    wanted = case.wanted([1, 1, 1], totals=shorter)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[out.dtype])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype", "window"), CONFIGURATIONS)
def test_deterministic_bits_do_not_depend_on_batch_chunks_or_pages(heads, kv_heads, head_dim, dtype, window):
    lengths = [1100, 1, 45, 129, 17]
    case = Case(lengths, heads, kv_heads, head_dim, dtype)
    run = attention.bind("cuda", deterministic=True)
    whole = run(*case.batch(lengths), case.spec(window)).split(lengths)
    for page_size in (16, 64):
        again = run(*case.batch(lengths, page_size=page_size), case.spec(window)).split(lengths)
        assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
    packed = run(*case.packed(), case.spec(window)).split(lengths)
    assert all(torch.equal(a, b) for a, b in zip(packed, whole, strict=True))
    for sizes in ([1] * 40, [7, 100, 21, 500], [512, 1, 511], [1099, 1]):
        done = 0
        for size in sizes:
            done += size
            new, totals = [size, 1, 1, 1, 1], [done, *(max(1, min(n, done)) for n in lengths[1:])]
            parts = run(*case.batch(new, totals), case.spec(window)).split(new)
            assert torch.equal(parts[0], whole[0][done - size : done])
            for s in range(1, 5):
                assert torch.equal(parts[s][0], whole[s][totals[s] - 1])


def test_deterministic_decode_of_any_batch_size():
    lengths = torch.randint(1, 600, (257,)).tolist()
    case = Case(lengths, 8, 2, 64, torch.bfloat16)
    run = attention.bind("cuda", deterministic=True)
    whole = [x[-1] for x in run(*case.packed(), case.spec()).split(lengths)]
    for batch in (1, 2, 31, 257):
        part = Case.__new__(Case)
        part.scale, part.q, part.k, part.v = case.scale, case.q[:batch], case.k[:batch], case.v[:batch]
        assert torch.equal(run(*part.batch([1] * batch), case.spec()), torch.stack(whole[:batch]))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype", "name"), [
    (32, 8, 64, torch.bfloat16, "flash"),
    (7, 1, 128, torch.bfloat16, "flash"),
    (4, 2, 64, torch.float32, "packed"),
])  # fmt: skip
def test_gradients(heads, kv_heads, head_dim, dtype, name, window):
    case = Case([700, 1, 130, 64], heads, kv_heads, head_dim, dtype)
    (q, k, v, batch), spec = case.packed(), case.spec(window)
    bound = attention.bind("cuda", differentiable=True)
    assert bound.choose(q, k, v, batch, spec).name == name
    toward = torch.randn(q.shape, device="cuda")
    grads = []
    for run, kind in ((bound, dtype), (attention.reference, torch.float64)):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        out = run(*leaves, batch, spec)
        grads.append((out, *torch.autograd.grad((out * toward).sum(), leaves)))
    for ours, theirs in zip(*grads, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)
