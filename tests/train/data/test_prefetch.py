"""Steps prepared by a thread: the same ones, not too many, errors where they belong, no thread left behind."""

from __future__ import annotations

import threading
import time

import pytest

from strata.train.data.loader import DataPosition, Loader, Step, prefetch


class Counted(Loader):
    """Step n ends at window n + 1; `asked` counts them; the step of window `bad` is an error."""

    def __init__(self, bad: int | None = None) -> None:
        self.asked, self.bad = 0, bad

    def step(self, place: DataPosition) -> Step:
        self.asked += 1
        if place.window == self.bad:
            raise OSError("the disk is gone")
        return Step([], DataPosition(place.window + 1), 0, 1.0)


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "data"]


def settled(loader: Counted, least: int) -> int:
    """How many steps have been asked for once so many have come and no more do."""
    deadline = time.monotonic() + 60
    while loader.asked < least and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    return loader.asked


def test_all_steps_in_order() -> None:
    with prefetch(Counted(), DataPosition(7), 20) as steps:
        assert [step.next.window for step in steps] == list(range(8, 28))
    assert not threads()


def test_it_runs_as_far_ahead_as_asked_and_no_further() -> None:
    loader = Counted()
    with prefetch(loader, DataPosition(), 100, most=3) as steps:
        assert settled(loader, 3) == 3
        next(steps)
        next(steps)
        assert settled(loader, 5) == 5
    assert not threads()


def test_an_error_comes_where_its_step_would() -> None:
    with prefetch(Counted(bad=2), DataPosition(), 9) as steps:
        assert [next(steps).next.window for _ in range(2)] == [1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            next(steps)
    assert not threads()


def test_leaving_early_ends_the_thread() -> None:
    with prefetch(Counted(), DataPosition(), 9) as steps:
        next(steps)
    assert not threads()
    with prefetch(Counted(), DataPosition(), 0) as steps:
        assert list(steps) == []
    assert not threads()
