"""Ranks with sequences of their own whose rows go to the ranks of their experts alone answer as one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.program.program import StepChoice, StepProgram
from strata.engine.program.shape import StepShape
from strata.graph.ranks.narrow_messages import NARROW_TOKENS
from tests.engine.ranks.layouts import CONFIG

# So wide that half a row less there and back is worth it from 1,025 tokens of a rank on, and else as small as can be.
WIDE: dict[str, Any] = CONFIG | {
    "hidden_size": 16384,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 4,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "norm_topk_prob": False,
    "vocab_size": 97,
    "max_position_embeddings": 2048,
}
SIZES: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "num_pages": 160,
    "max_num_batched_tokens": 1200,
    "max_num_seqs": 4,
    "enable_prefix_caching": False,
    "seed": 0,
    "verbose": False,
}
RANKED: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True}
# Two fill a step of one rank each, one is shorter, and one takes a step that is too short.
PROMPTS = [[(step * place + 3) % 97 for place in range(length)] for step, length in ((5, 1190), (7, 1100), (11, 300))]


def logprobs(llm: LLM, prompts: list[list[int]]) -> list[list[dict[int, float]]]:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [{id: one.logprob for id, one in each.items()} for each in out.outputs[0].logprobs or ()] for out in outputs
    ]


def test_ranks_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    wanted = logprobs(LLM(tmp_path, **SIZES), PROMPTS)
    llm = LLM(tmp_path, **RANKED, **SIZES)
    variant = llm.engine.program.variant("exchanged_logits")
    assert variant is not None
    assert 1024 < variant.least < 1050
    ran: list[int] = []
    forward = variant.graph.forward

    def noted(batch: Any, rows: torch.Tensor) -> Any:
        ran.append(len(batch.tokens))
        return forward(batch, rows)

    monkeypatch.setattr(variant.graph, "forward", noted)
    # Together, then one alone, beside which the other rank has padding.
    for prompts, expected in ((PROMPTS, wanted), (PROMPTS[:1], wanted[:1])):
        ran.clear()
        found = logprobs(llm, prompts)
        assert ran
        assert min(ran) >= variant.least
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
    assert llm.engine.ranks is not None
    llm.engine.ranks.check_ids()


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
