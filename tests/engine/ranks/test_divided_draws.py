"""An engine that draws as ranks that divide the vocabulary do: one rank, whose part is all ids, in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from strata import LLM, SamplingParams
from strata.comm.mesh import Axis
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.engine.program.program import StepProgram
from strata.engine.program.source import Target
from strata.engine.startup import executor
from strata.graph.walk import operation_counts
from strata.models import weights
from strata.parallel.serving_shard import RankShard
from tests.engine.program.test_recorded_steps import OPTIONS, Replayed, ids, recording


@pytest.fixture
def divided(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on draw so."""
    config, _ = weights.resolve(str(folder), "auto")

    class OfOneOfSeveral(StepProgram):
        @staticmethod
        def of(model: nn.Module, asked: EngineConfig, target: Target, sizes: EngineSizes | None = None) -> StepProgram:
            shard = RankShard.of(config, 1, 0, Axis("tp", 1, 0, (0,), None))
            found = StepProgram.of(model, asked, replace(target, shard=shard), sizes)
            assert operation_counts(found.draw)["best_in_part"] == 1
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
    llm, recorded = recording(folder, monkeypatch, graphs)
    assert ids(llm) == wanted
    assert {key[1] for key in graphs.replayed} == {"run", "draw", "draw plain"}

    def replayed(**params: Any) -> set[str]:
        graphs.replayed.clear()
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=5, **params), use_tqdm=False)
        return {key[1] for key in graphs.replayed}

    assert replayed(temperature=0) == replayed(temperature=1) == {"run", "draw plain"}
    assert replayed(temperature=0, top_k=5) == {"run", "draw plain"}  # filters do not change what is likeliest
    assert replayed(temperature=1, top_p=0.9) == {"run", "draw"}
    recorded.drop()
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
