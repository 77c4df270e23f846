"""Loads on a server of Strata and on one of vLLM in turns on this machine, into one results file.

    python -m benchmarks.peers.serve_in_turns --strata-python .venv/bin/python --vllm-python .vllm/bin/python \\
        --save benchmarks/results/h200_peers.jsonl

Both serve the same folder (a config and a tokenizer, random weights of each or with --weights the same) and get the
same requests from `strata bench serve`, after a load that is not measured. A server is stopped before the next one
starts, whatever happens. With --run NAME the lines of several calls, as of one engine or one kind of load each, are one
comparison, and what a call of that name has measured already is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import engines
from benchmarks.peers.loads import KINDS, LONG_KINDS, LONG_MODEL, RATES, WARM_UP, Load, loads
from benchmarks.peers.processes import EngineFailed, EngineProcess, end_on_signals, fetch
from benchmarks.peers.table import row_name
from strata.bench.workloads import MAX_MODEL_LEN

# Seconds that a request may take.
TIMEOUT = 120
HOST = "127.0.0.1"
# What is started, what else it is told so that it logs and draws as the other does, and where it says that it is ready.
MODULE = {"strata": "strata", "vllm": "vllm.entrypoints.cli.main"}
OWN_OPTIONS = {
    "strata": [],
    "vllm": ["--generation-config", "vllm", "--no-enable-log-requests", "--disable-uvicorn-access-log"],
}
READY = {"strata": "/ready", "vllm": "/health"}


class LoadFailed(RuntimeError):
    """A load was not measured on a server that may still serve others."""


@dataclass(frozen=True)
class Client:
    """`strata bench serve` on a server. python: of Strata, whichever engine is measured. limit: seconds of a load."""

    python: str
    url: str
    limit: float

    def measure(self, load: Load) -> list[dict[str, Any]]:
        """The result lines of a load: of its saturation, if its rate is a share of that, and its own. Raises LoadFailed
        if there are none."""
        command = [
            self.python,
            "-m",
            "strata",
            "bench",
            "serve",
            "--url",
            self.url,
            "--json",
            "--timeout",
            str(TIMEOUT),
        ]
        command += load.options
        try:
            done = subprocess.run(command, cwd=engines.ROOT, capture_output=True, text=True, timeout=self.limit)
        except subprocess.TimeoutExpired:
            raise LoadFailed(f"the load {load.name!r} did not end within {self.limit:g} s") from None
        lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        if not lines or of_saturation(lines[-1]):
            raise LoadFailed(f"the load {load.name!r} was not measured:\n{done.stderr.strip()}")
        return lines


def of_saturation(line: dict[str, Any]) -> bool:
    """Whether a line is of the closed loop that found the rate of the load behind it."""
    return line.get("request_rate") == "inf" and line.get("saturation") is not None


def server_command(
    engine: str,
    python: str,
    folder: Path,
    model: str,
    port: int,
    ranks: int = 1,
    quantization: str | None = None,
    weights: Path | None = None,
    max_model_len: int = MAX_MODEL_LEN,
) -> list[str]:
    """Both engines' commands have the same options, but those of OWN_OPTIONS."""
    command = [python, "-m", MODULE[engine], "serve", str(folder), "--host", HOST, "--port", str(port)]
    setup = engines.SETUP | engines.how_loaded(weights) | {"max_model_len": max_model_len}
    for name, value in setup.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    if ranks > 1:
        command += ["--tensor-parallel-size", str(ranks)]
    if quantization is not None:
        command += ["--quantization", quantization]
    return [*command, "--enable-prefix-caching", "--served-model-name", model, *OWN_OPTIONS[engine]]


def measure_server(
    engine: str, model: str, folder: Path, log: Path, asked: argparse.Namespace, turn: int, left: list[Load]
) -> list[str]:
    """Start a server, warm it up, save the lines of each of the loads, stop it. What is said of loads that were not
    measured; raises EngineFailed if the server, or what warms it up, fails."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    pythons = engines.pythons(asked)
    command = server_command(
        engine,
        pythons[engine],
        folder,
        model,
        port,
        asked.tensor_parallel_size,
        asked.quantization,
        asked.weights,
        left[0].max_model_len,
    )
    client = Client(pythons["strata"], url, asked.load_timeout)
    failed = []
    with EngineProcess(f"{engines.NAMES[engine]}'s server", command, log.parent, log) as server:
        seconds = server.wait_until_ready(url + READY[engine], asked.start_timeout)
        print(f"  ready after {seconds:.0f} s", flush=True)
        origin = whose(engine, model, asked, turn) | {
            "version": server_version(url),
            "device": engines.device_name(),
            "server": shlex.join(command),
        }
        try:
            client.measure(WARM_UP)
        except LoadFailed as error:
            raise EngineFailed(str(error)) from None
        for load in left:
            try:
                lines = client.measure(load)
            except LoadFailed as error:
                server.require_alive()
                failed.append(f"{model}, {engines.NAMES[engine]}: {error}")
                print(f"  {error}", flush=True)
                continue
            server.require_alive()
            for line in lines:
                name = f"{load.name}: saturation" if of_saturation(line) else load.name
                engines.append(asked.save, line | origin | {"load": name})
                print(f"  {name}: {line['completed']} of {line['requests']} requests", flush=True)
    return failed


def whose(engine: str, model: str, asked: argparse.Namespace, turn: int) -> dict[str, Any]:
    """What tells a line from those of other engines, turns, models and ways to run them."""
    return {
        "test": "T5",
        "engine": engine,
        "model": model,
        "run": asked.run,
        "turn": turn,
        "tensor_parallel_size": asked.tensor_parallel_size,
        "quantization": asked.quantization,
        "weights": engines.whose_weights(asked.weights),
    }


def unmeasured(engine: str, model: str, asked: argparse.Namespace, turn: int) -> list[Load]:
    """The loads of which the results file has no line yet. Raises EngineFailed for a file of something else."""
    try:
        lines = [json.loads(text) for text in asked.save.read_text(encoding="utf-8").splitlines()]
        there = {(line["engine"], line["run"], line["turn"], row_name(line)) for line in lines if line["test"] == "T5"}
    except (ValueError, KeyError, TypeError) as error:
        raise EngineFailed(
            f"{asked.save} has a line that is no result of a comparison ({error!r}): mend it, or save to another file"
        ) from None
    of_kinds = [load for load in loads(model) if load.kind in asked.loads]
    mine = whose(engine, model, asked, turn)
    return [load for load in of_kinds if (engine, asked.run, turn, row_name(mine | {"load": load.name})) not in there]


def server_version(url: str) -> str | None:
    """None if the server tells none."""
    try:
        told = json.loads(fetch(f"{url}/version") or b"null")
    except ValueError:
        return None
    return told.get("version") if isinstance(told, dict) else None


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


def run_turns(asked: argparse.Namespace, work: Path) -> None:
    """All turns of all models, each on a server for each length that its loads need. Raises EngineFailed at the first
    server that fails, or at the end if loads were not measured."""
    failed = []
    for model in asked.models:
        work.mkdir(parents=True, exist_ok=True)  # for the logs
        folder = asked.weights or engines.write_model(work / model, model)
        lengths = dict.fromkeys(load.max_model_len for load in loads(model) if load.kind in asked.loads)
        for length, turn in itertools.product(lengths, range(asked.turns)):
            for engine in engines.order(turn):
                left = [load for load in unmeasured(engine, model, asked, turn) if load.max_model_len == length]
                if engine not in asked.engines or not left:
                    continue
                print(f"{model}, turn {turn + 1} of {asked.turns}: {engines.NAMES[engine]}", flush=True)
                log = work / f"{engine}.{model}.{length}.{turn}.log"
                failed += measure_server(engine, model, folder, log, asked, turn, left)
    if failed:
        raise EngineFailed("\n".join(failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_options(parser)
    kinds = engines.some_of((*KINDS, *LONG_KINDS), "kind of load")
    parser.add_argument(
        "--loads",
        type=kinds,
        default=list(KINDS),
        help=f"between commas; {', '.join(LONG_KINDS)} are of {LONG_MODEL} and by name alone [{','.join(KINDS)}]",
    )
    parser.add_argument(
        "--engines", type=engines.some_of(engines.ENGINES, "engine"), default=engines.ENGINES, help="[strata,vllm]"
    )
    parser.add_argument("--run", metavar="NAME", help="of the comparison that this call begins or goes on with [now]")
    engines.add_weights(parser)
    parser.add_argument("--quantization", metavar="SCHEME", help="one that both servers know by this name, as fp8")
    parser.add_argument(
        "--start-timeout", type=engines.seconds, default=300.0, help="seconds in which a server is ready [300]"
    )
    parser.add_argument(
        "--load-timeout", type=engines.seconds, default=420.0, help="seconds in which a load is done [420]"
    )
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep the models and the servers' logs here")
    asked = parser.parse_args()
    wanted = dict.fromkeys(("strata", *asked.engines))  # Strata's puts load on both
    engines.require_pythons(parser, asked, wanted)
    asked.run = asked.run or engines.now()
    for model in asked.models:
        if model not in RATES:
            parser.error(f"there are no loads for {model} (benchmarks/peers/loads.py): give some of {', '.join(RATES)}")
        if not any(load.kind in asked.loads for load in loads(model)):
            parser.error(f"{model} has no loads of kind {', '.join(asked.loads)}: ask for --models {LONG_MODEL}")
    engines.refuse_other_weights(parser, asked.weights, asked.models)
    end_on_signals()
    try:
        if asked.work is not None:
            run_turns(asked, asked.work.absolute())
        else:
            with tempfile.TemporaryDirectory() as work:
                run_turns(asked, Path(work))
    except EngineFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
