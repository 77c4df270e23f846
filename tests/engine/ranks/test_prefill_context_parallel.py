"""What ranks divide: the tokens of a step, each once, and the vocabulary, of which they draw what one rank draws."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.cost.nodes import node_costs
from strata.cost.step_times import ShardingTimes, StepTimes
from strata.engine.plan import Chunk, Draw, PlanArrays, StepPlan
from strata.engine.program.inputs import DrawStep
from strata.engine.ranks.prefill_context_parallel import TokenSharding, pieces_of
from strata.engine.ranks.vocabulary_shard import VocabularyShard
from strata.engine.request import Request, Sequence, new_sequence
from strata.engine.sampler import DrawInputs, DrawRow, LogprobTensors, Sampler
from strata.engine.sampling_params import SamplingParams
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.sampling.sampling import NO_ID, logprobs
from tests.engine.program.programs import graph_of, step_program
from tests.graph.lockstep import run_in_lockstep
from tests.parallel.models import random_model
from tests.parallel.ranks import run_ranks
from tests.parallel.shards import RANKS, divisible_config, shard_of

CASES: list[Any] = [[8192], [1, 1, 1, 700, 9, 4000], [1] * 40 + [64, 65, 8000], [511] * 8, [1023, 1024, 5]]


def plan_of(counts: list[int], starts: list[int]) -> StepPlan:
    chunks = []
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        draws = tuple(Draw(slot + other, slot + other) for other in range(slot % 3))  # samples of one prompt
        chunks.append(Chunk(slot, slot, start, count, draws, 0, ()))
    return StepPlan((), (), tuple(chunks), (), sum(counts))


@pytest.mark.parametrize("counts", CASES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_token_is_of_one_rank(counts: list[int], ranks: int) -> None:
    pieces = pieces_of(counts, ranks, 16)
    found = sorted((piece.chunk, piece.first, piece.first + piece.count) for own in pieces for piece in own)
    for chunk, count in enumerate(counts):
        own = [(first, end) for at, first, end in found if at == chunk]
        assert own[0][0] == 0
        assert own[-1][1] == count
        assert all(before[1] == after[0] for before, after in pairwise(own))
    for own in pieces:  # those that decode come first
        assert [piece.count != 1 for piece in own] == sorted(piece.count != 1 for piece in own)
    tokens = [sum(piece.count for piece in own) for own in pieces]
    assert max(tokens) - min(tokens) < 2 * ranks * 16 + 2 * len(counts)


@pytest.mark.parametrize("start", [0, 8192, 57344])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_as_many_pairs_of_queries_and_keys(start: int, ranks: int) -> None:
    pairs = [
        sum(piece.count * (2 * (start + piece.first) + piece.count + 1) // 2 for piece in own)
        for own in pieces_of([8192], ranks, 128)
    ]
    assert max(pairs) == min(pairs)


def test_a_rank_has_its_pieces_as_sequences_and_the_rows_of_all_draws() -> None:
    counts, starts = [1, 21, 6], [30, 8, 0]
    step = PlanArrays(plan_of(counts, starts))
    found = [TokenSharding(2, index, 4).shard(step) for index in range(2)]
    # The second chunk is cut at 5, 10 and 15; the third goes to the second rank, which has 10 tokens, then the first.
    assert found[0].slots.tolist() == [0, 1, 1]
    assert found[0].starts.tolist() == [30, 8, 23]
    assert found[0].counts.tolist() == [1, 5, 6]
    assert found[1].slots.tolist() == [1, 2]
    assert found[1].starts.tolist() == [13, 0]
    assert found[1].counts.tolist() == [10, 6]
    assert [one.tokens for one in found] == [12, 16]
    assert [one.rows for one in found] == [16, 16]
    assert [one.shape.sequences for one in found] == [4, 2]  # one for the padding of the first
    assert [one.ends.tolist() for one in found] == [[31, 13, 29], [23, 6]]
    for one in found:
        assert one.drawn == [1, 2, 3]
        assert one.draw_lengths.tolist() == [29, 6, 6]
        assert one.draw_ranks.tolist() == [0, 1, 1]
        assert one.max_sizes == (16, 3, 3, 2, 256)  # keys in blocks of 128
        assert [share.counts.tolist() for share in one.shares] == [[1, 5, 6], [10, 6]]
    assert found[0].draw_rows.tolist() == [11, 0, 0]
    assert found[1].draw_rows.tolist() == [0, 15, 15]


@pytest.mark.parametrize("counts", CASES)
@pytest.mark.parametrize("ranks", [2, 8])
def test_no_share_needs_more_room_than_the_largest(counts: list[int], ranks: int) -> None:
    division = TokenSharding(ranks, 0, 16)
    largest = division.largest(sum(counts), len(counts))
    step = division.shard(PlanArrays(plan_of(counts, [0] * len(counts))))
    assert step.shape.tokens <= largest.tokens
    assert step.shape.sequences <= largest.sequences
    assert step.shape.size <= largest.size


def pays(division: TokenSharding, counts: list[int], start: int = 0, *, captured: bool = False) -> bool:
    step = PlanArrays(plan_of(counts, [start] * len(counts)))
    share = division.share(step)
    return share is not None and division.pays(step, share, captured=captured)


def test_a_step_is_divided_if_that_takes_less_time() -> None:
    # Of the step, weights, product of a token, token, sequence, key, pair, and of launches beyond 1,024 tokens.
    times = StepTimes(1e-3, 4e-3, 20e-6, 0.0, 0.0, 0.0, 1e-9, captured=1024, launch=30e-3)
    division = TokenSharding(2, 0, 128, replace(times, division=ShardingTimes(2, 512, 1e-3, 0.1e-6)))
    assert not pays(division, [511], captured=True)
    assert pays(division, [512], captured=True)  # 11.2 ms, 7.1 ms
    assert not pays(division, [1024])  # 21.5 ms captured, 30 ms launched
    assert pays(division, [1024], captured=True)  # 12 ms
    assert pays(division, [1024], 20_000)  # 42 ms, 23 ms and messages
    assert pays(division, [2048])
    slow = TokenSharding(2, 0, 128, replace(times, division=ShardingTimes(2, 512, message=1.0, token=0.0)))
    assert not pays(slow, [2048], captured=True)


def test_a_chunk_that_is_not_cut_makes_the_step_of_its_rank_as_long() -> None:
    # By products alone: 511 and 33 tokens leave one rank with 511, 480 and 481 with 481 of 961.
    times = StepTimes(0.0, 0.0, 20e-6, 0.0, 0.0, 0.0, 0.0, captured=8192)
    division = TokenSharding(2, 0, 128, replace(times, division=ShardingTimes(2, 512, 1e-3, 0.0)))
    assert not pays(division, [511, 33], captured=True)
    assert pays(division, [480, 481], captured=True)
    # By what else a token costs, of which the rank with 992 of 1,024 tokens has most.
    times = StepTimes(0.0, 0.0, 0.0, 20e-6, 0.0, 0.0, 0.0, captured=8192)
    four = TokenSharding(4, 0, 128, replace(times, division=ShardingTimes(4, 1024, 1e-3, 0.0)))
    assert not pays(four, [992, *(1,) * 32], captured=True)
    assert pays(four, [1024], captured=True)
    without = TokenSharding(2, 0, 4)
    assert not pays(without, [15, 1])
    assert not pays(without, [15, 2, 3])  # 15 of 20, where 10 would be even
    assert pays(without, [15, 14])
    assert pays(without, [40])


def test_ranks_that_expect_different_times_divide_steps_by_those_of_the_slowest() -> None:
    times = StepTimes(1e-3, 4e-3, 20e-6, 3e-8, 2e-7, 1e-9, 1e-9, captured=1024, launch=30e-3)
    quick = replace(times, division=ShardingTimes(2, 1024, 1e-3, 0.1e-6, 4096))
    slow = replace(times, step=2e-3, pair=7e-10, division=ShardingTimes(2, 1024, 2e-3, 0.1e-6, 4096))
    alike = replace(slow, unused=0.5)  # which expects the same of all steps
    ranks = [TokenSharding(2, index, 128, one) for index, one in enumerate((quick, slow, alike))]
    told, barrier = [0] * len(ranks), threading.Barrier(len(ranks))

    def agreed(rank: int) -> TokenSharding:
        def least(number: int) -> int:
            told[rank] = number
            barrier.wait(10)
            found = min(told)
            barrier.wait(10)
            return found

        return ranks[rank].agreed(least)

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(agreed, range(len(ranks))))
    assert [one.index for one in found] == [0, 1, 2]
    assert found[0].times == found[1].times == found[2].times
    got = found[0].times
    assert got is not None
    division = got.division
    assert division is not None
    assert (got.step, got.pair, division.message) == pytest.approx((2e-3, 7e-10, 2e-3))
    assert (got.captured, division.ranks, division.captured) == (1024, 2, 4096)


def test_decodes_are_not_divided() -> None:
    chunks = tuple(Chunk(slot, slot, 9, 1, (Draw(slot, slot),), 0, ()) for slot in range(64))
    step = PlanArrays(StepPlan((), (), chunks, (), 64))
    assert step.are_decodes
    assert TokenSharding.on("cpu", 2, 0).share(step) is None
    assert np.all(step.counts == 1)


ROWS = 40


def inputs(filtered: bool) -> DrawInputs:
    """Every third row greedy, the others at some temperature, with all combinations of filters."""
    generator = torch.Generator().manual_seed(5)
    number = torch.arange(ROWS)
    used = number[:, None] >> torch.arange(3) & 1 == 1
    top_k, top_p, min_p = (used & filtered).unbind(1)
    return DrawInputs(
        torch.rand(ROWS, generator=generator) * 2 * (number % 3 > 0),
        torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator),
        torch.randint(0, 1000, (ROWS,), generator=generator, dtype=torch.int32),
        torch.where(top_k, 7, 0).int(),
        torch.where(top_p, torch.rand(ROWS, generator=generator).clamp(min=1e-3), 1),
        torch.where(min_p, 0.1, 0.0),
    )


def rows_of(vocabulary: int) -> Tensor:
    """Logits with ties across parts, and rows that are no distribution for what stands in their last or first id."""
    logits = (torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(6)) * 4).round() / 2
    logits[1, -1], logits[2, 0], logits[4], logits[5, : vocabulary // 2] = math.nan, math.inf, -math.inf, -math.inf
    return logits


def padded(logits: Tensor, size: int) -> tuple[Tensor, ...]:
    """The logits of each rank; columns of no id hold what would win."""
    held = -(-logits.shape[1] // size)
    return F.pad(logits, (0, held * size - logits.shape[1]), value=100.0).split(held, -1)


def drawn(graph: fx.GraphModule, logits: Tensor, given: DrawInputs) -> Tensor:
    ids, newest = graph(DrawStep(logits, given, torch.zeros(ROWS + 1, dtype=torch.int32), torch.arange(ROWS)))
    assert torch.equal(newest[:ROWS], ids)
    return ids  # type: ignore[no-any-return]


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("size", [*RANKS, 1])
def test_ranks_draw_the_ids_of_one(size: int, filtered: bool) -> None:
    config = divisible_config("llama")
    model = random_model(config, torch.float32).requires_grad_(False)
    name, given, logits = "draw_filtered" if filtered else "draw", inputs(filtered), rows_of(config.vocab_size)
    wanted = drawn(graph_of(step_program(model, "cpu", deterministic=False), name), logits, given)
    assert wanted[[1, 2, 4]].tolist() == [NO_ID] * 3
    graphs = [
        graph_of(step_program(own, "cpu", deterministic=False, shard=part), name)
        for part, own in (shard_of(model, config, size, index) for index in range(size))
    ]
    steps = [
        (DrawStep(own, given, torch.zeros(ROWS + 1, dtype=torch.int32), torch.arange(ROWS)),)
        for own in padded(logits, size)
    ]
    for ids, newest in run_in_lockstep(graphs, steps):
        assert torch.equal(ids, wanted)
        assert torch.equal(newest[:ROWS], wanted)


def test_a_plain_draw_sends_a_number_a_row_and_one_with_filters_the_logits() -> None:
    config = divisible_config("llama")
    part, own = shard_of(random_model(config, torch.float32).requires_grad_(False), config, 4, 1)
    graphs = step_program(own, "cpu", deterministic=False, shard=part)
    held = part.config.vocab_size
    with torch.device("meta"):
        step: Any = DrawStep(
            torch.empty(ROWS, held), DrawInputs(*(one.to("meta") for one in inputs(True))),
            torch.empty(9, dtype=torch.int32), torch.empty(ROWS, dtype=torch.int32),
        )  # fmt: skip
    for graph, bytes_sent in ((graphs.draw, ROWS * 8 * 3), (graphs.draw_filtered, ROWS * held * 4 * 3)):
        nodes = node_costs(graph, step, Workload((1,), (1,)))
        assert [node.cost.sent for node in nodes if node.operation == "all_gather"] == [bytes_sent]
    assert operation_counts(graphs.draw)["filter_bounds"] == 0


VOCABULARY = 77


def special_rows() -> list[SamplingParams]:
    """Penalties, bias, banned ids and log-probabilities, alone and together, with filters or without."""
    bias = {str(id): float(id % 7 - 3) for id in (0, 25, 26, 38, 39, 76)}
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3}
    return [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=0.9, seed=1, **penalties),
        SamplingParams(temperature=0, **penalties),
        SamplingParams(temperature=0.8, seed=2, logit_bias={int(id): value for id, value in bias.items()}),
        SamplingParams(temperature=0.7, seed=3, min_tokens=9, logprobs=20),
        SamplingParams(temperature=1.1, seed=4, logprobs=0, **penalties),
    ]


def drawn_twice(part: VocabularyShard | None, filtered: bool) -> list[list[Any]]:
    """Ids and log-probabilities of two draws, the second of which counts the ids of the first."""
    generator = torch.Generator().manual_seed(8)
    rows = []
    for slot, params in enumerate(special_rows()):
        if filtered and slot % 2:
            params = replace(params, top_k=9, top_p=0.8)
        prompt = tuple(torch.randint(VOCABULARY, (12,), generator=generator).tolist())
        sequence = Sequence(slot, Request(str(slot), prompt, params, eos_ids=frozenset({3, 60})), 0, 40, [*prompt], 12)
        rows.append(DrawRow(new_sequence(sequence, slot, 0), 12, banned=(slot, 70 + slot)))
    sampler = Sampler(len(rows), 64, torch.device("cpu"), part)
    for row in rows:
        sampler.admit(row.sequence)
    held = [row.sampling for row in rows]
    masks = torch.randint(-(2**31), 2**31, (2, 3), dtype=torch.int32, generator=generator)
    which = torch.tensor([-1, 0, 1, -1, 1, 0], dtype=torch.int32)
    found: list[list[Any]] = []
    for draw in range(2):
        whole = torch.randn(len(rows), VOCABULARY, generator=generator)
        own = whole if part is None else padded(whole, part.along.size)[part.first // -(-VOCABULARY // part.along.size)]
        given = DrawInputs(
            torch.tensor([one.temperature for one in held]),
            torch.tensor([row.sequence.seed for row in rows]),
            torch.full((len(rows),), draw, dtype=torch.int32),
            torch.tensor([one.top_k for one in held], dtype=torch.int32),
            torch.tensor([one.top_p for one in held]),
            torch.tensor([one.min_p for one in held]),
        )
        after = [row._replace(length=12 + draw) for row in rows]
        ids, told = sampler.draw(own, after, given, filtered, (masks, which) if draw else None)
        assert told is not None
        found += [ids.tolist(), *fields_of(told)]
    return found


def fields_of(told: LogprobTensors) -> list[list[Any]]:
    return [one.tolist() for one in (told.ranks, told.top_ids, told.chosen, told.top)]


def over_gloo(world: World, folder: Path) -> list[Any]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    held = -(-VOCABULARY // world.size)
    first = world.rank * held
    part = VocabularyShard(axis, first, min(held, VOCABULARY - first), VOCABULARY)
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(9))
    scored = Sampler(1, 8, torch.device("cpu"), part)
    own = padded(logits, world.size)[world.rank]
    told = scored.logprobs(own, torch.arange(9, dtype=torch.int32) * 9, 4)
    return [drawn_twice(part, False), drawn_twice(part, True), fields_of(told)]


def test_the_long_way_of_sampling_draws_and_tells_what_one_rank_does(tmp_path: Path) -> None:
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(9))
    alone = LogprobTensors(*logprobs(logits, torch.arange(9, dtype=torch.int32) * 9, 4))
    wanted = [drawn_twice(None, False), drawn_twice(None, True), fields_of(alone)]
    assert wanted[0][0] != wanted[0][5]
    for found in run_ranks(over_gloo, 3, tmp_path):
        for own, one in zip(found, wanted, strict=True):
            for mine, other in zip(own, one, strict=True):
                # Ids and ranks are equal, log-probabilities up to rounding.
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-6, atol=2e-6)
