"""The engine before its first request: prompts have run, and nothing tells of them."""

from __future__ import annotations

import pytest

from strata import LLM
from strata.engine.scheduling.statistics import Statistics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("longest", "pages"), [(2, 2000), (8, 2000), (4096, 2), (4096, 2000)])
def test_prompts_run_and_are_forgotten(longest: int, pages: int) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": longest, "num_pages": pages}
    engine = LLM("0.6B", **options).engine
    assert engine.startup["warm up"] > 0
    assert engine.loop.idle
    assert engine.loop.scheduler.statistics == Statistics()
    assert (engine.pages.free, engine.pages.idle) == (pages, 0)
    engine.loop.scheduler.check()
