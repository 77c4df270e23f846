"""An engine on another GPU than the first: what it answers, and what it takes of the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from tests.gpu.ranks import found_by_ranks

pytestmark = pytest.mark.gpu


def answers(rank: int) -> dict[str, Any]:
    llm = LLM(device=f"cuda:{rank}", max_num_seqs=4, num_pages=200)
    asked = SamplingParams(temperature=0, max_tokens=40)
    ids = [list(one.outputs[0].token_ids) for one in llm.generate(["12 + 30 =", "The word"], asked, use_tqdm=False)]
    return {"ids": ids, "is_there": llm.engine.device.index == rank, "of_first": torch.cuda.memory_allocated(0)}


def test_any_gpu_answers_as_the_first(tmp_path: Path) -> None:
    first, second = found_by_ranks(answers, 2, tmp_path, timeout=300, joined=False)
    assert first["is_there"]
    assert second["is_there"]
    assert first["ids"] == second["ids"]
    assert (first["of_first"] > 0, second["of_first"]) == (True, 0)
