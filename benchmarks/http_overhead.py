"""What HTTP costs: a real API process before the engine of benchmarks/stub_engine.py, under many streams and under few.

    python -m benchmarks.http_overhead        # prints one JSON object; exit code 1 if a target is missed

Streams: so many requests at once, each of which gets a token at every step of the engine, all together `pace` tokens a
second. Kept up with is a pace at which nearly all of them come through, nearly each in a chunk of its own (an API
process that falls behind joins the tokens that wait). The stub, the API process and the client share two cores; so
besides tokens a second it says how much CPU time a token costs in each of them, which depends less on what else runs.

First token: one request after the other, through HTTP and straight to the engine's socket; what is added is the
difference of the medians. Besides, the same for requests that come far apart, which find caches full of other things.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from benchmarks.stub_engine import StubConfig
from strata.bench.load.arrivals import arrival_times
from strata.bench.load.connection import HttpClient
from strata.bench.load.measures import Distribution, figures
from strata.bench.load.request_sets import Ask, encode
from strata.bench.load.send import RequestOutcome, run, send_all
from strata.bench.result import provenance
from strata.engine.process.messages import Add
from strata.engine.sampling_params import SamplingParams
from strata.hardware.machine import cpu_name
from strata.serve.client import EngineClient
from strata.serve.processes.worker import READY, ApiJob, engine_address
from strata.serve.settings import ServeSettings
from strata.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "strata" / "models" / "builtin"
API = "strata.serve.processes.worker"
NAME = "stub"
# Ids of the built-in vocabulary whose text is shown at once: A to Z.
LETTERS = tuple(range(38, 64))
ENDPOINTS = ("completions", "chat")

TOKENS_PER_SECOND = 20_000
ADDED_MS = 0.5
# Kept up with is a pace of which this share comes through, in no more tokens a chunk than that allows. What is missing
# is the time in which the streams begin and end.
MIN_SHARE = 0.95
CORES = 2

STREAM_PROMPT_TOKENS = 64
# Endpoint and length of the prompts, as ids or as text.
FIRST_TOKEN_CASES = (("completions", 512), ("chat", 16))
FIRST_TOKENS = 500
WARMUP = 50
FAR_APART = 50.0  # requests a second
TIMEOUT = 120.0


@dataclass(frozen=True)
class Streaming:
    """Many streams at once. pace: tokens a second that the stub gives. *_us: CPU time a token, in microseconds."""

    endpoint: str
    streams: int
    pace: float
    tokens_per_second: float
    tokens_per_chunk: float
    faults: dict[str, int]
    itl_ms: Distribution | None
    api_us: float
    client_us: float
    stub_us: float

    @property
    def kept_up(self) -> bool:
        in_time = self.tokens_per_second >= MIN_SHARE * self.pace
        return in_time and self.tokens_per_chunk <= 1 / MIN_SHARE and not self.faults

    @property
    def met(self) -> bool:
        return self.kept_up and self.pace >= TOKENS_PER_SECOND


@dataclass(frozen=True)
class FirstToken:
    """Few requests. rate: requests a second, None for one after the other. ttft_ms: as the client sees it, through HTTP
    and straight from the engine. api_us: CPU time a request, in microseconds.
    """

    endpoint: str
    prompt_tokens: int
    rate: float | None
    ttft_ms: Distribution
    engine_ttft_ms: Distribution
    api_us: float

    @property
    def added_ms(self) -> float:
        return self.ttft_ms.p50 - self.engine_ttft_ms.p50

    @property
    def met(self) -> bool:
        """The target is for one request after the other."""
        return self.rate is not None or self.added_ms < ADDED_MS


@dataclass(frozen=True)
class Processes:
    """url: of the API process. address: of the stub. api, stub: their process ids."""

    url: str
    address: str
    api: int
    stub: int

    def cpu_seconds(self) -> tuple[float, float, float]:
        """That the API process, the stub and this process have taken so far."""
        return _cpu_seconds(self.api), _cpu_seconds(self.stub), time.process_time()


@contextlib.contextmanager
def processes(interval: float) -> Iterator[Processes]:
    """An API process that serves, and its engine, which makes a step every `interval` seconds."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        port = listener.getsockname()[1]
        address = engine_address(Path(folder))
        stub = StubConfig(address, interval=interval, tokens=LETTERS)
        settings = ServeSettings(str(MODEL), (NAME,), port=port, max_queue=4096)
        job = ApiJob(settings, [], str(MODEL), folder=folder, listeners=(listener.fileno(),))
        said = Path(folder, "said")
        with (
            _started("benchmarks.stub_engine", stub, said) as engine,
            _started(API, job, said, listener.fileno()) as api,
        ):
            _wait_ready(api, said)
            yield Processes(f"http://127.0.0.1:{port}", address, api.pid, engine.pid)


def measure_streaming(endpoint: str, streams: int, pace: float, seconds: float) -> Streaming:
    """`streams` requests for about so many seconds of tokens."""
    tokens = max(2, round(seconds * pace / streams))
    asks = _asks(endpoint, streams, STREAM_PROMPT_TOKENS, tokens)
    with processes(interval=streams / pace) as running:
        before = running.cpu_seconds()
        outcomes = _send(running.url, asks, [0.0] * streams)
        cpu = [after - start for after, start in zip(running.cpu_seconds(), before, strict=True)]
    found = figures(outcomes, {})
    given = streams * tokens
    return Streaming(
        endpoint,
        streams,
        pace,
        tokens_per_second=found.output_tokens_per_second,
        tokens_per_chunk=found.output_tokens / max(1, found.chunks),
        faults=found.faults,
        itl_ms=found.itl_ms,
        api_us=1e6 * cpu[0] / given,
        stub_us=1e6 * cpu[1] / given,
        client_us=1e6 * cpu[2] / given,
    )


def measure_first_token(endpoint: str, prompt_tokens: int, rate: float | None) -> FirstToken:
    """Requests for one token at low load."""
    asks = _asks(endpoint, FIRST_TOKENS, prompt_tokens, output_tokens=1)
    due = [0.0] * len(asks) if rate is None else arrival_times(len(asks), rate, 1.0, seed=0)
    with processes(interval=0.01) as running:
        _send(running.url, asks[:WARMUP], due[:WARMUP], max_concurrency=1)
        before = _cpu_seconds(running.api)
        found = figures(_send(running.url, asks, due, max_concurrency=1), {})
        api = _cpu_seconds(running.api) - before
        direct = Distribution.of(run(_ask_engine(running.address, prompt_tokens, due)))
    if found.faults or found.ttft_ms is None or direct is None:
        raise RuntimeError(f"requests failed: {found.faults}")
    return FirstToken(endpoint, prompt_tokens, rate, found.ttft_ms, direct, 1e6 * api / len(asks))


def best_streaming(endpoint: str, streams: int, paces: Sequence[float], seconds: float, repeat: int) -> Streaming:
    """The fastest pace that was kept up with in one of `repeat` runs; the slowest, if none was."""
    best = None
    for pace in sorted(paces):
        for _ in range(repeat):
            found = measure_streaming(endpoint, streams, pace, seconds)
            if found.kept_up:
                break
        if best is not None and not found.kept_up:
            break
        best = found
    assert best is not None
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description="What HTTP costs, before an engine that costs almost nothing.")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 128, 256], help="requests at once")
    parser.add_argument("--paces", type=float, nargs="+", default=[20e3, 30e3, 40e3], help="tokens a second to try")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement of streams")
    parser.add_argument("--repeat", type=int, default=3, help="runs of which the best counts, as other work disturbs")
    asked = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    streaming = [
        best_streaming(endpoint, streams, asked.paces, asked.seconds, asked.repeat)
        for endpoint in ENDPOINTS
        for streams in asked.streams
    ]
    first = [
        min((measure_first_token(*case, rate) for _ in range(asked.repeat)), key=lambda one: one.added_ms)
        for case in FIRST_TOKEN_CASES
        for rate in (None, FAR_APART)
    ]
    result = {
        "targets": {"tokens_per_second": TOKENS_PER_SECOND, "added_ms": ADDED_MS},
        "streaming": [{**asdict(one), "met": one.met} for one in streaming],
        "first_token": [{**asdict(one), "added_ms": one.added_ms, "met": one.met} for one in first],
        "device": cpu_name(),
        "cores": CORES,
        **provenance(),
        "command": shlex.join(["python", "-m", "benchmarks.http_overhead", *sys.argv[1:]]),
    }
    print(json.dumps(result))
    return 0 if all(one.met for one in (*streaming, *first)) else 1


@contextlib.contextmanager
def _started(module: str, job: msgspec.Struct, said: Path, *passed: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs a module and reads its job from standard input; it inherits the descriptors `passed`.

    said: the file that its standard error goes to; the API process writes a line for each request.
    """
    with (
        said.open("ab") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=passed,
            cwd=ROOT,
        ) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def _wait_ready(process: subprocess.Popen[bytes], said: Path) -> None:
    assert process.stdout is not None
    if process.stdout.readline().decode().strip() != READY:
        raise RuntimeError(f"the API process did not start: {said.read_text().strip()}")


def _send(
    url: str, asks: Sequence[Ask], due: Sequence[float], max_concurrency: int | None = None
) -> list[RequestOutcome]:
    async def send() -> list[RequestOutcome]:
        client = HttpClient(url)
        try:
            requests = [encode(ask, NAME) for ask in asks]
            return await send_all(client, requests, due, max_concurrency=max_concurrency, timeout=TIMEOUT)
        finally:
            client.close()

    return run(send())


async def _ask_engine(address: str, prompt_tokens: int, due: Sequence[float]) -> list[float]:
    """Seconds until the first token of each of such requests that are sent to an engine without an API process."""
    client = await EngineClient.connect(address, timeout=TIMEOUT)
    start = time.perf_counter()
    times = []
    for number, at in enumerate(due):
        if (wait := start + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        sent = time.perf_counter()
        stream = client.submit(Add(str(number), [0] * prompt_tokens, SamplingParams(max_tokens=1)))
        await anext(stream)
        times.append(time.perf_counter() - sent)
    await client.close()
    return times


def _asks(endpoint: str, count: int, prompt_tokens: int, output_tokens: int) -> list[Ask]:
    """Prompts of random tokens, for a chat as text."""
    with Tokenizer.load(MODEL) as tokenizer:
        ids = [id for id in range(tokenizer.vocab_size) if tokenizer.decode([id]).isalpha()]
        draw = random.Random(0)
        prompts = [draw.choices(ids, k=prompt_tokens) for _ in range(count)]
        if endpoint == "completions":
            return [Ask(prompt, output_tokens) for prompt in prompts]
        return [Ask([{"role": "user", "content": tokenizer.decode(prompt)}], output_tokens) for prompt in prompts]


def _cpu_seconds(process: int) -> float:
    """User and system time of a process so far, of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
