"""Attention of decodes over chosen pages against loops over pages and keys; of the kernels see `test_prompts`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse.decodes import page_sparse_attention
from strata.kernels.attention.sparse.page_choice import PageChoice, write_bounds
from strata.kernels.attention.spec import AttentionSpec
from tests.kernels.attention.test_attention import PAGE, Case

CHOICE, SPEC = PageChoice(3), AttentionSpec(1, 0.9)
LENGTHS, NEW = [40, 100, 150, 70, 128], [1, 1, 1, 20, 1]
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
        kept = {pages - 1, *sorted(range(pages - 1), key=lambda at: -most[at])[: CHOICE.pages - 1]}
        there = torch.tensor([at for at in range(len(k)) if at // PAGE in kept])
        scores = k[there, of] @ q[-1, head] * SPEC.scale
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1].double()))
        rows.append(scores.softmax(0)[: len(there)] @ v[there, of])
    return torch.stack(rows)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_decodes_see_the_pages_that_could_score_most(sinks: Tensor | None) -> None:
    case = Case.random(LENGTHS, heads=6, kv_heads=2, head_dim=12)
    given = with_bounds(case.batch(NEW, layers=2))
    found = page_sparse_attention.reference(*given, SPEC, CHOICE, sinks)
    dense = attention.reference(*given, SPEC, sinks)
    for row, sequence in ((0, 0), (1, 1), (2, 2), (23, 4)):
        wanted = by_key(case, sequence, sinks)
        torch.testing.assert_close(found[row].double(), wanted, rtol=0, atol=3e-6)
        assert torch.allclose(found[row], dense[row], atol=1e-4) == (sequence == 0)  # which has three pages
    assert torch.equal(found[3:23], dense[3:23])


def test_on_a_cpu_what_sees_all_keys_runs_as_attention_does() -> None:
    given = with_bounds(Case.random(LENGTHS, heads=6, kv_heads=2, head_dim=12).batch(NEW, layers=2))
    wanted = page_sparse_attention.reference(*given, SPEC, CHOICE, SINKS)
    found = page_sparse_attention.bind("cpu")(*given, SPEC, CHOICE, SINKS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[3:23], attention.bind("cpu")(*given, SPEC, SINKS)[3:23])


def test_bounds_are_those_of_all_keys_of_a_page() -> None:
    case = Case.random(LENGTHS, heads=6, kv_heads=2, head_dim=12)
    given = with_bounds(case.batch(NEW, layers=2))
    page_sparse_attention.reference(*given, SPEC, CHOICE)
    pages = given[3].pages
    for sequence, total in enumerate(LENGTHS):
        for place in range(-(-total // PAGE)):
            keys = case.k[sequence][place * PAGE : (place + 1) * PAGE]
            wanted = torch.stack((keys.min(0).values, keys.max(0).values))
            assert torch.equal(pages.bounds[1][int(pages.tables[sequence, place])], wanted)
    assert pages.bounds[0].isnan().all()


def test_costs_are_of_what_is_read() -> None:
    given = Case.random([1600, 64], heads=4, kv_heads=2, head_dim=8).batch([1, 1])
    spec, workload = AttentionSpec(0, 1.0), Workload((1, 1), (1600, 64))
    dense = attention.cost(*given, spec, workload=workload)
    found = page_sparse_attention.cost(*given, spec, PageChoice(10), workload=workload)
    # 160 of 1,600 keys, and of each page as much again as a key and a value; of two pages bounds are written.
    assert found.cached == 2 * (160 + 64 + 100) * 2 * 8 * 4
    assert found.read - dense.read == -2 * 1440 * 64 + 2 * 100 * 64 + 2 * 16 * 64
    assert found.written - dense.written == 2 * 2 * 64
