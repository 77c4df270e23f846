"""A device that is behind, also as Ctrl-C comes: answers stay right, and later steps do not reach those to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.staging import Staging

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000  # about a hundredth of a second
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "deterministic": True, "num_pages": 200, "max_num_seqs": 8}


def ids(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("before", [2, 4, 6])
def test_an_interrupted_call_leaves_nothing(before: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [(7 * place) % 300 for place in range(240)]
    wanted = ids(LLM(folder, enable_prefix_caching=False, **OPTIONS), [prompt])
    llm = LLM(folder, max_num_batched_tokens=48, **OPTIONS)
    runner: Any = llm.engine.loop._runner
    launch, launches = runner.launch, 0

    def interrupted(plan: Any) -> Any:
        nonlocal launches
        launches += 1
        torch.cuda._sleep(CYCLES)
        if launches == before:
            raise KeyboardInterrupt
        return launch(plan)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ids(llm, [prompt])
    assert ids(llm, [prompt]) == wanted
    assert ids(llm, [prompt]) == wanted  # from the cache


@pytest.mark.parametrize("chunk", [33, 48, 512])
def test_prompts_that_differ_in_their_last_token_together(chunk: int, folder: Path) -> None:
    start = [(11 * place) % 300 for place in range(32)]
    prompts = [[*start, last] for last in range(6)]
    wanted = ids(LLM(folder, enable_prefix_caching=False, **OPTIONS), prompts)
    assert ids(LLM(folder, max_num_batched_tokens=chunk, **OPTIONS), prompts) == wanted


def test_a_buffer_is_filled_again_once_it_has_left() -> None:
    staging = Staging(1000, torch.device("cuda"))
    arrived = []
    for value in range(4):
        staging.wait()
        staging.host.fill_(value)
        torch.cuda._sleep(CYCLES)
        target = staging.target(1000)
        staging.send(target)
        arrived.append(target)
    assert [target.unique().tolist() for target in arrived] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_of_many_chunks_alone(deterministic: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"dtype": "float32", "deterministic": deterministic, "num_pages": 200, "max_num_seqs": 4}
    prompts = [[(number + 7 * place) % 300 for place in range(240)] for number in range(3)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def ids(llm: LLM) -> list[list[int]]:
        asked = [llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0] for prompt in prompts]
        return [output.outputs[0].token_ids for output in asked]

    wanted = ids(LLM(folder, enable_prefix_caching=False, **options))
    for chunk in (80, 60, 30, 12):
        llm = LLM(folder, enable_prefix_caching=False, max_num_batched_tokens=chunk, **options)
        runner: Any = llm.engine.loop._runner
        launch = runner.launch

        def late(plan: Any, launch: Any = launch) -> Any:
            torch.cuda._sleep(CYCLES)
            return launch(plan)

        monkeypatch.setattr(runner, "launch", late)
        assert ids(llm) == wanted, f"in chunks of {chunk}"
