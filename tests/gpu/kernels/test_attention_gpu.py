"""Attention on CUDA against float64, what must not be read being NaN; in deterministic mode bit for bit in any step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strata.kernels.attention import batch_invariant as attention_fixed
from strata.kernels.attention.attention import attention
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.softmax_triton import SEGMENT_KEYS, SEGMENTS
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences
from strata.kernels.split_counters import split_counters
from tests.gpu.tensors import captured
from tests.kernels.attention.cases import Case, cumulative

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-6}


def draw_case(lengths, heads, kv_heads, head_dim, dtype=torch.bfloat16) -> Case:
    return Case.random(lengths, heads, kv_heads, head_dim, dtype, seed=None, device="cuda")


def padded(case: Case, new: list[int], **options):
    """The arguments of a step with three padding rows behind its sequences, which decode."""
    q, k, v, (_, _, pages) = case.batch(new, **options)
    nothing = torch.zeros(3, dtype=torch.int32, device="cuda")
    tables = torch.cat([pages.tables, nothing[:, None].expand(-1, pages.tables.shape[1])])
    pages = replace(pages, tables=tables, lengths=torch.cat([pages.lengths, nothing]))
    return *(torch.cat([x, x, x[:1]]) for x in (q, k, v)), Sequences(cumulative([1] * 5, "cuda"), 1, pages)


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
    case = draw_case(MIXED_TOTALS, heads, kv_heads, head_dim, dtype)
    check(case.batch(MIXED_NEW), case.wanted(MIXED_NEW, window), case.spec(window), deterministic)
    check(case.packed(), case.wanted(MIXED_TOTALS, window), case.spec(window), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype", "window"), CONFIGURATIONS)
def test_decode_at_page_and_split_boundaries(heads, kv_heads, head_dim, dtype, window, deterministic):
    totals = [1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1300]
    new = [1] * len(totals)
    case = draw_case(totals, heads, kv_heads, head_dim, dtype)
    check(case.batch(new, width=300), case.wanted(new, window), case.spec(window), deterministic)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("batch", [1, 3, 512])
def test_decode_of_many_sequences(batch, page_size):
    totals = torch.randint(1, 400, (batch,)).tolist()
    case = draw_case(totals, 8, 2, 64, torch.bfloat16)
    new = [1] * batch
    for deterministic in (False, True):
        check(case.batch(new, page_size=page_size), case.wanted(new), case.spec(), deterministic)


def test_a_long_sequence_has_larger_splits():
    case = draw_case([20000], 8, 2, 64, torch.bfloat16)
    check(case.batch([1], width=4096), case.wanted([1]), case.spec(), False)


@pytest.mark.parametrize("window", [1, 65])
def test_narrow_windows(window):
    totals = [500, 64, 3]
    case = draw_case(totals, 4, 2, 64, torch.bfloat16)
    for deterministic in (False, True):
        for new in (totals, [1, 1, 1]):
            check(case.batch(new), case.wanted(new, window), case.spec(window), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_rows_are_finite_and_harmless(deterministic):
    case = draw_case([50, 400], 8, 2, 64, torch.bfloat16)
    run = attention.bind("cuda", deterministic=deterministic)
    out = run(*padded(case, [1, 1]), case.spec())
    torch.testing.assert_close(out[:2].double(), case.wanted([1, 1]), rtol=0, atol=TOLERANCE[out.dtype])
    assert out.isfinite().all()


def test_views_of_a_merged_projection():
    case = draw_case([300, 20], 8, 2, 64, torch.bfloat16)
    q, k, v, batch = case.packed()
    merged = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    views = [x.unflatten(-1, (-1, 64)) for x in merged.split([512, 128, 128], 1)]
    for deterministic in (False, True):
        run = attention.bind("cuda", deterministic=deterministic)
        assert torch.equal(run(*views, batch, case.spec()), run(q, k, v, batch, case.spec()))


@pytest.mark.parametrize("deterministic", [False, True])
def test_decode_replays_in_a_cuda_graph(deterministic):
    case = draw_case([900, 31, 257], 8, 2, 64, torch.bfloat16)
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
    case = draw_case(lengths, heads, kv_heads, head_dim, dtype)
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
    case = draw_case(lengths, 8, 2, 64, torch.bfloat16)
    run = attention.bind("cuda", deterministic=True)
    whole = [x[-1] for x in run(*case.packed(), case.spec()).split(lengths)]
    for batch in (1, 2, 31, 257):
        part = Case(case.q[:batch], case.k[:batch], case.v[:batch])
        assert torch.equal(run(*part.batch([1] * batch), case.spec()), torch.stack(whole[:batch]))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype", "name"), [
    (32, 8, 64, torch.bfloat16, "flash"),
    (7, 1, 128, torch.bfloat16, "flash"),
    (4, 2, 64, torch.float32, "packed"),
])  # fmt: skip
def test_gradients(heads, kv_heads, head_dim, dtype, name, window):
    case = draw_case([700, 1, 130, 64], heads, kv_heads, head_dim, dtype)
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


# heads, kv_heads, head_dim, dtype, window: every line is a compilation of both kernels.
DETERMINISTIC_CONFIGURATIONS = [
    (32, 8, 128, torch.bfloat16, None),
    (16, 8, 128, torch.bfloat16, 300),
    (8, 2, 64, torch.bfloat16, None),
    (6, 6, 96, torch.bfloat16, None),
    (7, 1, 80, torch.float16, 100),
    (8, 1, 256, torch.bfloat16, None),
    (24, 1, 32, torch.float16, None),
    (8, 2, 64, torch.float32, None),
    (4, 2, 128, torch.float32, 700),
]
SHAPES = ("heads", "kv_heads", "head_dim", "dtype", "window")


def attend(arguments, spec: AttentionSpec) -> Tensor:
    assert attention_fixed.supports(AttentionCall(*arguments, spec))
    return attention_fixed.attend(AttentionCall(*arguments, spec))


def decoded(case: Case, totals: list[int], window, **options) -> Tensor:
    """The last of `totals` tokens of each sequence, in one decoding step."""
    return attend(case.batch([1] * len(totals), totals, **options), case.spec(window))


def assert_same(found: Tensor, wanted: Tensor, message: str) -> None:
    differ = (found != wanted).flatten(1).any(1).nonzero().flatten().tolist()
    assert not differ, f"{message}: other bits in rows {differ[:10]}"


@pytest.mark.parametrize(SHAPES, DETERMINISTIC_CONFIGURATIONS)
def test_decoding_has_the_bits_of_prefill_at_the_edges_of_parts(heads, kv_heads, head_dim, dtype, window):
    doubling = 2 * SEGMENTS * SEGMENT_KEYS
    edges = [SEGMENT_KEYS, 2 * SEGMENT_KEYS, 5 * SEGMENT_KEYS, doubling, doubling + 2 * SEGMENT_KEYS]
    totals = [1, 2, 17, 63, 64, 65, *(edge + near for edge in edges for near in (-1, 0, 1, 40))]
    case = draw_case([max(totals)], heads, kv_heads, head_dim, dtype)
    whole = attend(case.packed(), case.spec(window))
    # Rows of prefill see other rows beside them; the last row is the dearest, and one in float64 is enough.
    wanted = case.wanted([1], window)
    torch.testing.assert_close(whole[-1:].double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    every = Case(*([x[0]] * len(totals) for x in (case.q, case.k, case.v)))
    for page_size in (16, 64):
        found = decoded(every, totals, window, page_size=page_size)
        assert_same(found, whole[torch.tensor(totals, device="cuda") - 1], f"pages of {page_size}")
    assert not split_counters(found.device).any()


@pytest.mark.parametrize(SHAPES, DETERMINISTIC_CONFIGURATIONS)
def test_a_mixed_step_has_the_bits_of_its_sequences_alone(heads, kv_heads, head_dim, dtype, window):
    lengths = [900, 1, 270, 3, 600, 129, 1100]
    new = [1, 1, 1, 1, 77, 5, 1100]
    case = draw_case(lengths, heads, kv_heads, head_dim, dtype)
    whole = attend(case.packed(), case.spec(window)).split(lengths)
    arguments = case.batch(new)
    torch.testing.assert_close(
        attend(arguments, case.spec(window)).double(), case.wanted(new, window), rtol=0, atol=TOLERANCE[dtype]
    )
    for decodes in (None, 4, 2):
        *queries, batch = arguments
        parts = None if decodes is None else BatchSplit(batch.pages.lengths, batch.offsets, batch.offsets[:2], decodes)
        known = (*queries, batch._replace(pages=replace(batch.pages, parts=parts)))
        for s, rows in enumerate(attend(known, case.spec(window)).split(new)):
            assert_same(rows, whole[s][-new[s] :], f"sequence {s}, {decodes} known to decode")


@pytest.mark.parametrize("window", [None, 1, 65, 1000])
def test_chunks_of_a_prompt_have_its_bits(window):
    length = 2300
    case = draw_case([length, 40], 8, 2, 128, torch.bfloat16)
    whole = attend(case.packed(), case.spec(window))[:length]
    for sizes in ([1, 63, 64, 65, 7, 2100], [512] * 4 + [252], [2299, 1], [256, 1, 255, 1788]):
        done = 0
        for size in sizes:
            done += size
            rows = attend(case.batch([size, 40], [done, 40]), case.spec(window))[:size]
            assert_same(rows, whole[done - size : done], f"{size} tokens up to {done}")


def test_many_runs_leave_the_same_bits():
    """Whichever program comes last joins the parts, always in their order."""
    totals = torch.randint(1, 6000, (48,)).tolist()
    case = draw_case(totals, 16, 4, 128, torch.bfloat16)
    arguments = case.batch([1] * len(totals))
    first = attend(arguments, case.spec())
    torch.testing.assert_close(first.double(), case.wanted([1] * len(totals)), rtol=0, atol=TOLERANCE[torch.bfloat16])
    for _ in range(100):
        assert_same(attend(arguments, case.spec()), first, "again")
    assert not split_counters(first.device).any()


def test_more_sequences_than_there_are_counters():
    totals = torch.randint(1, 4, (8200,)).tolist()
    case = draw_case(totals, 8, 8, 16, torch.bfloat16)
    rows = decoded(case, totals, None)
    last = torch.tensor(totals, device="cuda").cumsum(0) - 1
    assert_same(rows, attend(case.packed(), case.spec())[last], "decoding")


def test_padding_rows_of_fixed_are_zero():
    case = draw_case([700, 3], 8, 2, 128, torch.bfloat16)
    out = attend(padded(case, [1, 1], width=64), case.spec())
    assert_same(out[:2], decoded(case, [700, 3], None), "beside padding")
    assert not out[2:].any()


def test_fixed_decoding_replays_in_a_cuda_graph():
    case = draw_case([5000, 31, 1400], 8, 2, 128, torch.bfloat16)
    arguments = q, _, _, batch = case.batch([1, 1, 1], width=400)
    graph, out = captured(lambda: attend(arguments, case.spec()))
    for totals in ([130, 31, 256], [4999, 1, 257], [5000, 31, 1400]):
        batch.pages.lengths.copy_(torch.tensor(totals))
        q.copy_(torch.stack([case.q[s][n - 1] for s, n in enumerate(totals)]))
        graph.replay()
        assert_same(out, decoded(case, totals, None), f"lengths {totals}")
    assert not split_counters(out.device).any()
