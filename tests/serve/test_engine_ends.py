"""How engines have ended, in files: what cannot be written or read holds nobody up."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from strata.serve import engine_ends
from strata.serve.engine_ends import EngineEnds


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineEnds:
    monkeypatch.setattr(engine_ends, "_MOST_SECONDS", 0.05)
    return EngineEnds(tmp_path)


def test_what_is_told_is_found_by_every_reader_and_of_that_process_alone(ends: EngineEnds, tmp_path: Path) -> None:
    ends.tell(7, "it was killed")
    assert [asyncio.run(EngineEnds(tmp_path).find(pid)) for pid in (7, 7, 8)] == ["it was killed"] * 2 + [None]


def test_what_is_told_first_stays(ends: EngineEnds) -> None:
    """A client kills an engine that is silent, of which its parent sees the signal alone."""
    ends.tell(7, "it said nothing")
    ends.tell(7, "it was killed")
    assert asyncio.run(ends.find(7)) == "it said nothing"


def test_a_new_process_of_the_same_number_has_not_ended(ends: EngineEnds) -> None:
    ends.begin(7)
    ends.tell(7, "it was killed")
    ends.begin(7)
    assert asyncio.run(ends.find(7)) is None


@pytest.mark.parametrize("name", [f"ended-7.{os.getpid()}", "ended-7"], ids=["before it is whole", "whole"])
def test_where_no_file_can_be_written_nothing_is_told_and_nothing_fails(
    ends: EngineEnds, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / name).mkdir()  # as a full disk does, for root too
    ends.tell(7, "it was killed")
    assert "clients are not told how an engine ended" in caplog.text
    assert asyncio.run(ends.find(7)) is None
