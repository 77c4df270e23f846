"""Sparse attention of decodes over pages and of prompts over blocks, against loops over queries, pages and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse.block_choice import BlockChoice, chosen_blocks, pooled_scores
from strata.kernels.attention.sparse.decodes import page_sparse_attention
from strata.kernels.attention.sparse.page_choice import PageChoice, write_bounds
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.kernels.attention.spec import AttentionSpec
from tests.kernels.attention.cases import PAGE, Case

PAGES, SPEC = PageChoice(3), AttentionSpec(1, 0.9)
DECODE_LENGTHS, DECODE_NEW = [40, 100, 150, 70, 128], [1, 1, 1, 20, 1]
SINKS = torch.tensor([0.5, -40.0, 3.0, 1.0, 0.0, 2.0])


def with_bounds(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a step before which all other tokens have been written, with their bounds."""
    *vectors, batch = given
    pages = batch.pages
    bounds = tuple(torch.full((len(one), 2, *one.shape[2:]), torch.nan) for one in pages.keys)
    held = replace(pages, bounds=bounds)
    before = replace(held, lengths=pages.lengths - batch.offsets.diff())
    write_bounds(before, torch.cat((torch.zeros(1), before.lengths.cumsum(0))).int(), SPEC.layer)
    return *vectors, batch._replace(pages=held)


def by_key(case: Case, sequence: int, sinks: Tensor | None) -> Tensor:
    """The newest query in float64: of each KV head the newest page and those by the best score that they could have."""
    q, k, v = (x[sequence].double() for x in (case.q, case.k, case.v))
    group, pages = q.shape[1] // k.shape[1], -(-len(k) // PAGE)
    rows = []
    for head in range(q.shape[1]):
        of, most = head // group, []
        for page in range(pages - 1):
            keys = k[page * PAGE : (page + 1) * PAGE, of]
            low, high = keys.min(0).values, keys.max(0).values
            members = range(of * group, (of + 1) * group)
            most.append(max(float(torch.where(q[-1, m] > 0, q[-1, m] * high, q[-1, m] * low).sum()) for m in members))
        kept = {pages - 1, *sorted(range(pages - 1), key=lambda at: -most[at])[: PAGES.pages - 1]}
        there = torch.tensor([at for at in range(len(k)) if at // PAGE in kept])
        scores = k[there, of] @ q[-1, head] * SPEC.scale
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1].double()))
        rows.append(scores.softmax(0)[: len(there)] @ v[there, of])
    return torch.stack(rows)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_decodes_see_the_pages_that_could_score_most(sinks: Tensor | None) -> None:
    case = Case.random(DECODE_LENGTHS, heads=6, kv_heads=2, head_dim=12)
    given = with_bounds(case.batch(DECODE_NEW, layers=2))
    found = page_sparse_attention.reference(*given, SPEC, PAGES, sinks)
    dense = attention.reference(*given, SPEC, sinks)
    for row, sequence in ((0, 0), (1, 1), (2, 2), (23, 4)):
        wanted = by_key(case, sequence, sinks)
        torch.testing.assert_close(found[row].double(), wanted, rtol=0, atol=3e-6)
        assert torch.allclose(found[row], dense[row], atol=1e-4) == (sequence == 0)  # which has three pages
    assert torch.equal(found[3:23], dense[3:23])


def test_on_a_cpu_what_sees_all_keys_runs_as_attention_does() -> None:
    given = with_bounds(Case.random(DECODE_LENGTHS, heads=6, kv_heads=2, head_dim=12).batch(DECODE_NEW, layers=2))
    wanted = page_sparse_attention.reference(*given, SPEC, PAGES, SINKS)
    found = page_sparse_attention.bind("cpu")(*given, SPEC, PAGES, SINKS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[3:23], attention.bind("cpu")(*given, SPEC, SINKS)[3:23])


def test_bounds_are_those_of_all_keys_of_a_page() -> None:
    case = Case.random(DECODE_LENGTHS, heads=6, kv_heads=2, head_dim=12)
    given = with_bounds(case.batch(DECODE_NEW, layers=2))
    page_sparse_attention.reference(*given, SPEC, PAGES)
    pages = given[3].pages
    for sequence, total in enumerate(DECODE_LENGTHS):
        for place in range(-(-total // PAGE)):
            keys = case.k[sequence][place * PAGE : (place + 1) * PAGE]
            wanted = torch.stack((keys.min(0).values, keys.max(0).values))
            assert torch.equal(pages.bounds[1][int(pages.tables[sequence, place])], wanted)
    assert pages.bounds[0].isnan().all()


def test_costs_of_chosen_pages_are_of_what_is_read() -> None:
    given = Case.random([1600, 64], heads=4, kv_heads=2, head_dim=8).batch([1, 1])
    spec, workload = AttentionSpec(0, 1.0), Workload((1, 1), (1600, 64))
    dense = attention.cost(*given, spec, workload=workload)
    found = page_sparse_attention.cost(*given, spec, PageChoice(10), workload=workload)
    # 160 of 1,600 keys, and of each page as much again as a key and a value; of two pages bounds are written.
    assert found.cached == 2 * (160 + 64 + 100) * 2 * 8 * 4
    assert found.read - dense.read == -2 * 1440 * 64 + 2 * 100 * 64 + 2 * 16 * 64
    assert found.written - dense.written == 2 * 2 * 64


BLOCKS = BlockChoice(share=0.5, min_keys=60, block=16, stride=4, local=1)
LENGTHS, NEW = [40, 70, 50, 128, 203], [1, 1, 20, 128, 77]


def weights_of_blocks(queries: Tensor, keys: Tensor, at: int, first: int, choice: BlockChoice) -> list[float]:
    """Of the queries [block, heads, dim] from position `at` on: by its definition, a stretch and a head at a time."""
    block, stride = choice.block, choice.stride
    of_heads = [[0.0] * -(-len(keys) // block) for _ in range(queries.shape[1])]
    for begin in range(0, len(queries), stride):
        stretch = queries[begin : begin + stride]
        for head in range(queries.shape[1]):
            scores = []
            for start in range(0, len(keys), stride):
                pairs = [(stride - 1 - back, start + back) for back in range(stride)]
                held = [(i, j) for i, j in pairs if i < len(stretch) and j < len(keys)]
                score = sum(float(stretch[i, head] @ keys[j]) for i, j in held) * SPEC.scale / stride
                scores.append(score if start <= at + begin + len(stretch) - 1 else -float("inf"))
            for number, weight in enumerate(torch.tensor(scores).double().softmax(0).tolist()):
                of_heads[head][number * stride // block] += weight
    return [max(weights) for weights in zip(*of_heads, strict=True)]


def chosen(weights: list[float], lowest: int, highest: int, choice: BlockChoice) -> set[int]:
    seen = range(highest // choice.block + 1)
    kept = {0, *(one for one in seen if one >= lowest // choice.block - choice.local)}
    for one in sorted(seen, key=lambda at: -weights[at]):
        if sum(weights[at] for at in kept) >= choice.share * sum(weights):
            break
        kept.add(one)
    return kept


def by_query(case: Case, sequence: int, new: int, choice: BlockChoice, sinks: Tensor | None) -> tuple[Tensor, int, int]:
    """The last queries of a sequence in float64, and how many blocks are kept of how many that could be."""
    q, k, v = (x[sequence].double() for x in (case.q, case.k, case.v))
    total, group = len(q), q.shape[1] // k.shape[1]
    out, kept_in_all, seen_in_all = torch.empty(new, *q.shape[1:], dtype=torch.float64), 0, 0
    for head in range(q.shape[1]):
        of = head // group
        members = slice(of * group, of * group + group)
        for first in range(total - new, total, choice.block):
            last = min(first + choice.block, total)
            kept = set(range(total))
            if new > 1 and total >= choice.min_keys:
                weights = weights_of_blocks(q[first:last, members], k[:, of], first, total - new, choice)
                kept = chosen(weights, first, last - 1, choice)
                kept_in_all, seen_in_all = kept_in_all + len(kept), seen_in_all + (last - 1) // choice.block + 1
            for at in range(first, last):
                there = torch.tensor([key for key in range(at + 1) if key // choice.block in kept])
                scores = k[there, of] @ q[at, head] * SPEC.scale
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[at - total + new, head] = scores.softmax(0)[: len(there)] @ v[there, of]
    return out, kept_in_all, seen_in_all


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.random(LENGTHS, heads=4, kv_heads=2, head_dim=12)


@pytest.mark.parametrize("sinks", [None, SINKS[:4]], ids=["plain", "sinks"])
def test_every_query_sees_the_blocks_that_its_block_keeps(case: Case, sinks: Tensor | None) -> None:
    found = block_sparse_attention.reference(*case.batch(NEW, layers=2), SPEC, BLOCKS, sinks)
    wanted, kept, seen = zip(*(by_query(case, s, n, BLOCKS, sinks) for s, n in enumerate(NEW)), strict=True)
    torch.testing.assert_close(found.double(), torch.cat(wanted), rtol=0, atol=3e-6)
    assert 0.3 * sum(seen) < sum(kept) < 0.8 * sum(seen)  # something was left out


def test_all_is_kept_of_the_whole_share_and_of_short_sequences(case: Case) -> None:
    given = case.batch(NEW, layers=2)
    wanted = attention.reference(*given, SPEC)
    for choice in (BLOCKS._replace(share=1.0), BLOCKS._replace(min_keys=204)):
        torch.testing.assert_close(block_sparse_attention.reference(*given, SPEC, choice), wanted)
    assert not torch.allclose(block_sparse_attention.reference(*given, SPEC, BLOCKS), wanted, atol=1e-3)
    packed = case.packed()
    assert torch.equal(
        block_sparse_attention.reference(*packed, SPEC, BLOCKS), attention.reference(*packed, SPEC._replace(layer=0))
    )


def test_other_sequences_change_nothing(case: Case) -> None:
    together = block_sparse_attention.reference(*case.batch(NEW, layers=2), SPEC, BLOCKS)
    alone = Case(case.q[4:], case.k[4:], case.v[4:]).batch(NEW[4:], layers=2)
    assert torch.equal(block_sparse_attention.reference(*alone, SPEC, BLOCKS), together[-77:])


def test_a_single_key_among_many_is_found() -> None:
    q, keys = torch.randn(64, 2, 16) * 0.2, torch.randn(1024, 16) * 0.2
    keys[333] = 3 * torch.ones(16)
    q[40, 1] = 3 * torch.ones(16)
    choice = BlockChoice(share=0.3, min_keys=0, block=64, stride=8, local=0)
    kept = chosen_blocks(pooled_scores(q, keys, choice, 0.25), 64, 1024, choice)
    assert kept[0, 333 // 64]
    assert kept.sum() < 12


@pytest.mark.parametrize("share", [0.2, 0.7, 0.95])
def test_the_fewest_blocks_hold_the_share(share: float) -> None:
    choice = BlockChoice(share, min_keys=0, block=16, stride=4, local=1)
    scores = pooled_scores(torch.randn(50, 3, 16), torch.randn(301, 16), choice, 0.7)
    kept, enough = chosen_blocks(scores, 50, 301, choice), share * scores.sum(1)
    assert ((scores * kept).sum(1) >= enough - 1e-6).all()
    for row, first in enumerate(range(251, 301, 16)):
        free = kept[row].clone()
        free[[0, *range(first // 16 - 1, 19)]] = False
        if free.any():  # without the least of them the share is not held
            least = scores[row][free].min()
            assert scores[row][kept[row]].sum() - least < enough[row]
            assert (scores[row][~kept[row] & (torch.arange(19) <= min(first + 15, 300) // 16)] <= least).all()


def test_costs_of_blocks_are_those_of_all_keys(case: Case) -> None:
    given, workload = case.batch(NEW, layers=2), Workload(new=tuple(NEW), total=tuple(LENGTHS))
    assert block_sparse_attention.cost(*given, SPEC, BLOCKS, workload=workload) == attention.cost(
        *given, SPEC, workload=workload
    )
