"""What HTTP costs: a real API process before the engine of benchmarks/stub_engine.py, under many streams and under few.

    python -m benchmarks.http_overhead        # prints one JSON object; exit code 1 if a target is missed

Streams: so many requests at once, each of which gets a token at every step of the engine, all together `pace` tokens a
second. Reached is a pace at which nearly all of them come through, nearly each in a chunk of its own (an API process
that falls behind joins the tokens that wait). The stub, the API process and the client share two cores; so besides
tokens a second it says how much CPU time a token costs in each of them, which does not depend on what else runs.

First token: requests one at a time, far apart. The stub answers at once, so the whole of the client's time to first
token is what HTTP adds to that of an engine, the client's own part included.
"""

from __future__ import annotations

import argparse
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
from strata.cli.bench_result import cpu_name, provenance
from strata.cli.load.connection import Client
from strata.cli.load.measures import Distribution, figures
from strata.cli.load.request_sets import Ask, encode
from strata.cli.load.schedule import arrivals
from strata.cli.load.send import Outcome, run, send_all
from strata.models.tokenizer import Tokenizer
from strata.serve.settings import ServeSettings
from strata.serve.worker import READY, ApiJob, engine_address

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "strata" / "models" / "builtin"
NAME = "stub"
# Ids of the built-in vocabulary whose text is shown at once: A to Z.
LETTERS = tuple(range(38, 64))
ENDPOINTS = ("completions", "chat")

TOKENS_PER_SECOND = 20_000
ADDED_MS = 0.5
# Kept up with is a pace of which this share comes through, in no more tokens a chunk than that allows. What is missing
# is the time in which the streams begin and end.
LEAST_SHARE = 0.95
CORES = 2

PROMPT_TOKENS = 512
FIRST_TOKENS = 400
FIRST_TOKEN_RATE = 50.0
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
        in_time = self.tokens_per_second >= LEAST_SHARE * self.pace
        return in_time and self.tokens_per_chunk <= 1 / LEAST_SHARE and not self.faults


@dataclass(frozen=True)
class FirstToken:
    """Few requests. ttft_ms: as the client sees it. api_us: CPU time a request, in microseconds."""

    endpoint: str
    prompt_tokens: int
    rate: float
    ttft_ms: Distribution
    api_us: float


@dataclass(frozen=True)
class Processes:
    """url: of the API process. Its id and the stub's are for their CPU time."""

    url: str
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
        stub = StubConfig(engine_address(Path(folder)), interval=interval, tokens=LETTERS)
        settings = ServeSettings(str(MODEL), (NAME,), port=port, max_queue=4096)
        job = ApiJob(settings, [], str(MODEL), folder, listener=listener.fileno())
        with (
            _started(["-m", "benchmarks.stub_engine"], stub) as engine,
            _started(["-m", "strata.serve.worker"], job, listener.fileno()) as api,
        ):
            assert api.stdout is not None
            if api.stdout.readline().decode().strip() != READY:
                raise RuntimeError("the API process did not start; its own error stands above")
            yield Processes(f"http://127.0.0.1:{port}", api.pid, engine.pid)


def measure_streaming(endpoint: str, streams: int, pace: float, seconds: float) -> Streaming:
    """`streams` requests for about so many seconds of tokens."""
    tokens = max(2, round(seconds * pace / streams))
    asks = _asks(endpoint, streams, tokens)
    with processes(interval=streams / pace) as running:
        outcomes, cpu = _send(running, asks, [0.0] * streams)
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


def measure_first_token(endpoint: str) -> FirstToken:
    """Requests for one token as they come at low load."""
    asks = _asks(endpoint, FIRST_TOKENS, output_tokens=1)
    with processes(interval=0.01) as running:
        outcomes, cpu = _send(running, asks, arrivals(len(asks), FIRST_TOKEN_RATE, 1.0, seed=0))
    found = figures(outcomes, {})
    if found.faults or found.ttft_ms is None:
        raise RuntimeError(f"requests failed: {found.faults}")
    prompt_tokens = found.prompt_tokens // found.requests
    return FirstToken(endpoint, prompt_tokens, FIRST_TOKEN_RATE, found.ttft_ms, 1e6 * cpu[0] / len(asks))


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
    parser.add_argument(
        "--paces", type=float, nargs="+", default=[20e3, 25e3, 30e3, 35e3, 40e3], help="tokens a second to try"
    )
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
        min((measure_first_token(endpoint) for _ in range(asked.repeat)), key=lambda one: one.ttft_ms.p50)
        for endpoint in ENDPOINTS
    ]
    met = {
        "tokens_per_second": all(one.kept_up and one.pace >= TOKENS_PER_SECOND for one in streaming),
        "added_ms": all(one.ttft_ms.p50 < ADDED_MS for one in first),
    }
    result = {
        "streaming": [asdict(one) for one in streaming],
        "first_token": [asdict(one) for one in first],
        "targets": {"tokens_per_second": TOKENS_PER_SECOND, "added_ms": ADDED_MS},
        "met": met,
        "device": cpu_name(),
        "cores": CORES,
        **provenance(),
        "command": shlex.join(["python", "-m", "benchmarks.http_overhead", *sys.argv[1:]]),
    }
    print(json.dumps(result))
    return 0 if all(met.values()) else 1


@contextlib.contextmanager
def _started(arguments: Sequence[str], job: msgspec.Struct, *passed: int) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that reads its job from standard input, and ends when that does."""
    command = [sys.executable, *arguments]
    # What is logged of each request is written, but to nowhere.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=passed, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def _send(
    running: Processes, asks: Sequence[Ask], due: Sequence[float]
) -> tuple[list[Outcome], tuple[float, float, float]]:
    """The outcomes, and the seconds of CPU time that the API process, the stub and this process took meanwhile."""

    async def send() -> list[Outcome]:
        client = Client(running.url)
        try:
            requests = [encode(ask, NAME) for ask in asks]
            return await send_all(client, requests, due, max_concurrency=None, timeout=TIMEOUT)
        finally:
            client.close()

    before = running.cpu_seconds()
    outcomes = run(send())
    api, stub, client = (after - start for after, start in zip(running.cpu_seconds(), before, strict=True))
    return outcomes, (api, stub, client)


def _asks(endpoint: str, count: int, output_tokens: int) -> list[Ask]:
    """Prompts of PROMPT_TOKENS random tokens, for a chat as text."""
    with Tokenizer.load(MODEL) as tokenizer:
        ids = [id for id in range(tokenizer.vocab_size) if tokenizer.decode([id]).isalpha()]
        draw = random.Random(0)
        prompts = [draw.choices(ids, k=PROMPT_TOKENS) for _ in range(count)]
        if endpoint == "completions":
            return [Ask(prompt, output_tokens) for prompt in prompts]
        return [Ask([{"role": "user", "content": tokenizer.decode(prompt)}], output_tokens) for prompt in prompts]


def _cpu_seconds(process: int) -> float:
    """User and system time of a process so far, of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
