"""Simulates the runs that results files hold, and prints how far the simulation is from what was measured.

    python -m benchmarks.plan.predicted_runs [--results benchmarks/results] [--device h200] [--models 8B] [--save FILE]

Served loads are the newest of each kind in DEVICE_serve.jsonl and DEVICE_peers.jsonl, with the same requests and
arrivals; the offline tests T1 to T4 the newest in DEVICE.jsonl. Each line of FILE has a run's measured and simulated
figures; errors are summed up of loads with shared prefixes and of all others.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.predictions.errors import ErrorSummary
from strata.bench.workloads import MAX_MODEL_LEN, named

TESTS = ("T1", "T2", "T3-b8", "T3-b32", "T3-b128", "T4")
_RANDOM = re.compile(r"random prompts of (\d+) and answers of (\d+) tokens")
_SHARED = re.compile(r"shared-prefix prompts of (\d+) and answers of (\d+) tokens, (\d+) prefixes of (\d+)")
_LOGNORMAL = re.compile(r"lognormal prompts of (\d+) and answers of (\d+) tokens on average, each at most (\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--models", default="0.6B,8B")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    models = given.models.split(",")
    runs = offline_runs(given.results / f"{given.device}.jsonl", given.device)
    runs += served_runs([given.results / f"{given.device}_{kind}.jsonl" for kind in ("serve", "peers")], given.device)
    found = [run for run in runs if run["model"] in models]
    if not found:
        raise SystemExit(f"{given.results} holds no run of {given.models} on {given.device}")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for run in found:
            simulated = simulate([*run["command"], *_dataset(run, Path(folder))])
            line = {"test": "simulated", **{key: run[key] for key in ("run", "model", "commit", "measured")}}
            line["shares"] = "--prefix-groups" in run["command"]
            line["simulated"] = {name: figures(simulated)[name] for name in run["measured"]}
            lines.append(line)
            print(text(line), flush=True)
    for kind, some in by_kind(lines).items():
        for name in sorted({name for line in some for name in line["measured"]}):
            print(f"{kind:16} {name:12} {ErrorSummary.of(list(errors(some, name))).text()}")
    if given.save is not None:
        given.save.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def offline_runs(path: Path, device: str) -> list[dict[str, Any]]:
    """The newest result of each offline test and model."""
    newest = {
        (one["test"], one["model"]): one for one in _lines(path) if one["test"] in TESTS and one["dtype"] == "bf16"
    }
    command = ["--request-rate", "inf", "--no-enable-prefix-caching", "--tpot-target-ms", "0", "--hardware", device]
    command += ["--max-model-len", str(MAX_MODEL_LEN)]
    return [
        {
            "run": test, "model": model, "commit": one["commit"], "measured": {"seconds": _seconds(test, one["value"])},
            "command": [model, *command],
        }
        for (test, model), one in sorted(newest.items())
    ]  # fmt: skip


def served_runs(paths: Sequence[Path], device: str) -> list[dict[str, Any]]:
    """The newest result of each load and model in several files, by number of GPUs and weights."""
    lines = [one for path in paths for one in _lines(path) if one.get("engine") == "strata" and "load" in one]
    newest = {
        (one["model"], one["load"], one.get("tensor_parallel_size", 1), one.get("quantization")): one
        for one in sorted(lines, key=lambda one: str(one["started"]))
    }
    runs = []
    for (model, load, ranks, quantization), one in newest.items():
        command = [model, "--hardware", device, "--max-model-len", str(MAX_MODEL_LEN), *served_options(one)]
        if ranks > 1:
            load, command = f"{load} on {ranks} GPUs", [*command, "--tensor-parallel-size", str(ranks)]
        if quantization is not None:
            load, command = f"{load} in {quantization}", [*command, "--quantization", quantization]
        run = {"run": load, "model": model, "commit": one["commit"], "measured": figures(one), "command": command}
        runs.append(run)
    return runs


def served_options(one: Mapping[str, Any]) -> list[str]:
    """The options that make the requests and arrivals of a served load. Raises ValueError for data of no known kind."""
    options = ["--num-prompts", one["requests"], "--request-rate", one["request_rate"], "--seed", one["seed"]]
    if one["max_concurrency"] is not None:
        options += ["--max-concurrency", one["max_concurrency"]]
    if (match := _RANDOM.fullmatch(one["data"])) is not None:
        options += ["--input-len", match[1], "--output-len", match[2]]
    elif (match := _SHARED.fullmatch(one["data"])) is not None:
        options += ["--dataset", "shared-prefix", "--input-len", match[1], "--output-len", match[2]]
        options += ["--prefix-groups", match[3], "--prefix-len", match[4]]
    elif (match := _LOGNORMAL.fullmatch(one["data"])) is not None:
        options += ["--dataset", "lognormal", "--input-len", match[1], "--output-len", match[2], "--longest", match[3]]
    else:
        raise ValueError(f"data {one['data']!r} of a served load is of no kind that can be simulated")
    return [str(option) for option in options]


def figures(one: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a load that predictions are held against: seconds, and medians in ms where there are any."""
    medians = {f"{name}_p50": one[f"{name}_ms"]["p50"] for name in ("ttft", "tpot") if one[f"{name}_ms"]}
    return {"seconds": one["seconds"], **medians}


def simulate(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "strata", "simulate", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def by_kind(lines: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Loads whose prompts begin alike and all other runs: decodes read shared keys faster than their own."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault("shared prefixes" if line["shares"] else "all others", []).append(line)
    return kinds


def errors(lines: Iterable[Mapping[str, Any]], name: str) -> Iterable[float]:
    """Of one figure, as shares of what was measured."""
    for line in lines:
        if name in line["measured"]:
            yield line["simulated"][name] / line["measured"][name] - 1


def text(line: Mapping[str, Any]) -> str:
    measured, simulated = line["measured"], line["simulated"]
    each = ", ".join(
        f"{name} {measured[name]:.3f} -> {simulated[name]:.3f} ({simulated[name] / measured[name] - 1:+.1%})"
        for name in measured
    )
    return f"{line['model']:5} {line['run']:42} {each}"


def _dataset(run: Mapping[str, Any], folder: Path) -> list[str]:
    """The requests of an offline test as a file."""
    if run["run"] not in TESTS:
        return []
    test = named(run["run"])
    file = folder / f"{run['run']}.jsonl"
    rows = (
        {"prompt": prompt, "output_length": output} for prompt, output in zip(test.prompts, test.outputs, strict=True)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ["--dataset", str(file)]


def _seconds(test: str, value: float) -> float:
    """Of a call whose figure is tokens a second or milliseconds a token."""
    made = named(test)
    tokens = sum(made.outputs if made.counted == "output" else made.prompt_lengths)
    return value * tokens / 1e3 if made.unit == "ms" else tokens / value


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
