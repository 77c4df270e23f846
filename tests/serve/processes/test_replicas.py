"""Engines of one server: several, each with its GPUs, over ranks, lost or hung; requests go on or are told."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.stub_engine import StubConfig
from strata.engine.process.messages import Add, Embed
from strata.engine.sampling_params import SamplingParams
from strata.serve.client import EngineClient, EngineGone
from strata.serve.engine_ends import EngineEnds
from strata.serve.processes.launch import engine_devices
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


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The device files of a machine with four GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("engines", "ranks", "device", "shown", "gpus"),
    [
        (4, 1, "auto", None, ["0", "1", "2", "3"]),
        (2, 2, "cuda", None, ["0,1", "2,3"]),
        (2, 1, "auto", "3, GPU-abc", ["3", "GPU-abc"]),
        (1, 1, "auto", None, None),
        (1, 1, "cuda:1", None, None),
        (2, 1, "cpu", None, None),
    ],
)
def test_each_engine_has_gpus_of_its_own_of_those_that_are_shown(
    files: Path, engines: int, ranks: int, device: str, shown: str | None, gpus: list[str] | None
) -> None:
    """None where one engine has all, or none has any."""
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    wanted = [{}] * engines if gpus is None else [{"CUDA_VISIBLE_DEVICES": one} for one in gpus]
    assert engine_devices(engines, ranks, device, environment, files) == wanted


def test_too_few_gpus_are_refused_unless_none_is_asked_for(files: Path, tmp_path_factory: Any) -> None:
    bare = tmp_path_factory.mktemp("dev")
    assert engine_devices(2, 1, "auto", {}, bare) == [{}, {}]
    for engines, ranks, device, folder, said in (
        (2, 1, "cuda", bare, "needs 2 GPUs, and there are 0"),
        (3, 2, "auto", files, "data_parallel_size=3 with 2 ranks each needs 6 GPUs, and there are 4"),
        (2, 1, "cuda:0", files, "'cuda:0' is one GPU"),
    ):
        with pytest.raises(ValueError, match=said):
            engine_devices(engines, ranks, device, {}, folder)


FOLLOWER = b"strata.engine.ranks.follower"


def follower(server: Running) -> int:
    found: int = wait_for(lambda: next((one for one in server.children() if FOLLOWER in command_line(one)), 0))
    return found


@pytest.fixture(scope="module")
def alone() -> str:
    """What one rank answers."""
    with running("--dtype", "float32") as server:
        return answer(server)


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


SILENCE = 1.0  # the stub says how it stands twice a second


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@pytest.fixture
def stub(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that speaks as the engine does and gives a token every 10 ms."""
    with subprocess.Popen([sys.executable, "-m", "benchmarks.stub_engine"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(StubConfig(address)) + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def connected(
    address: str, silence_timeout: float, ends: EngineEnds | None = None
) -> AsyncIterator[EngineClient]:
    client = await EngineClient.connect(address, timeout=120, silence_timeout=silence_timeout, ends=ends)
    try:
        yield client
    finally:
        await client.close()


def add(max_tokens: int, id: str = "a") -> Add:
    return Add(id, [1, 2, 3], SamplingParams(max_tokens=max_tokens))


async def test_all_that_wait_are_told_and_the_engine_is_killed(
    address: str, stub: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "strata.serve"):
        async with connected(address, SILENCE) as client:
            stream = client.submit(add(100_000))
            await anext(stream)
            vector = asyncio.create_task(client.embed(Embed("b", [1, 2], "mean", 0.0)))
            await asyncio.sleep(0)
            stub.send_signal(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(EngineGone, match=r"said nothing for 1 s"):
                _ = [deltas async for deltas in stream]
            assert SILENCE - 0.1 < time.monotonic() - start < SILENCE + 30
            with pytest.raises(EngineGone):
                await vector
            assert not client.alive
            assert stub.wait(60) == -signal.SIGKILL
    assert [record.getMessage() for record in caplog.records] == [
        "the engine is taken for dead and killed: it has requests and said nothing for 1 s"
    ]


async def test_a_process_without_requests_learns_why_another_killed_the_engine(
    address: str, stub: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """It would hear of the signal alone, which is most often one of a lack of memory."""
    ends = EngineEnds(tmp_path)
    async with connected(address, SILENCE, ends) as client, connected(address, SILENCE, ends) as idle:
        stream = client.submit(add(100_000))
        await anext(stream)
        stub.send_signal(signal.SIGSTOP)
        assert await idle.wait_dead() == await client.wait_dead() == "it has requests and said nothing for 1 s"
        ends.tell(stub.pid, "the engine process was killed by SIGKILL")  # as its parent does
        assert await ends.find(stub.pid) == await client.wait_dead()
        await stream.aclose()


async def test_time_without_requests_does_not_count(address: str, stub: subprocess.Popen[bytes]) -> None:
    silence = 2.5  # far more than this and the stub may be late
    async with connected(address, silence) as client:
        assert len([one async for one in client.submit(add(1))]) == 1  # sets the clock going
        stub.send_signal(signal.SIGSTOP)
        await asyncio.sleep(silence - 0.5)
        waiting = client.submit(add(1, "b"))  # soon after which the clock strikes
        await asyncio.sleep(1)
        assert client.alive
        stub.send_signal(signal.SIGCONT)
        assert len([one async for one in waiting]) == 1
        stub.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * silence)
        assert client.alive
        stub.send_signal(signal.SIGCONT)


async def test_an_engine_that_talks_and_a_program_that_was_busy_are_no_silence(
    address: str, stub: subprocess.Popen[bytes]
) -> None:
    async with connected(address, SILENCE) as client:
        count, start = 0, time.monotonic()
        async for deltas in client.submit(add(300)):
            count += sum(len(delta.tokens) for delta in deltas)
            if count < 5:
                time.sleep(2 * SILENCE)  # the program hears nothing, but could
        assert count == 300
        assert time.monotonic() - start > 2 * SILENCE


async def test_without_a_bound_nothing_is_killed(address: str, stub: subprocess.Popen[bytes]) -> None:
    async with connected(address, 0.0) as client:
        stream = client.submit(add(3))
        stub.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1)
        assert client.alive
        stub.send_signal(signal.SIGCONT)
        assert sum(len(delta.tokens) for deltas in [one async for one in stream] for delta in deltas) == 3
