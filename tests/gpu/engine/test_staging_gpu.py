"""A device that is behind: what the host prepares for later steps does not reach those that have yet to begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.staging import Staging

pytestmark = pytest.mark.gpu

# About a hundredth of a second, in which the host launches several steps.
CYCLES = 20_000_000


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
