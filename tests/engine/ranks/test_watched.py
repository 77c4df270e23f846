"""What rank 0 waits for on a device that waits for a rank that has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata.engine.embeddings.pooling import Pooled, PoolRequest
from strata.engine.faults import EngineFault
from strata.engine.plan import StepPlan
from strata.engine.ranks.ranked_runner import RankedPooler, RankedRunner
from strata.engine.runner import Launched


class Never:
    """An event that does not come."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pytest.fail("rank 0 waits inside the driver")


class Lost:
    """Followers of which one is lost once they have been asked a few times."""

    asked = 0

    def send(self, message: object) -> None:
        pass

    def check(self) -> None:
        self.asked += 1
        if self.asked > 3:
            raise EngineFault("rank 1 of 2 has ended")


def test_vectors_under_way_end_with_a_rank() -> None:
    event: Any = Never()
    pooler: Any = SimpleNamespace(launch=lambda requests: Pooled(torch.zeros(1, 4), event))
    followers: Any = Lost()
    pooled = RankedPooler(pooler, followers).launch([PoolRequest([1], "last")])
    assert not pooled.done
    with pytest.raises(EngineFault, match="rank 1 of 2 has ended"):
        pooled.wait()


def test_a_step_under_way_ends_with_a_rank() -> None:
    event: Any = Never()
    runner: Any = SimpleNamespace(launch=lambda plan: Launched(plan, torch.zeros(1), event))
    followers: Any = Lost()
    step: Any = RankedRunner(runner, followers, None, None).launch(StepPlan((), (), (), (), 0))
    assert not step.ended
    with pytest.raises(EngineFault, match="rank 1 of 2 has ended"):
        step.wait()
