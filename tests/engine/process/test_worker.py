"""A real engine process and real clients: what they get, how fast pages come back, and how it ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from strata import LLM, SamplingParams
from strata.engine.process.messages import Add, Delta, Embed, FromEngine, Hello, Step, TokenLogprobs
from strata.engine.process.worker import main
from strata.serve.client import EngineClient, EngineGone, Stream
from tests.engine.process.worker_process import BUILTIN, WorkerProcess

PROMPTS = ["Once upon a time", "The capital of", "def main():", "2 + 2 ="]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 150,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "deterministic": True,
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with WorkerProcess(tmp_path_factory.mktemp("engine"), **OPTIONS) as process:
        yield process


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(BUILTIN, device="cpu", **OPTIONS)


@asynccontextmanager
async def using(worker: WorkerProcess) -> AsyncIterator[EngineClient]:
    """A client of its own; the engine is as free afterwards as before."""
    client = await EngineClient.connect(worker.address, timeout=180)
    try:
        yield client
        await until(lambda: client.statistics.kv_usage == 0)
    finally:
        await client.close()
    assert worker.process.poll() is None


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition, which must come true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it does not become true"
        await asyncio.sleep(0.001)


async def whole(stream: Stream) -> dict[int, Delta]:
    """All of a request's deltas, joined by sample."""
    joined: dict[int, Delta] = {}
    async for deltas in stream:
        for delta in deltas:
            before = joined.get(delta.index)
            tokens = [*(before.tokens if before else ()), *delta.tokens]
            logprobs = [*((before.logprobs if before else None) or ()), *(delta.logprobs or ())]
            joined[delta.index] = msgspec.structs.replace(delta, tokens=tokens, logprobs=logprobs)
    return joined


async def test_tokens_are_those_of_the_offline_api(worker: WorkerProcess, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    params = [
        GREEDY,
        replace(GREEDY, logprobs=2, prompt_logprobs=1),
        SamplingParams(n=4, temperature=0.9, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True),
        replace(GREEDY, bad_words=["a"], repetition_penalty=1.3),
    ]
    want = llm.generate(PROMPTS, params, use_tqdm=False)
    async with using(worker) as client:
        assert client.ready.vocab_size == 4096
        words = [
            [tokenizer.encode(text, add_special_tokens=False) for text in ("a", " a")] if p.bad_words else []
            for p in params
        ]
        streams = [
            client.submit(Add(f"{i}", output.prompt_token_ids, params[i], arrival=time.monotonic(), bad_words=words[i]))
            for i, output in enumerate(want)
        ]
        got = await asyncio.gather(*map(whole, streams))
        for output, deltas in zip(want, got, strict=True):
            for sample in output.outputs:
                told = deltas[sample.index]
                assert told.tokens == sample.token_ids
                assert (told.finish_reason, told.stop_reason) == (sample.finish_reason, sample.stop_reason)
        logprobs, expected = got[1][0].logprobs, want[1].outputs[0].logprobs
        assert logprobs is not None
        assert expected is not None
        assert len(logprobs) == len(expected)
        assert all(map(agrees, logprobs, expected))
        prompt_expected = want[1].prompt_logprobs
        assert prompt_expected is not None
        assert len(streams[1].prompt_logprobs) == len(prompt_expected) - 1
        assert all(map(agrees, streams[1].prompt_logprobs, prompt_expected[1:]))


def agrees(told: TokenLogprobs, expected: Any) -> bool:
    return all(expected[id].logprob == value for id, value in zip(told.top_ids, told.top_logprobs, strict=True)) and (
        (told.logprob, told.rank) == expected[told.token][:2]
    )


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_an_abort_frees_the_pages_long_before_the_request_would_end(worker: WorkerProcess, phase: str) -> None:
    async with using(worker) as client:
        if phase == "prefill":  # 15 steps
            streams = [client.submit(Add("long", list(range(100, 1000)), replace(LONG, max_tokens=50)))]
            await until(lambda: client.statistics.running == 1)
        else:
            streams = [client.submit(Add(f"{i}", [i + 5] * 20, LONG)) for i in range(10)]
            await until(lambda: (client.statistics.running, client.statistics.waiting) == (8, 2))
        if phase == "queued":
            await streams.pop().aclose()
            await until(lambda: client.statistics.waiting == 1)
        steps = client.statistics.steps
        for stream in streams:
            await stream.aclose()
        client.abort("0")
        client.abort("never seen")
        await until(lambda: client.statistics.running == client.statistics.kv_usage == 0)
        assert client.statistics.steps - steps < 450  # of 900


async def test_a_client_that_vanishes_leaves_nothing_behind(worker: WorkerProcess) -> None:
    async with using(worker) as client:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(worker.address)
        for message in (Hello(), *(Add(f"{i}", [i + 5] * 20, LONG) for i in range(10)), Embed("e", [1])):
            socket.send(msgspec.msgpack.encode(message))
        await until(lambda: client.statistics.running == 8)
        steps = client.statistics.steps
        context.destroy(linger=0)
        await until(lambda: client.statistics.running + client.statistics.waiting == 0)
        assert client.statistics.steps - steps < 600  # of 900


async def test_a_client_that_does_not_read_delays_nobody_and_loses_nothing(worker: WorkerProcess) -> None:
    async with using(worker) as client:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.set_hwm(1)
        socket.setsockopt(zmq.RCVBUF, 4096)
        socket.connect(worker.address)
        params = replace(LONG, max_tokens=300, logprobs=20)  # some 300 bytes a frame
        for message in (Hello(), Add("slow", [5, 6], params)):
            socket.send(msgspec.msgpack.encode(message))
        told = await whole(client.submit(Add("a", [5, 6], params)))
        assert len(told[0].tokens) == 300
        await until(lambda: client.statistics.running == 0)
        tokens: list[int] = []
        while len(tokens) < 300:
            assert socket.poll(30_000)
            message = msgspec.msgpack.decode(socket.recv(), type=FromEngine)
            if isinstance(message, Step):
                tokens += [token for delta in message.deltas for token in delta.tokens]
        assert tokens == told[0].tokens
        context.destroy(linger=0)


async def test_frames_that_are_no_messages_do_no_harm(worker: WorkerProcess) -> None:
    async with using(worker) as client:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(worker.address)
        socket.send(b"\xc1garbage")
        socket.send_multipart([b"", b"several", b"parts"])
        socket.send(msgspec.msgpack.encode(Hello()))
        socket.send(b"\x91" * 50_000)
        assert (await whole(client.submit(Add("a", [5, 6], replace(GREEDY, ignore_eos=True)))))[
            0
        ].finish_reason == "length"
        context.destroy(linger=0)


async def test_it_tells_how_it_stands_while_nothing_happens(worker: WorkerProcess) -> None:
    async with using(worker) as client:
        for _ in range(2):
            before = client.statistics
            await until(lambda before=before: client.statistics is not before, 10)  # type: ignore[misc]


async def test_many_clients_that_leave_at_random(worker: WorkerProcess) -> None:
    """Requests begin and are dropped at all moments; all pages come back, and `check` sees that books agree."""

    async def one(client: EngineClient, number: int) -> None:
        for turn in range(4):
            stream = client.submit(
                Add(f"{number}-{turn}", [number % 7 + 5] * (1 + number * 3), replace(LONG, n=1 + turn % 3))
            )
            for _ in range(number % 4):
                await anext(stream)
            await asyncio.sleep(0.003 * (number % 5))
            await stream.aclose()

    async with using(worker) as client:
        await asyncio.gather(*(one(client, number) for number in range(24)))


class TestTheEnd:
    @pytest.mark.parametrize("how", ["SIGTERM", "end of standard input", "SIGKILL"])
    async def test_is_heard_at_once(self, tmp_path: Path, how: str) -> None:
        with WorkerProcess(tmp_path / "engine", num_pages=100) as worker:
            client = await EngineClient.connect(worker.address, timeout=180)
            stream = client.submit(Add("a", [5, 6], LONG))
            await anext(stream)
            assert worker.process.stdin is not None
            worker.process.stdin.write(b"what a parent says here is not heard")
            worker.process.stdin.flush()
            worker.process.send_signal(signal.SIGINT)  # Ctrl-C is for the parent to answer
            await anext(stream)
            if how == "end of standard input":
                worker.process.stdin.close()
            else:
                worker.process.send_signal(getattr(signal, how))
            reason = await asyncio.wait_for(client.wait_dead(), 30)
            assert reason == ("the engine process has ended" if how == "SIGKILL" else "the engine has been told to end")
            with pytest.raises(EngineGone, match=reason):
                await whole(stream)
            await client.close()
            assert worker.ended(60) == (-signal.SIGKILL if how == "SIGKILL" else 0)

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's death on Linux only")
    async def test_comes_with_the_parents(self, tmp_path: Path) -> None:
        """The parent is killed, so it can tell nobody; what the engine reads from stays open."""
        config = {"address": f"ipc://{tmp_path}/engine.sock", "model": str(BUILTIN), "device": "cpu", "num_pages": 100}
        tmp_path.chmod(0o700)
        reading, writing = os.pipe()
        os.write(writing, json.dumps(config).encode() + b"\n")
        start = (
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-m', 'strata.engine.process.worker'])\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        parent = subprocess.Popen([sys.executable, "-c", start], stdin=reading, stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        client = await EngineClient.connect(config["address"], timeout=180)
        parent.kill()
        await asyncio.wait_for(client.wait_dead(), 60)
        await client.close()
        parent.wait()
        deadline = time.monotonic() + 60
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline, "an orphan is left"
            time.sleep(0.02)
        for descriptor in (reading, writing):
            os.close(descriptor)
        parent.stdout.close()

    @pytest.mark.parametrize(
        ("error", "told"),
        [
            ("out_of_memory(MemoryError(), 'a step', self._ledger)", "max_num_seqs, --max-num-batched-tokens or"),
            ("KeyError('bug')", "bug"),
        ],
    )
    async def test_of_an_engine_that_breaks_down_is_told_to_all(self, tmp_path: Path, error: str, told: str) -> None:
        script = (
            "import sys\n"
            "from strata.engine import loop\n"
            "from strata.engine.process import worker\n"
            "from strata.engine.faults import out_of_memory\n"
            "step = loop.EngineLoop.step\n"
            "def breaks(self):\n"
            f"    if self.scheduler.running > 1: raise {error}\n"
            "    return step(self)\n"
            "loop.EngineLoop.step = breaks\n"
            "sys.exit(worker.main())\n"
        )
        with WorkerProcess(tmp_path / "engine", script=script, num_pages=100, max_num_batched_tokens=512) as worker:
            clients = [await EngineClient.connect(worker.address, timeout=180) for _ in range(2)]
            streams = [client.submit(Add("a", [5, 6], LONG)) for client in clients]
            for client, stream in zip(clients, streams, strict=True):
                with pytest.raises(EngineGone, match=told) as caught:
                    await whole(stream)
                assert "\n" not in str(caught.value)
                await client.close()
            assert worker.ended(60) == 1
            (line,) = [line for line in worker.errors if line.startswith("strata: error: ")]
            assert told in line


GOOD = {"model": str(BUILTIN), "device": "cpu"}
BAD: dict[str, tuple[Any, str]] = {
    "model": (GOOD | {"model": "/nowhere"}, "/nowhere"),
    "length": (GOOD | {"max_model_len": 10**6}, "max_position_embeddings"),
    "option": (GOOD | {"surprise": 1}, "unknown option 'surprise'"),
    "open folder": (GOOD | {"address": "ipc:///tmp/engine.sock"}, "chmod 700"),
    "no folder": (GOOD | {"address": "ipc:///nowhere/engine.sock"}, "'ipc:///nowhere/engine.sock'"),
    "network": (GOOD | {"address": "tcp://127.0.0.1:5555"}, "'tcp://127.0.0.1:5555'"),
    "long name": (GOOD | {"address": "{folder}/" + "x" * 200}, "cannot listen at"),
    "no JSON": ("no JSON", "JSON"),
}


@pytest.mark.parametrize(("config", "words"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_honoured_is_one_line(
    config: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    if isinstance(config, dict):
        address = config.get("address", "{folder}/engine.sock").replace("{folder}", f"ipc://{tmp_path}")
        config = json.dumps(config | {"address": address})
    monkeypatch.setattr("strata.engine.process.worker.end_with_parent", lambda: None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(config.encode() + b"\n")))
    assert main() == 1
    errors = capsys.readouterr().err
    assert errors.startswith("strata: error: ")
    assert errors.count("\n") == 1
    assert words in errors


def test_a_process_that_cannot_start_ends_with_code_1(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path / "engine", model="/nowhere") as worker:
        assert worker.ended(180) == 1
        assert [line.startswith("strata: error: ") for line in worker.errors] == [True]
