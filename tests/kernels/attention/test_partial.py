"""Attention to a part of the keys: joined parts are attention to all of them, with its gradients; cost by hand."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from strata.comm.join_heads import join_heads, joined
from strata.comm.operations import Along
from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.dcp.dcp import dcp_attention
from strata.kernels.attention.partial import VisibleKeys, partial_attention, partial_attention_gradients
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.state.dcp_shard import DcpShard
from tests.kernels.attention.cases import KEPT_LENGTHS as LENGTHS
from tests.kernels.attention.cases import KEPT_NEW as NEW
from tests.kernels.attention.cases import Case, kept_batch

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3


def part_of(queries: list[int], keys: list[int], causal: bool) -> VisibleKeys:
    offsets = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (queries, keys))
    return VisibleKeys(*offsets, max(queries), max(keys), causal)


def draw(rows: int, heads: int) -> Tensor:
    return torch.randn(rows, heads, WIDTH, dtype=torch.float64)


def plain(q: Tensor, k: Tensor, v: Tensor, part: VisibleKeys) -> tuple[Tensor, Tensor]:
    """One query and head at a time."""
    out, sums = torch.empty_like(q), q.new_empty(q.shape[:2])
    rows = []
    for own, others in part.sequences():
        for number, row in enumerate(range(own.start, own.stop)):
            last = others.start + number + 1 if part.causal else others.stop
            for head in range(HEADS):
                keys, values = (x[others.start : last, head // (HEADS // KV_HEADS)] for x in (k, v))
                scores = keys @ q[row, head] * SCALE
                rows.append((row, head, scores.softmax(0) @ values, scores.exp().sum().log()))
    for row, head, mixed, total in rows:
        out[row, head], sums[row, head] = mixed, total
    return out, sums


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [([3, 1, 6], [3, 1, 6], True), ([3, 1, 6], [2, 5, 1], False), ([1], [1], True)]
)
def test_each_query_sees_the_keys_of_its_sequence(queries: list[int], keys: list[int], causal: bool) -> None:
    part = part_of(queries, keys, causal)
    q, k, v = draw(sum(queries), HEADS), draw(sum(keys), KV_HEADS), draw(sum(keys), KV_HEADS)
    leaves = [one.requires_grad_() for one in (q, k, v)]
    out, sums = partial_attention(*(one.detach() for one in leaves), part, SCALE)
    wanted, wanted_sums = plain(*leaves, part)
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(sums, wanted_sums.detach())
    slope = torch.randn_like(out)
    wanted.backward(slope)
    found = partial_attention_gradients(slope, *(one.detach() for one in leaves), out, sums, part, SCALE)
    for mine, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad)


def test_parts_that_are_joined_are_attention_to_all_keys() -> None:
    """Results, and gradients that each part computes from the joined result."""
    q, k, v = draw(9, HEADS), draw(10, KV_HEADS), draw(10, KV_HEADS)
    whole = part_of([4, 5], [4, 6], False)
    wanted, wanted_sums = partial_attention(q, k, v, whole, SCALE)
    early, late = torch.tensor([0, 1, 4]), torch.tensor([2, 3, 5, 6, 7, 8, 9])
    parts = [(early, part_of([4, 5], [2, 1], False)), (late, part_of([4, 5], [2, 5], False))]
    made = [partial_attention(q, k[rows], v[rows], part, SCALE) for rows, part in parts]
    sums = torch.logaddexp(made[0][1], made[1][1])
    out = sum(one * (own - sums).exp()[..., None] for one, own in made)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(sums, wanted_sums)
    slope = torch.randn_like(q)
    of_q, of_k, of_v = partial_attention_gradients(slope, q, k, v, wanted, wanted_sums, whole, SCALE)
    found_q = torch.zeros_like(q)
    for rows, part in parts:
        of_queries, of_keys, of_values = partial_attention_gradients(slope, q, k[rows], v[rows], out, sums, part, SCALE)
        found_q += of_queries
        torch.testing.assert_close(of_keys, of_k[rows])
        torch.testing.assert_close(of_values, of_v[rows])
    torch.testing.assert_close(found_q, of_q)


def test_costs_are_those_counted_by_hand() -> None:
    q, k = torch.empty(5, HEADS, WIDTH, dtype=torch.bfloat16), torch.empty(7, KV_HEADS, WIDTH, dtype=torch.bfloat16)
    part, work = part_of([2, 3], [3, 4], False), Workload((2, 3), (3, 4))
    pairs = 2 * 3 + 3 * 4
    # 5 * 4 * 8 queries and results, 7 * 2 * 8 keys and values, of 2 bytes; 3 offsets each; 5 * 4 sums of 4 bytes.
    read, sums = 320 + 2 * 224 + 24, 80
    assert partial_attention.cost(q, k, k, part, SCALE, workload=work) == Cost(
        4 * pairs * HEADS * WIDTH, read, 320 + sums
    )
    out, total = partial_attention.meta(q, k, k, part, SCALE)
    assert (out.shape, out.dtype, total.shape, total.dtype) == (q.shape, q.dtype, (5, HEADS), torch.float32)
    backward = partial_attention_gradients.cost(q, q, k, k, q, total, part, SCALE, workload=work)
    assert backward == Cost(10 * pairs * HEADS * WIDTH, read + 2 * 320 + sums, 320 + 2 * 224)
    assert [one.shape for one in partial_attention_gradients.meta(q, q, k, k, q, total, part, SCALE)] == [
        q.shape,
        k.shape,
        k.shape,
    ]
    causal = VisibleKeys(part.q_offsets, part.q_offsets, 3, 3, True)
    pairs = 1 + 2 + 1 + 2 + 3
    assert partial_attention.cost(q, q, q, causal, SCALE, workload=Workload((2, 3), (2, 3))).flops == 4 * pairs * 32


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_runs_where_all_sequences_are_of_lengths_that_recur(causal: bool) -> None:
    """The choice on a GPU, which looks at shapes and types only."""

    def chosen(
        queries: list[int], keys: list[int], width: int = 64, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[str, str]:
        q, k = torch.empty(sum(queries), 4, width, dtype=dtype), torch.empty(sum(keys), 2, width, dtype=dtype)
        part, sums = part_of(queries, keys, causal), torch.empty(q.shape[:2])
        forward = partial_attention.bind("cuda").choose(q, k, k, part, SCALE)
        backward = partial_attention_gradients.bind("cuda").choose(q, q, k, k, q, sums, part, SCALE)
        return forward.name, backward.name

    for length in (512,) if causal else (512, 1024):
        assert chosen([512], [length]) == chosen([512] * 3, [length] * 3, 128) == ("cudnn", "cudnn")
    assert chosen([512, 511], [512, 511]) == chosen([333], [333]) == chosen([512], [512], 256) == ("flash", "flash")
    assert chosen([512], [512], dtype=torch.float32) == ("reference", "reference")
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen([512], [512]) == ("flash", "flash")
    finally:
        torch.use_deterministic_algorithms(False)


SPEC = AttentionSpec(0, 0.3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("implementation", ["reference", "by sequence"])
def test_every_query_of_a_mixed_batch(implementation: str, ranks: int) -> None:
    run = dcp_attention.reference
    if implementation != "reference":
        (made,) = (one for one in dcp_attention.implementations if one.name == implementation)
        run = dcp_attention.of_arguments(made.run)
    case = Case.random(LENGTHS, heads=6, kv_heads=2, head_dim=20)
    found = []
    for rank in range(ranks):
        kept = DcpShard(ranks, rank)
        found.append(run(*kept_batch(case, NEW, kept), SPEC, kept))
        assert not bool(found[-1][0].isnan().any())
    mixed, sums = (torch.stack(parts) for parts in zip(*found, strict=True))
    torch.testing.assert_close(joined(mixed, sums).double(), case.wanted(NEW, scale=0.3), rtol=1e-5, atol=1e-5)
    # Who keeps no key up to a query's position has found nothing.
    position = torch.cat([torch.arange(total - new, total) for total, new in zip(LENGTHS, NEW, strict=True)])
    for rank in range(ranks):
        assert torch.equal((sums[rank] == -torch.inf).all(1), position < rank)
        assert not mixed[rank, position < rank].any()


def test_bfloat16_by_the_library_is_near_the_reference() -> None:
    case, kept = Case.random(LENGTHS, heads=4, kv_heads=1, head_dim=32, dtype=torch.bfloat16), DcpShard(2, 1)
    given = *kept_batch(case, NEW, kept), SPEC, kept
    for found, wanted in zip(dcp_attention(*given), dcp_attention.reference(*given), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_rows_of_padding_are_finite() -> None:
    case, kept = Case.random([7, 3], heads=2, kv_heads=1, head_dim=16), DcpShard(2, 0)
    q, k, v, batch = kept_batch(case, [1, 1], kept)
    batch.pages.lengths[1] = 0
    mixed, sums = dcp_attention(q, k, v, batch, SPEC, kept)
    assert bool(mixed.isfinite().all())
    assert bool(joined(mixed[None], sums[None]).isfinite().all())


def test_costs_by_hand() -> None:
    """A decode of 5 tokens, of which rank 1 of 2 keeps 2; and a chunk of positions 2 and 3, which see 1 and 2 there."""
    case, kept = Case.random([5, 4], heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16), DcpShard(2, 1)
    cost = dcp_attention.cost(*kept_batch(case, [1, 2], kept), SPEC, kept, workload=Workload((1, 2), (5, 4)))
    keys, written = 2 * (2 + 2) * 2 * 16 * 2, 3 * 4 * (16 + 1) * 4
    assert cost == Cost(4 * 4 * 16 * (2 + 1 + 2), 3 * 4 * 16 * 2 + keys, written, cached=keys)
    mixed, sums = torch.empty(3, 4, 16, device="meta"), torch.empty(3, 4, device="meta")
    own = join_heads.meta(mixed, Along("dcp", 2), sums, torch.bfloat16)
    assert (own.shape, own.dtype) == ((3, 2, 16), torch.bfloat16)
    cost = join_heads.cost(mixed, Along("dcp", 2), sums, torch.bfloat16, workload=Workload((3,), (3,)))
    assert (cost.messages, cost.sent) == (1, 3 * 2 * 17 * 4)
    assert cost.written == 2 * 3 * 4 * 17 * 4 + 3 * 2 * 16 * 2
