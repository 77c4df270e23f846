"""What rank 0 waits for on a device that waits for a rank that has ended."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata.engine.embeddings.pooling import Pooled, PoolRequest
from strata.engine.faults import EngineFault
from strata.engine.plan import StepPlan
from strata.engine.ranks import ranked_runner
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

    asked, stages = 0, 1

    def send(self, message: object) -> int:
        return 0

    def forget_steps(self, before: int) -> None:
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
    assert not pooled.ended
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


def test_a_handler_of_ctrl_c_that_is_not_pythons_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program in C that has Python in it."""

    def handle(number: int, handler: object) -> None:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")

    theirs = SimpleNamespace(SIGINT=signal.SIGINT, getsignal=lambda number: None, signal=handle)
    monkeypatch.setattr(ranked_runner, "signal", theirs)
    runner: Any = SimpleNamespace(settle=lambda: None)
    followers: Any = Lost()
    RankedRunner(runner, followers, None, None).settle()
