"""The engine before its first request: prompts have run, and nothing tells of them."""

from __future__ import annotations

import pytest

from strata.engine.build import EngineConfig, build_engine
from strata.engine.scheduling.scheduler import Statistics
from strata.engine.warm_up import warm_up

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("longest", "pages"), [(8, 2000), (4096, 2), (4096, 2000)])
def test_prompts_run_and_are_forgotten(longest: int, pages: int) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": longest, "num_pages": pages}
    engine = build_engine(EngineConfig.from_options("0.6B", options), log=lambda _: None)
    warm_up(engine)
    assert engine.loop.idle
    assert engine.loop.scheduler.statistics == Statistics()
    engine.loop.scheduler.check()
