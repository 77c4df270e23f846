"""Draws of ranks that divide the vocabulary beside those of one: the graphs in lockstep, the long way over gloo."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.cost.nodes import node_costs
from strata.engine.program.inputs import DrawStep
from strata.engine.ranks.vocabulary_part import VocabularyPart
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


def drawn_twice(part: VocabularyPart | None, filtered: bool) -> list[list[Any]]:
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
    part = VocabularyPart(axis, first, min(held, VOCABULARY - first), VOCABULARY)
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
