"""Four ranks answer as one, and end together."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.engine.faults import EngineFault

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_pages": 64, "max_model_len": 256, "verbose": False}
PROMPTS = [[(7 * place + 3) % 300 for place in range(length)] for length in (90, 5)]


def ids(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_four_ranks_that_add_up_in_pairs_first_answer_as_one() -> None:
    """Long prompts in 8 bits between the pairs, too."""
    alone = ids(LLM(**OPTIONS))
    assert ids(LLM(tensor_parallel_size=4, all_reduce_group_size=2, **OPTIONS)) == alone


def test_four_ranks_answer_as_one_and_one_that_is_killed_is_named() -> None:
    llm = LLM(tensor_parallel_size=4, **OPTIONS)
    assert ids(llm) == ids(LLM(**OPTIONS))
    ranks = llm.engine.ranks
    assert ranks is not None
    ranks.check_ids()
    others = ranks.processes
    assert list(others) == [1, 2, 3]

    os.kill(others[2], signal.SIGKILL)
    with pytest.raises(EngineFault, match=re.escape(f"rank 2 of 4 (process {others[2]}) was killed by SIGKILL")):
        ids(llm)
    assert not any(Path(f"/proc/{pid}").exists() for pid in others.values())
