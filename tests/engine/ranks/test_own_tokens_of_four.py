"""Four ranks with sequences of their own answer as one, and end together."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.engine.faults import EngineFault
from strata.engine.scheduling.rank_schedulers import RankPages

from .test_mixture import CONFIG, OPTIONS

RANKED: dict[str, Any] = {"tensor_parallel_size": 4, "enable_expert_parallel": True, "enable_dp_attention": True}
PROMPTS = [[(step * place + 3) % 300 for place in range(60 + 9 * step)] for step in range(5, 11)]
SHORT: dict[str, Any] = OPTIONS | {"max_num_batched_tokens": 48}


def ids(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_four_ranks_answer_as_one_and_one_that_is_killed_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    wanted = ids(LLM(tmp_path, **SHORT))
    llm = LLM(tmp_path, **RANKED, **SHORT)
    assert ids(llm) == wanted
    pages, ranks = llm.engine.pages, llm.engine.ranks
    assert isinstance(pages, RankPages)
    assert all(part.idle > 0 for part in pages.parts), "requests were to spread over ranks"
    assert ranks is not None
    ranks.check_ids()
    others = ranks.processes
    os.kill(others[3], signal.SIGKILL)
    with pytest.raises(EngineFault, match=re.escape(f"rank 3 of 4 (process {others[3]}) was killed by SIGKILL")):
        ids(llm)
    assert not any(Path(f"/proc/{pid}").exists() for pid in others.values())


def test_bits_depend_on_no_rank_and_on_nothing_else_that_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = SHORT | {"deterministic": True, "enable_prefix_caching": False}
    llm = LLM(tmp_path, **RANKED | {"tensor_parallel_size": 2}, **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)

    def bits(prompts: list[list[int]], place: int) -> list[dict[int, float]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = outputs[place].outputs[0].logprobs or []
        return [{id: entry.logprob for id, entry in each.items()} for each in found]

    asked, *others = PROMPTS
    alone = bits([asked], 0)
    assert len(alone) == 12
    for place in (0, 1, 4):
        assert bits([*others[:place], asked, *others[place:]], place) == alone
