"""Deterministic ranks: the bits of an answer depend on no rank, on no division and on nothing else that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata import LLM, SamplingParams
from strata.engine.program.program import StepChoice, StepProgram
from tests.engine.ranks.layouts import LAYOUTS, prompt


def bits(llm: LLM, prompts: list[list[int]], place: int, tokens: int, logprobs: int) -> list[dict[int, float]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    found = llm.generate(prompts, params, use_tqdm=False)[place].outputs[0].logprobs or []
    return [{id: entry.logprob for id, entry in each.items()} for each in found]


def test_ranks_that_divide_prompts_have_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["prefill context"]
    options = layout.options(tmp_path) | {"deterministic": True}
    one, two = LLM(**options), layout.over_ranks(options)
    alone, choices, choose = bits(one, [prompt(130)], 0, 2, 5), [], StepProgram.choose

    def noting(*given: object) -> StepChoice:
        choices.append(choose(*given))  # type: ignore[arg-type]
        return choices[-1]

    monkeypatch.setattr(StepProgram, "choose", noting)
    assert bits(two, [prompt(130)], 0, 2, 5) == alone
    assert choices[0].shape.share is not None


def test_bits_depend_on_no_rank_and_on_nothing_else_that_runs(tmp_path: Path) -> None:
    layout = LAYOUTS["attention dp"]
    llm = layout.over_ranks(layout.options(tmp_path) | {"deterministic": True, "enable_prefix_caching": False})
    asked, *others = [[(step * place + 3) % 300 for place in range(60 + 9 * step)] for step in range(5, 11)]
    alone = bits(llm, [asked], 0, 12, 2)
    assert len(alone) == 12
    for place in (0, 1, 4):
        assert bits(llm, [*others[:place], asked, *others[place:]], place, 12, 2) == alone
