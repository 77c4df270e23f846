"""Captured steps of ranks that divide tokens, keys or the vocabulary, over gloo, where a CUDA graph is a function that
is called again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata import LLM
from strata.cache.pages import PageAllocator
from strata.cache.pool import KVPool, PoolShape
from strata.cache.prefix import PrefixTree
from strata.cache.staging import Staging
from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.engine.ledger import Ledger
from strata.engine.loop import EngineLoop
from strata.engine.program import sizes as sizes_of_steps
from strata.engine.program.program import StepProgram
from strata.engine.program.sizes import StepSizes, captured_sizes, sharded_buckets
from strata.engine.program.source import Target
from strata.engine.ranks.prefill_context_parallel import TokenSharding
from strata.engine.request import Request
from strata.engine.runner import Runner
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.startup import executor
from strata.graph.walk import operation_counts
from strata.kernels.state.dcp_shard import ALL_KEYS, DcpShard
from strata.models import weights
from strata.models.config import ModelConfig
from strata.parallel.serving_shard import RankShard
from tests.engine.program.programs import plain_sizes, step_program
from tests.engine.program.test_captured_steps import (
    LONGEST,
    MOST,
    OPTIONS,
    Replayed,
    as_on_cuda,
    ids,
    recorded_by,
    recording,
)
from tests.parallel.models import random_model
from tests.parallel.ranks import run_ranks
from tests.parallel.shards import divisible_config, shard_of


def divided_steps(world: World, folder: Path, *, model: str, cases: list[tuple[bool, int]]) -> list[dict[str, Any]]:
    axis = Mesh.of(world, {"cp": world.size}).axis("cp")
    return [of_engine(axis, model, *case) for case in cases]


def of_engine(axis: Axis, model: str, library: bool, most: int) -> dict[str, Any]:
    """What a rank draws in an engine that replays shares of steps, whose device has memory of its own as on CUDA, and
    how many steps it ran in which way. most: rows of the largest share that is captured."""
    llm = LLM(Path(model), **OPTIONS)
    plain: Any = llm.engine.loop._runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes_of_steps, "LIBRARY_TOKENS", 16)
        patch.setattr(sizes_of_steps, "MAX_PROMPTS", 3)
        division, replayed = TokenSharding.on("cpu", axis.size, axis.index), Replayed()
        as_on_cuda(patch, replayed)
        program = replace(step_program(llm.engine.model, target={"context": axis}), division=division)
        sizes, config = plain_sizes(plain.pool.shape, MOST, LONGEST, llm.engine.max_model_len), llm.engine.config
        runner: Any = Runner(program, sizes, config, [plain.pool], CPU, config.vocab_size)
        kinds = captured_sizes(MOST, LONGEST, 10**6, library, division=division)
        kept = [size for size in kinds if size.ranks == 1 or size.tokens <= most]
        llm.engine.loop._runner = runner
        captured, tables = recorded_by(llm, kept, all_of_them=True), runner._tables
        launched = []
        launch = runner._launch_eager
        runner._launch_eager = lambda plan, step, *more: launched.append(step) or launch(plan, step, *more)
        drawn = ids(llm)
    ran = [key[0] for key in replayed.replayed if key[1] == "run"]
    return {
        "ids": drawn,
        "shares": sorted({(size.tokens, size.sequences, size.draws) for size in ran if size.ranks > 1}),
        "prompts": sorted({size.prompts or 0 for size in ran if size.ranks > 1}),
        "divided": sum(size.ranks > 1 for size in ran),
        "whole": sum(size.ranks == 1 for size in ran),
        "launched": sum(hasattr(one, "shares") for one in launched),
        "uncounted": len(launched) - captured.uncaptured["too_large"],
        "tables": torch.equal(tables.on_device, torch.from_numpy(tables.rows)),
        "lacking": len(captured.lacking),
    }


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, [(False, 48), (True, 48), (True, 32)]), pytest.param(3, [(True, 32)], marks=pytest.mark.long)],
    ids=["2 ranks", "3 ranks"],
)
def test_shares_draw_what_one_rank_draws(
    ranks: int, cases: list[tuple[bool, int]], folder: Path, tmp_path: Path
) -> None:
    ran = run_ranks(divided_steps, ranks, tmp_path, model=str(folder), cases=cases)
    wanted = ids(LLM(folder, **OPTIONS))
    for (library, most), *found in zip(cases, *ran, strict=True):
        all_are_captured = most == LONGEST // ranks
        for rank in found:
            assert rank["ids"] == wanted
            assert rank["tables"], "the device would read other pages than the host's"
            assert rank["lacking"] == 0
            assert rank["whole"] > 20
            assert rank["divided"] > (10 if all_are_captured else 0)
            assert (rank["launched"] > 5) == (not all_are_captured)
            assert rank["uncounted"] == 0
            assert rank["prompts"] == ([0, 3] if library and all_are_captured else [3] if library else [0])
        for name in ("shares", "divided", "launched"):
            assert len({str(rank[name]) for rank in found}) == 1


def test_sizes_of_shares_begin_with_the_shortest_step_and_hold_the_largest() -> None:
    for ranks in (2, 4, 8):
        division = TokenSharding.on("cuda", ranks, 0)
        sizes = captured_sizes(256, 8192, 8 * 10**9, library=True, division=division)
        shares = [size for size in sizes if size.ranks > 1]
        assert {size.ranks for size in shares} == {ranks}
        assert min(size.tokens for size in shares) * ranks == division.min_tokens
        assert max(size.tokens for size in shares) * ranks == 8192
        assert max(size.draws for size in shares) == 256
        assert all(size.sequences > size.draws for size in shares)
        largest = division.largest(8192, 256)
        assert all(size.size <= largest.size for size in shares)
        whole = [size for size in sizes if size.ranks == 1]
        assert whole == captured_sizes(256, 8192, 8 * 10**9, library=True)
    assert not sharded_buckets(256, 255, TokenSharding.on("cuda", 2, 0), library=True)
    # 16 rows have no room for 16 sequences and padding.
    assert not sharded_buckets(20, 16, TokenSharding.on("cpu", 2, 0), library=True)
    # Where cuDNN does not attend, as many rows as of a whole step.
    large = captured_sizes(64, 8192, 8 * 10**9, library=False, division=TokenSharding.on("cuda", 2, 0))
    assert max(size.tokens for size in large if size.ranks > 1) == 2048


SEQUENCES, ROWS, LENGTH, TOKENS = 6, 40, 96, 384
CPU = torch.device("cpu")
SIZES = captured_sizes(SEQUENCES, ROWS, 10**6, library=False)


def answers(program: StepProgram, config: ModelConfig, kept: DcpShard, replayed: Replayed | None) -> list[list[int]]:
    """The tokens of some sequences, by an engine's loop. replayed: records its steps on what counts as a device with
    memory of its own; None: they are launched eagerly."""
    shape = replace(PoolShape.of(config, 4, torch.float32), kept=kept)
    pages = PageAllocator(TOKENS // shape.page_tokens, shape.page_tokens)
    sizes = plain_sizes(shape, SEQUENCES, ROWS, LENGTH)
    runner = Runner(program, sizes, config, [KVPool(shape, pages.num_pages, CPU)], CPU, 61)
    if replayed is not None:
        tables = runner._tables
        tables.on_device, tables._shared = torch.zeros(tables.rows.shape, dtype=torch.int32), False
        runner._captured_graphs = lambda: replayed  # type: ignore[method-assign,assignment,return-value]
        runner.capture(StepSizes(SIZES))
    scheduler = Scheduler(
        SchedulerConfig(SEQUENCES, ROWS, LENGTH, 0, None),
        pages,
        PrefixTree(pages),
    )
    loop = EngineLoop(scheduler, runner, run_ahead=replayed is not None, ledger=Ledger("cpu", *(0,) * 11))
    draw, sequences = random.Random(3), []
    shared = tuple(draw.randrange(61) for _ in range(24))
    for number in range(12):
        prompt = tuple(draw.randrange(61) for _ in range(draw.choice([1, 2, 15, 17, 60])))
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.9]), seed=number, max_tokens=20, ignore_eos=True, n=draw.choice([1, 1, 2])
        )
        sequences += loop.add(Request(str(number), (*shared, *prompt) if number % 3 == 0 else prompt, params))
    for _ in loop.outputs():
        pass
    return [list(sequence.tokens) for sequence in sequences]


def on_ranks(world: World, folder: Path, name: str) -> list[list[list[int]]]:
    # Inputs come to a place of their own, as on a device.
    Staging.target = lambda self, size: torch.full((size,), -77, dtype=torch.int32)  # type: ignore[method-assign]
    Staging.send = lambda self, target: target.copy_(self.host[: len(target)])  # type: ignore[method-assign]
    mesh = Mesh.of(world, {"tp": world.size})
    config = divisible_config(name, num_key_value_heads=1, max_position_embeddings=128)
    model = random_model(config, torch.float32).requires_grad_(False)
    part, own = shard_of(model, config, world.size, world.rank, mesh.axis("tp"), key_ranks=2)
    part = replace(part, axes={**part.axes, "dcp": mesh.neighbours("dcp", 2)})
    program = step_program(own, shard=part, page_size=4)
    replayed = Replayed()
    found = [answers(program, part.config, part.kept, one) for one in (None, replayed)]
    sizes = {key[0] for key in replayed.replayed}  # type: ignore[index]
    assert any(size.tokens == size.sequences for size in sizes)
    assert any(size.tokens != size.sequences for size in sizes)
    whole = step_program(model)
    return [*found, answers(whole, config, ALL_KEYS, None)]


@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_recorded_steps_have_the_ids_of_one_rank(name: str, tmp_path: Path) -> None:
    for eager, captured, alone in run_ranks(on_ranks, 2, tmp_path, name=name):
        assert min(map(len, alone)) > 20
        assert eager == alone
        assert captured == alone


@pytest.fixture
def divided(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on draw so."""
    config, _ = weights.resolve(str(folder), "auto")

    class OfOneOfSeveral(StepProgram):
        @staticmethod
        def of(model: nn.Module, asked: EngineConfig, target: Target, sizes: EngineSizes | None = None) -> StepProgram:
            shard = RankShard.of(config, 1, 0, Axis("tp", 1, 0, (0,), None))
            found = StepProgram.of(model, asked, replace(target, shard=shard), sizes)
            assert operation_counts(found.draw)["best_in_shard"] == 1
            assert operation_counts(found.draw_filtered)["gumbel_sample"] == 1
            return found

    monkeypatch.setattr(executor, "StepProgram", OfOneOfSeveral)


def test_recorded_steps_draw_with_filters_only_where_some_row_has_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, divided: None
) -> None:
    with monkeypatch.context() as undivided:
        undivided.setattr(executor, "StepProgram", StepProgram)
        wanted = ids(LLM(folder, **OPTIONS))
    graphs = Replayed()
    llm, captured = recording(folder, monkeypatch, graphs)
    assert ids(llm) == wanted
    assert {key[1] for key in graphs.replayed} == {"run", "draw", "draw plain"}

    def replayed(**params: Any) -> set[str]:
        graphs.replayed.clear()
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=5, **params), use_tqdm=False)
        return {key[1] for key in graphs.replayed}

    assert replayed(temperature=0) == replayed(temperature=1) == {"run", "draw plain"}
    assert replayed(temperature=0, top_k=5) == {"run", "draw plain"}  # filters do not change what is likeliest
    assert replayed(temperature=1, top_p=0.9) == {"run", "draw"}
    captured.drop()
    assert not graphs.runs  # messages in what is left would keep ranks together


def test_steps_that_are_not_recorded_and_what_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, divided: None
) -> None:
    prompts = [{"prompt_token_ids": [*range(3 + number, 40)]} for number in range(4)]
    common: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, prompt_logprobs=2, logprobs=3, **common),
        SamplingParams(temperature=0.8, seed=1, top_k=4, presence_penalty=1.0, logprobs=1, **common),
        SamplingParams(temperature=0.8, seed=2, logit_bias={7: 3.0}, **common),
        SamplingParams(
            temperature=0,
            structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
            **common | {"ignore_eos": False},
        ),
    ]

    def told() -> list[Any]:
        outputs = LLM(folder, **OPTIONS).generate(prompts, params, use_tqdm=False)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]

    found = told()
    monkeypatch.setattr(executor, "StepProgram", StepProgram)
    for own, one in zip(found, told(), strict=True):
        assert own[0] == one[0]
        for mine, other in zip(own[1:], one[1:], strict=True):
            assert (mine is None) == (other is None)
            for position, wanted in zip(mine or (), other or (), strict=True):
                if wanted is not None:
                    assert {id: entry.rank for id, entry in position.items()} == {
                        id: entry.rank for id, entry in wanted.items()
                    }
                    for id, entry in wanted.items():
                        assert position[id].logprob == pytest.approx(entry.logprob, abs=1e-5)
