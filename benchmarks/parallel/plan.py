"""What is measured of each model on 1, 2, 4, 8 ranks, and what is left out, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from strata.bench import workloads
from strata.bench.needs_gpu import why_no_processor
from strata.hardware.gpu_memory import GpuMemories
from strata.models.config import DTYPES, ModelConfig
from strata.models.families import build
from strata.models.folder import folder_or_shape
from strata.models.weights import weight_bytes
from strata.parallel.serving_shard import rank_config
from strata.plan.meta_model import find_config
from strata.text.counted import counted

MODELS = ("0.6B", "8B", "70B", "30B-A3B")
# Messages alone; T2, T1 and T4 of an engine, and its start: last, when all kernels have been compiled.
TESTS = ("comm", "T2", "T1", "T4", "T0")
# What weights may take of a device: beside them KV pages, activations, recorded steps and the messages' buffers.
_WEIGHTS_SHARE = 0.85


@dataclass(frozen=True)
class BenchMachine:
    """device: "cuda" or "cpu". devices: GPUs; on a CPU as many as ranks may be. memory: bytes of a GPU, or of the host;
    None: not known. by_default: the processor stands in for GPUs that are not there, and nobody named it."""

    device: str
    devices: int
    memory: int | None
    by_default: bool = False

    def of_rank(self, ranks: int) -> int | None:
        """The bytes of memory that one of so many ranks has."""
        return self.memory // ranks if self.memory is not None and self.device == "cpu" else self.memory


@dataclass(frozen=True)
class RanksMeasurement:
    """One process. model: None for messages alone. device: "cuda" or "cpu"."""

    test: str
    model: str | None
    ranks: int
    device: str
    dtype: str
    expert_parallel: bool = False

    def command(self, repeat: int) -> list[str]:
        """The arguments of `strata` that measure it, a line of JSON each result. repeat: how often, but for T0."""
        times = 1 if self.test == "T0" else repeat
        common = ["--device", self.device, "--dtype", self.dtype, "--repeat", str(times), "--json"]
        if self.model is None:
            return ["bench", "comm", "--ranks", str(self.ranks), *common]
        command = {"T0": "startup", "T2": "latency", "T4": "prefill"}.get(self.test, "throughput")
        arguments = ["bench", command, "--model", self.model, "--tensor-parallel-size", str(self.ranks), *common]
        if self.test.startswith("T3-b"):
            arguments += ["--batch", self.test.removeprefix("T3-b")]
        return [*arguments, "--enable-expert-parallel"] if self.expert_parallel else arguments

    def text(self) -> str:
        model = "" if self.model is None else f" {self.model}"
        return f"{self.test}{model} on {_ranks(self.ranks, self.expert_parallel)}"

    def values(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LeftOut:
    """Measurements of one model and number of ranks that are not to be had here."""

    what: str
    reason: str

    def text(self) -> str:
        return f"left out: {self.what}: {self.reason}"


def require_tests(tests: Sequence[str]) -> None:
    """Raises ValueError for a test that is unknown."""
    for name in tests:
        if name.startswith("T3-"):
            workloads.named(name)
        elif name not in TESTS:
            raise ValueError(f"test {name!r} is unknown; give some of {', '.join(TESTS)} and T3-bN (N requests)")


def numbers_of_ranks(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    powers = [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]
    return powers if powers[-1] == most else [*powers, most]


def planned(
    models: Sequence[str], tests: Sequence[str], most: int, machine: BenchMachine, dtype: str
) -> Iterator[RanksMeasurement | LeftOut]:
    """Everything up to `most` ranks: messages alone first, then each model, on few ranks first.

    Raises ValueError for a model that is not there.
    """
    numbers = numbers_of_ranks(most)
    there = [ranks for ranks in numbers if ranks <= machine.devices]
    if len(there) < len(numbers):
        missing = ", ".join(str(ranks) for ranks in numbers[len(there) :])
        yield LeftOut(f"{missing} ranks", f"this machine has {counted(machine.devices, 'GPU')}")
    for ranks in there:
        if ranks > 1 and "comm" in tests:
            yield RanksMeasurement("comm", None, ranks, machine.device, dtype)
    for model in models:
        yield from _of_model(model, [test for test in tests if test != "comm"], there, machine, dtype)


def _of_model(
    model: str, tests: Sequence[str], numbers: Sequence[int], machine: BenchMachine, dtype: str
) -> Iterator[RanksMeasurement | LeftOut]:
    config = find_config(folder_or_shape(model))
    if (why := why_no_processor(config, "auto" if machine.by_default else machine.device)) is not None:
        yield LeftOut(model, why)
        return
    most = min(workloads.MAX_MODEL_LEN, config.longest)
    short = [test for test in tests if test != "T0" and workloads.named(test).longest > most]
    if short:
        yield LeftOut(f"{', '.join(short)} of {model}", f"their sequences are longer than the {most:,} tokens it reads")
    for ranks in numbers:
        for expert_parallel in (False, True):
            if expert_parallel and (config.experts is None or ranks == 1):
                continue
            if (reason := _fault(config, ranks, expert_parallel, machine, dtype)) is not None:
                yield LeftOut(f"{model} on {_ranks(ranks, expert_parallel)}", reason)
                continue
            for test in tests:
                if test not in short:
                    yield RanksMeasurement(test, model, ranks, machine.device, dtype, expert_parallel)


def _ranks(count: int, expert_parallel: bool) -> str:
    return f"{counted(count, 'rank')}{', whole experts' if expert_parallel else ''}"


def _fault(config: ModelConfig, ranks: int, expert_parallel: bool, machine: BenchMachine, dtype: str) -> str | None:
    """Why so many ranks of this machine cannot serve a model; None if nothing speaks against it."""
    try:
        own = rank_config(config, ranks, 0, expert_parallel=expert_parallel)
    except ValueError as error:
        return str(error)
    with torch.device("meta"):
        weights = weight_bytes(build(own), DTYPES[dtype])
    memory = machine.of_rank(ranks)
    if memory is None or weights <= _WEIGHTS_SHARE * memory:
        return None
    return (
        f"a rank has {weights / 2**30:.1f} GiB of weights, and its {'GPU' if machine.device == 'cuda' else 'share'} "
        f"{memory / 2**30:.1f} GiB of memory, of which {_WEIGHTS_SHARE:.0%} are for them"
    )


def this_machine(device: str, ranks: int | None) -> BenchMachine:
    """device: auto, cpu or cuda. ranks: as many as are asked for; None: all GPUs, or two processes on a CPU.

    No GPU gets a context: it would take memory of those that are measured. Raises ValueError for a device that is
    unknown or not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r} is unknown; give auto, cpu or cuda")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: torch sees no GPU here; --device cpu measures processes")
    if gpus:
        memories = [memory.total for memory in GpuMemories.of_this_process().read()]
        return BenchMachine("cuda", gpus, min(memories) if len(memories) == gpus else None)
    return BenchMachine("cpu", ranks or 2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), device == "auto")
