"""A server of two engines: requests are divided among them, and go on when one is lost."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

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
            with server.stream(max_tokens=400) as one, server.stream(max_tokens=400, prompt="Another") as other:
                next(one), next(other)
                os.kill(lost, signal.SIGKILL)
                lasts = [list(events)[-1] for events in (one, other)]
            # Each replica had one of the two: the one that was lost says so, the other ends as it would have.
            assert sorted("error" in last for last in lasts) == [False, True]
            assert answer(server) == expected
            assert server.status("/health") == 200
            await_restarts(server, losses)
            wait_for(lambda: "of replica" in server.output())
            assert not is_alive(lost)
            assert answer(server) == expected
        assert server.metric("strata_engine_steps_total") > steps
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: answer(server), range(16))) == {expected}
        children = server.children()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        wait_for(lambda: not any(map(is_alive, children)))
        assert not server.folder.exists()


def drain_and_resume(server: Running, expected: str) -> None:
    """The first replica is drained by one API process; requests that come to any of them go to the second."""

    def each(label: str) -> list[float]:
        return [server.metric(f'{label}{{.*engine="{engine}".*}}') for engine in (0, 1)]

    def replicas() -> list[dict[str, Any]]:
        reply = server.http.get("/replicas")
        assert reply.status_code == 200, (reply.text, server.output())
        found: list[dict[str, Any]] = reply.json()["data"]
        return found

    assert [one["standing"] for one in replicas()] == ["serving", "serving"]
    assert {one["pid"] for one in replicas()} == set(engines(server))
    assert server.http.post("/replicas/0/drain").json()["standing"] in ("draining", "drained")
    refused = server.http.post("/replicas/1/drain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_replica")
    assert server.http.post("/replicas/2/drain").status_code == 404
    wait_for(lambda: replicas()[0]["standing"] == "drained", server.output)
    steps = each("strata_engine_steps_total")
    for _ in range(4):
        with httpx.Client(base_url=server.url, timeout=60) as other:  # a connection that any process may get
            question = {"model": "builtin", "prompt": "47 + 38 =", "temperature": 0, "max_tokens": 40}
            assert other.post("/v1/completions", json=question).status_code == 200
    assert answer(server) == expected
    wait_for(lambda: each("strata_engine_steps_total")[1] > steps[1])
    assert each("strata_engine_steps_total")[0] == steps[0]
    assert server.http.post("/replicas/0/resume").json()["standing"] == "serving"


def test_without_restarts_the_server_ends_with_its_last_replica() -> None:
    with running("--data-parallel-size", "2", "--device", "cpu", "--no-restart-engine") as server:
        first, second = engines(server)
        refused = server.http.post("/replicas/0/drain")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_admin")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: "was killed" in server.output(), server.output)
        assert server.complete(max_tokens=4).status_code == 200
        os.kill(second, signal.SIGKILL)
        assert server.wait() == 1
        assert not server.folder.exists()


def test_several_api_processes_share_the_replicas() -> None:
    options = ("--data-parallel-size", "2", "--api-workers", "2", "--admin-keys", "anonymous")
    with running(*options, "--device", "cpu", "--dtype", "float32") as server:
        expected = answer(server)
        drain_and_resume(server, expected)
        os.kill(engines(server)[0], signal.SIGKILL)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: server.complete(temperature=0, max_tokens=40), range(16)))
        # What had begun in the engine as it was killed may have been told so; all else was answered by the other.
        assert {one.status_code for one in answers} <= {200, 503}
        cause = "the engine is gone: the engine process of replica 0 was killed by SIGKILL (out of memory?)"
        assert {one.json()["error"]["message"] for one in answers if one.status_code == 503} <= {cause}
        assert {one.json()["choices"][0]["text"] for one in answers if one.status_code == 200} == {expected}
        await_restarts(server, 1)
        assert answer(server) == expected
