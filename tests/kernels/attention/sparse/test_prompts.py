"""Block-sparse attention of prompts: against loops over queries and keys, on a CPU and in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse.block_choice import BlockChoice, kept_blocks, pooled_scores
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.kernels.attention.spec import AttentionSpec
from tests.kernels.attention.test_attention import Case

CHOICE = BlockChoice(share=0.5, least_keys=60, block=16, stride=4, local=1)
LENGTHS, NEW = [40, 70, 50, 128, 203], [1, 1, 20, 128, 77]
SPEC = AttentionSpec(1, 0.9)
SINKS = torch.tensor([0.5, -40.0, 3.0, 1.0])


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
            if new > 1 and total >= choice.least_keys:
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


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_every_query_sees_the_blocks_that_its_block_keeps(case: Case, sinks: Tensor | None) -> None:
    found = block_sparse_attention.reference(*case.batch(NEW, layers=2), SPEC, CHOICE, sinks)
    wanted, kept, seen = zip(*(by_query(case, s, n, CHOICE, sinks) for s, n in enumerate(NEW)), strict=True)
    torch.testing.assert_close(found.double(), torch.cat(wanted), rtol=0, atol=3e-6)
    assert 0.3 * sum(seen) < sum(kept) < 0.8 * sum(seen)  # something was left out


def test_all_is_kept_of_the_whole_share_and_of_short_sequences(case: Case) -> None:
    given = case.batch(NEW, layers=2)
    wanted = attention.reference(*given, SPEC)
    for choice in (CHOICE._replace(share=1.0), CHOICE._replace(least_keys=204)):
        torch.testing.assert_close(block_sparse_attention.reference(*given, SPEC, choice), wanted)
    assert not torch.allclose(block_sparse_attention.reference(*given, SPEC, CHOICE), wanted, atol=1e-3)
    packed = case.packed()
    assert torch.equal(
        block_sparse_attention.reference(*packed, SPEC, CHOICE), attention.reference(*packed, SPEC._replace(layer=0))
    )


def test_other_sequences_change_nothing(case: Case) -> None:
    together = block_sparse_attention.reference(*case.batch(NEW, layers=2), SPEC, CHOICE)
    alone = Case(case.q[4:], case.k[4:], case.v[4:]).batch(NEW[4:], layers=2)
    assert torch.equal(block_sparse_attention.reference(*alone, SPEC, CHOICE), together[-77:])


def test_a_single_key_among_many_is_found() -> None:
    q, keys = torch.randn(64, 2, 16) * 0.2, torch.randn(1024, 16) * 0.2
    keys[333] = 3 * torch.ones(16)
    q[40, 1] = 3 * torch.ones(16)
    choice = BlockChoice(share=0.3, least_keys=0, block=64, stride=8, local=0)
    kept = kept_blocks(pooled_scores(q, keys, choice, 0.25), 64, 1024, choice)
    assert kept[0, 333 // 64]
    assert kept.sum() < 12


@pytest.mark.parametrize("share", [0.2, 0.7, 0.95])
def test_the_fewest_blocks_hold_the_share(share: float) -> None:
    choice = BlockChoice(share, least_keys=0, block=16, stride=4, local=1)
    scores = pooled_scores(torch.randn(50, 3, 16), torch.randn(301, 16), choice, 0.7)
    kept, enough = kept_blocks(scores, 50, 301, choice), share * scores.sum(1)
    assert ((scores * kept).sum(1) >= enough - 1e-6).all()
    for row, first in enumerate(range(251, 301, 16)):
        free = kept[row].clone()
        free[[0, *range(first // 16 - 1, 19)]] = False
        if free.any():  # without the least of them the share is not held
            least = scores[row][free].min()
            assert scores[row][kept[row]].sum() - least < enough[row]
            assert (scores[row][~kept[row] & (torch.arange(19) <= min(first + 15, 300) // 16)] <= least).all()


def test_costs_are_those_of_all_keys(case: Case) -> None:
    given, workload = case.batch(NEW, layers=2), Workload(new=tuple(NEW), total=tuple(LENGTHS))
    assert block_sparse_attention.cost(*given, SPEC, CHOICE, workload=workload) == attention.cost(
        *given, SPEC, workload=workload
    )


def test_kernels_in_the_interpreter() -> None:
    """A process of its own, because Triton's interpreter is chosen before Triton is loaded."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.attention.sparse.interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
