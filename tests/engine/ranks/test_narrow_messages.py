"""Sums over ranks in 8 bits through the engine: large steps run that graph, and answers stay nearly what they were."""

from __future__ import annotations

from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.engine.program.program import StepChoice, StepProgram
from strata.engine.program.shape import StepShape
from strata.graph.ranks.narrow_messages import NARROW_TOKENS

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "enable_prefix_caching": False, "verbose": False}


def sums(number: int) -> str:
    """Additions, the last one without its result."""
    given = [((number * 7 + row * 13) % 90 + 3, (number * 11 + row * 5) % 90 + 2) for row in range(13)]
    return "\n".join(f"{one} + {other} = {one + other}" for one, other in given)[:-2]


def test_answers_stay_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = [sums(number) for number in range(10)], SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    one = LLM("builtin", **OPTIONS)
    two = LLM("builtin", tensor_parallel_size=2, message_dtype="fp8", **OPTIONS)
    choose, ran = StepProgram.choose, []

    def noted(program: StepProgram, shape: StepShape) -> StepChoice:
        choice = choose(program, shape)
        ran.append((shape.tokens >= NARROW_TOKENS, choice.variant.name == "narrow_logits"))
        return choice

    monkeypatch.setattr(StepProgram, "choose", noted)
    wanted, found = (
        [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)] for llm in (one, two)
    )
    # Of the one rank's large steps none; of the two ranks' all, and no others.
    assert {(True, False), (True, True)} <= set(ran)
    assert (False, True) not in ran
    assert two.engine.ranks is not None
    two.engine.ranks.check_ids()
    assert sum(one.token_ids == other.token_ids for one, other in zip(wanted, found, strict=True)) >= 8
