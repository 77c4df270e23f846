"""A server over two ranks: whichever is lost, requests are told, another engine is started, and nothing is left."""

from __future__ import annotations

import os
import signal

import pytest

from tests.serve.running import Running, command_line, is_alive, running, wait_for

FOLLOWER = b"strata.engine.ranks.follower"


def follower(server: Running) -> int:
    found: int = wait_for(lambda: next((one for one in server.children() if FOLLOWER in command_line(one)), 0))
    return found


@pytest.fixture(scope="module")
def alone() -> str:
    """What one rank answers."""
    with running("--dtype", "float32") as server:
        return answer(server)


def answer(server: Running) -> str:
    text: str = server.complete(temperature=0, max_tokens=40).json()["choices"][0]["text"]
    return text


def test_a_rank_that_is_lost_ends_the_requests_and_the_engine_is_replaced(alone: str) -> None:
    with running("--tensor-parallel-size", "2", "--dtype", "float32") as server:
        assert answer(server) == alone
        for losses, lose in enumerate((follower, Running.engine), 1):
            engine, other = server.engine(), follower(server)
            with server.stream(max_tokens=1000) as events:
                next(events)
                os.kill(lose(server), signal.SIGKILL)
                last = list(events)[-1]
            assert last["error"]["code"] == "engine_dead"
            if lose is Running.engine:
                assert "the engine process was killed by SIGKILL" in last["error"]["message"]
            wait_for(lambda: server.status("/health") == 503, server.output)
            wait_for(lambda: server.status("/ready") == 200, server.output)
            assert answer(server) == alone
            wait_for(lambda gone=(engine, other): not any(map(is_alive, gone)))
            assert server.metric("strata_engine_restarts_total") == losses
            if lose is follower:
                assert f"rank 1 of 2 (process {other}) was killed by SIGKILL" in last["error"]["message"]
                assert f"rank 1 of 2 (process {other}) was killed by SIGKILL" in server.output()
        children = server.children()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        wait_for(lambda: not any(map(is_alive, children)))
        assert not server.folder.exists()
