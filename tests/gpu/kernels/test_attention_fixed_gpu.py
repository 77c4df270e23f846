"""Deterministic attention on CUDA: near float64, and prefill, decoding and mixed steps bit for bit the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strata.kernels.attention import fixed as attention_fixed
from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.fixed_triton import PART_KEYS, PARTS
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences
from strata.kernels.split_counters import split_counters
from strata.kernels.state.paged import PagedKV
from tests.gpu.kernels.test_attention_gpu import TOLERANCE, Case, cumulative
from tests.gpu.tensors import captured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

# heads, kv_heads, head_dim, dtype, window: every line is a compilation of both kernels.
CONFIGURATIONS = [
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


@pytest.mark.parametrize(SHAPES, CONFIGURATIONS)
def test_decoding_has_the_bits_of_prefill_at_the_edges_of_parts(heads, kv_heads, head_dim, dtype, window):
    doubling = 2 * PARTS * PART_KEYS
    edges = [PART_KEYS, 2 * PART_KEYS, 5 * PART_KEYS, doubling, doubling + 2 * PART_KEYS]
    totals = [1, 2, 17, 63, 64, 65, *(edge + near for edge in edges for near in (-1, 0, 1, 40))]
    case = Case([max(totals)], heads, kv_heads, head_dim, dtype)
    whole = attend(case.packed(), case.spec(window))
    # Rows of prefill see other rows beside them; the last row is the dearest, and one in float64 is enough.
    wanted = case.wanted([1], window)
    torch.testing.assert_close(whole[-1:].double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    every = Case.__new__(Case)
    every.scale = case.scale
    every.q, every.k, every.v = ([x[0]] * len(totals) for x in (case.q, case.k, case.v))
    for page_size in (16, 64):
        found = decoded(every, totals, window, page_size=page_size)
        assert_same(found, whole[torch.tensor(totals, device="cuda") - 1], f"pages of {page_size}")
    assert not split_counters(found.device).any()


@pytest.mark.parametrize(SHAPES, CONFIGURATIONS)
def test_a_mixed_step_has_the_bits_of_its_sequences_alone(heads, kv_heads, head_dim, dtype, window):
    lengths = [900, 1, 270, 3, 600, 129, 1100]
    new = [1, 1, 1, 1, 77, 5, 1100]
    case = Case(lengths, heads, kv_heads, head_dim, dtype)
    whole = attend(case.packed(), case.spec(window)).split(lengths)
    arguments = case.batch(new)
    torch.testing.assert_close(
        attend(arguments, case.spec(window)).double(), case.wanted(new, window), rtol=0, atol=TOLERANCE[dtype]
    )
    for decodes in (None, 4, 2):
        *queries, batch = arguments
        parts = None if decodes is None else BatchParts(batch.pages.lengths, batch.offsets, batch.offsets[:2], decodes)
        known = (*queries, batch._replace(pages=replace(batch.pages, parts=parts)))
        for s, rows in enumerate(attend(known, case.spec(window)).split(new)):
            assert_same(rows, whole[s][-new[s] :], f"sequence {s}, {decodes} known to decode")


@pytest.mark.parametrize("window", [None, 1, 65, 1000])
def test_chunks_of_a_prompt_have_its_bits(window):
    length = 2300
    case = Case([length, 40], 8, 2, 128, torch.bfloat16)
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
    case = Case(totals, 16, 4, 128, torch.bfloat16)
    arguments = case.batch([1] * len(totals))
    first = attend(arguments, case.spec())
    torch.testing.assert_close(first.double(), case.wanted([1] * len(totals)), rtol=0, atol=TOLERANCE[torch.bfloat16])
    for _ in range(100):
        assert_same(attend(arguments, case.spec()), first, "again")
    assert not split_counters(first.device).any()


def test_more_sequences_than_there_are_counters():
    totals = torch.randint(1, 4, (8200,)).tolist()
    case = Case(totals, 8, 8, 16, torch.bfloat16)
    rows = decoded(case, totals, None)
    last = torch.tensor(totals, device="cuda").cumsum(0) - 1
    assert_same(rows, attend(case.packed(), case.spec())[last], "decoding")


def test_padding_rows_are_zero():
    case = Case([700, 3], 8, 2, 128, torch.bfloat16)
    q, k, v, (_, _, pages) = case.batch([1, 1], width=64)
    nothing = torch.zeros(3, dtype=torch.int32, device="cuda")
    tables = torch.cat([pages.tables, nothing[:, None].expand(-1, 64)])
    padded = PagedKV(pages.keys, pages.values, tables, torch.cat([pages.lengths, nothing]), pages.slot_mapping)
    q, k, v = (torch.cat([x, x, x[:1]]) for x in (q, k, v))
    out = attend((q, k, v, Sequences(cumulative([1] * 5), 1, padded)), case.spec())
    assert_same(out[:2], decoded(case, [700, 3], None), "beside padding")
    assert not out[2:].any()


def test_decoding_replays_in_a_cuda_graph():
    case = Case([5000, 31, 1400], 8, 2, 128, torch.bfloat16)
    arguments = q, _, _, batch = case.batch([1, 1, 1], width=400)
    graph, out = captured(lambda: attend(arguments, case.spec()))
    for totals in ([130, 31, 256], [4999, 1, 257], [5000, 31, 1400]):
        batch.pages.lengths.copy_(torch.tensor(totals))
        q.copy_(torch.stack([case.q[s][n - 1] for s, n in enumerate(totals)]))
        graph.replay()
        assert_same(out, decoded(case, totals, None), f"lengths {totals}")
    assert not split_counters(out.device).any()
