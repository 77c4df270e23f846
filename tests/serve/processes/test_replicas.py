"""A server of two engines: requests are divided among them, and go on when one is lost."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from tests.serve.running import ENGINE, Running, command_line, is_alive, running, wait_for


def engines(server: Running) -> list[int]:
    """Process ids of the two engines."""

    def found() -> list[int]:
        return [one for one in server.children() if ENGINE in command_line(one)]

    both: list[int] = wait_for(lambda: found() if len(found()) == 2 else None)
    return both


def answer(server: Running) -> str:
    text: str = server.complete(temperature=0, max_tokens=40).json()["choices"][0]["text"]
    return text


def await_restarts(server: Running, count: int) -> None:
    wait_for(lambda: server.metric("strata_engine_restarts_total") == count, server.output)


def test_a_lost_replica_leaves_the_other_serving_and_is_replaced() -> None:
    with running("--data-parallel-size", "2", "--device", "cpu", "--dtype", "float32") as server:
        expected = answer(server)
        assert [answer(server) for _ in range(3)] == [expected] * 3
        steps = server.metric("strata_engine_steps_total")
        first, second = engines(server)
        for losses, lost in enumerate((first, second), 1):
            with server.stream(max_tokens=1000) as one, server.stream(max_tokens=1000, prompt="Another") as other:
                next(one), next(other)
                os.kill(lost, signal.SIGKILL)
                lasts = [list(events)[-1] for events in (one, other)]
            # Each replica had one of the two: the one that was lost says so, the other ends as it would have.
            assert sorted("error" in last for last in lasts) == [False, True]
            assert answer(server) == expected
            assert server.status("/health") == 200
            await_restarts(server, losses)
            assert "of replica" in server.output()
            assert not is_alive(lost)
            assert answer(server) == expected
        assert server.metric("strata_engine_steps_total") > steps
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: answer(server), range(16))) == {expected}
        children = server.children()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not any(map(is_alive, children))
        assert not server.folder.exists()


def test_without_restarts_the_server_ends_with_its_last_replica() -> None:
    with running("--data-parallel-size", "2", "--device", "cpu", "--no-restart-engine") as server:
        first, second = engines(server)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: "was killed" in server.output(), server.output)
        assert server.complete(max_tokens=4).status_code == 200
        os.kill(second, signal.SIGKILL)
        assert server.wait() == 1
        assert not server.folder.exists()


def test_several_api_processes_share_the_replicas() -> None:
    with running("--data-parallel-size", "2", "--api-workers", "2", "--device", "cpu", "--dtype", "float32") as server:
        expected = answer(server)
        os.kill(engines(server)[0], signal.SIGKILL)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: server.complete(temperature=0, max_tokens=40), range(16)))
        # What had begun in the engine as it was killed may have been told so; all else was answered by the other.
        assert {one.status_code for one in answers} <= {200, 503}
        assert {one.json()["choices"][0]["text"] for one in answers if one.status_code == 200} == {expected}
        await_restarts(server, 1)
        assert answer(server) == expected
