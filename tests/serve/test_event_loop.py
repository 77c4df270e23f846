"""Servers and clients run on uvloop where it is, and without it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from strata.serve.event_loop import new_event_loop


@pytest.mark.parametrize("is_there", [True, False])
def test_uvloop_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    if is_there:
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)

    async def kind() -> str:
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(kind()) == ("uvloop" if is_there else "asyncio")
