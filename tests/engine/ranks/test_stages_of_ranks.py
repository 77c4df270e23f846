"""Stages of a pipeline whose ranks divide its matrices or its experts: they answer as one, and end together."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.engine.faults import EngineFault
from tests.engine.ranks.test_mixture import CONFIG
from tests.engine.ranks.test_ranked_engine import OPTIONS, assert_alike, assert_same_ids, prompt

DENSE: dict[str, Any] = {}
SHORT, LONG = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (12, 64))
MIXTURE = {"load_format": "dummy", "skip_tokenizer_init": True, "seed": 0}


@pytest.mark.parametrize(
    ("options", "killed"),
    [pytest.param(DENSE, 2, marks=pytest.mark.long, id="dense"), pytest.param(MIXTURE, 3, id="mixture")],
)
def test_stages_of_two_ranks_answer_as_one_and_one_that_is_killed_is_named(
    options: dict[str, Any], killed: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = {"model": tmp_path if options else None, **OPTIONS, **options}
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    four = LLM(**sizes, enable_expert_parallel=options["model"] is not None, **options)
    prompts = [prompt(130), prompt(5, 3), prompt(61, 11)]
    assert_alike(LLM(**options), four, prompts, SHORT)
    assert_same_ids(four)
    assert four.engine.ranks is not None
    others = four.engine.ranks.processes
    assert list(others) == [1, 2, 3]

    threading.Timer(0.2, os.kill, (others[killed], signal.SIGKILL)).start()
    cause = re.escape(f"rank {killed} of 4 (stage 1, process {others[killed]}) was killed by SIGKILL")
    with pytest.raises(EngineFault, match=cause):
        four.generate(prompts * 20, LONG, use_tqdm=False)
    assert not any(Path(f"/proc/{pid}").exists() for pid in others.values())
