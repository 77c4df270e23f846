"""Loads on a server of Strata and on one of vLLM in turns on this machine, into one results file.

    python -m benchmarks.peers.serve_in_turns --strata-python .venv/bin/python --vllm-python .vllm/bin/python \\
        --save benchmarks/results/h200_peers.jsonl

Both serve the same folder (a config and a tokenizer, random weights of each or with --weights the same) and get the
same requests from `strata bench serve`, after a load that is not measured. A server is stopped before the next one
starts, whatever happens.
"""

from __future__ import annotations

import argparse
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
from benchmarks.peers.loads import KINDS, RATES, WARM_UP, Load, loads
from benchmarks.peers.processes import EngineFailed, EngineProcess, end_on_signals, fetch

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


@dataclass(frozen=True)
class Client:
    """`strata bench serve` on a server. python: of Strata, whichever engine is measured."""

    python: str
    url: str

    def measure(self, load: Load) -> dict[str, Any]:
        """The result line of a load. Raises EngineFailed if there is none."""
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
        done = subprocess.run([*command, *load.options], cwd=engines.ROOT, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        if not lines:
            raise EngineFailed(f"the load {load.name!r} was not measured:\n{done.stderr.strip()}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


def server_command(
    engine: str,
    python: str,
    folder: Path,
    model: str,
    port: int,
    ranks: int = 1,
    quantization: str | None = None,
    weights: Path | None = None,
) -> list[str]:
    """Both engines' commands have the same options, but those of OWN_OPTIONS."""
    command = [python, "-m", MODULE[engine], "serve", str(folder), "--host", HOST, "--port", str(port)]
    for name, value in (engines.SETUP | engines.how_loaded(weights)).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    if ranks > 1:
        command += ["--tensor-parallel-size", str(ranks)]
    if quantization is not None:
        command += ["--quantization", quantization]
    return [*command, "--enable-prefix-caching", "--served-model-name", model, *OWN_OPTIONS[engine]]


def measure_server(
    engine: str, model: str, folder: Path, log: Path, asked: argparse.Namespace, run: str, turn: int
) -> None:
    """Start a server, warm it up, save the line of each load, stop it. Raises EngineFailed."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    pythons = engines.pythons(asked)
    ranks, quantization = asked.tensor_parallel_size, asked.quantization
    command = server_command(engine, pythons[engine], folder, model, port, ranks, quantization, asked.weights)
    client = Client(pythons["strata"], url)
    with EngineProcess(f"{engines.NAMES[engine]}'s server", command, log.parent, log) as server:
        seconds = server.wait_until_ready(url + READY[engine], asked.start_timeout)
        print(f"  ready after {seconds:.0f} s", flush=True)
        origin = {
            "engine": engine,
            "version": server_version(url),
            "run": run,
            "turn": turn,
            "device": engines.device_name(),
            "server": shlex.join(command),
            "tensor_parallel_size": ranks,
            "quantization": quantization,
            "weights": engines.whose_weights(asked.weights),
        }
        client.measure(WARM_UP)
        for load in loads(model):
            if load.kind in asked.loads:
                result = client.measure(load)
                server.require_alive()
                engines.append(asked.save, result | origin | {"load": load.name})
                print(f"  {load.name}: {result['completed']} of {result['requests']} requests", flush=True)


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
    """All turns of all models. Raises EngineFailed at the first server or load that fails."""
    run = engines.now()
    for model in asked.models:
        work.mkdir(parents=True, exist_ok=True)  # for the logs
        folder = asked.weights or engines.write_model(work / model, model)
        for turn in range(asked.turns):
            for engine in engines.order(turn):
                print(f"{model}, turn {turn + 1} of {asked.turns}: {engines.NAMES[engine]}", flush=True)
                log = work / f"{engine}.{model}.{turn}.log"
                measure_server(engine, model, folder, log, asked, run, turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_options(parser)
    kinds = engines.some_of(KINDS, "kind of load")
    parser.add_argument("--loads", type=kinds, default=list(KINDS), help=f"between commas [{','.join(KINDS)}]")
    engines.add_weights(parser)
    parser.add_argument("--quantization", metavar="SCHEME", help="one that both servers know by this name, as fp8")
    parser.add_argument(
        "--start-timeout", type=engines.seconds, default=300.0, help="seconds in which a server is ready [300]"
    )
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep the models and the servers' logs here")
    asked = parser.parse_args()
    without = [model for model in asked.models if model not in RATES]
    if without:
        parser.error(
            f"there are no loads for {without[0]} (benchmarks/peers/loads.py): give some of {', '.join(RATES)}"
        )
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
