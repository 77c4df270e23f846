"""`strata bench`: the inference tests T0 to T4, each measured figure beside its floor."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli import options, workloads
from strata.cli.bench_kernels import kernels
from strata.cli.bench_result import cpu_name, make_result, report
from strata.hardware.specs import recognize

if TYPE_CHECKING:
    from strata.engine.llm import LLM

bench = typer.Typer(no_args_is_help=True, help="Measure inference: T0 to T4 of benchmarks/README.md.")
bench.command()(kernels)

Model = Annotated[str, typer.Option(help="A shape (8B, 0.6B) with random weights, or a checkpoint folder.")]
LoadFormat = Annotated[
    str | None, typer.Option(help="auto or dummy; dummy for a shape if left out.", show_default=False)
]
Repeat = Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a sentence.")]
Save = Annotated[Path | None, typer.Option(help="Append the result to this JSON-lines file.", show_default=False)]

# Output tokens of each request in the run before the timed ones, which compiles and fills what the first run needs.
WARMUP_TOKENS = 8


@bench.command()
def throughput(
    batch: Annotated[
        int | None, typer.Option(min=1, help="T3: so many equal requests; T1 if left out.", show_default=False)
    ] = None,
    model: Model = "0.6B",
    load_format: LoadFormat = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    deterministic: options.Deterministic = False,
    repeat: Repeat = 3,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """T1: output tokens per second of 256 uneven requests; with --batch N, T3: of N requests of prompt 512, output 256.

    Example: strata bench throughput --model 8B --batch 32 --save results.jsonl
    """
    test = workloads.offline() if batch is None else workloads.fixed_batch(batch)
    setup = Setup(model, load_format, dtype, device, deterministic)
    run(test, setup, repeat=repeat, as_json=as_json, save=save)


@bench.command()
def latency(
    model: Model = "0.6B",
    load_format: LoadFormat = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    deterministic: options.Deterministic = False,
    repeat: Repeat = 3,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """T2: milliseconds per output token of one greedy request, prompt 128, output 512.

    Example: strata bench latency --model 8B
    """
    setup = Setup(model, load_format, dtype, device, deterministic)
    run(workloads.single(), setup, repeat=repeat, as_json=as_json, save=save)


@bench.command()
def prefill(
    model: Model = "0.6B",
    load_format: LoadFormat = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    deterministic: options.Deterministic = False,
    repeat: Repeat = 3,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """T4: prompt tokens per second of 16 prompts of 2048 tokens.

    Example: strata bench prefill --model 8B --json
    """
    setup = Setup(model, load_format, dtype, device, deterministic)
    run(workloads.prefill(), setup, repeat=repeat, as_json=as_json, save=save)


@bench.command()
def startup(
    model: Model = "0.6B",
    load_format: LoadFormat = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    deterministic: options.Deterministic = False,
    repeat: Repeat = 3,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """T0: seconds from the start of a process to its first token, each repetition a new process.

    Example: strata bench startup --model 0.6B
    """
    setup = Setup(model, load_format, dtype, device, deterministic)
    seconds, name = [], ""
    for _ in range(repeat):
        taken, name = first_token(setup.llm_options())
        seconds.append(taken)
    result = make_result(setup.test_name("T0"), model, dtype, seconds, "s", None, name)
    report(result, as_json=as_json, save=save)


@dataclass(frozen=True)
class Setup:
    """The engine that a test runs on, as the command line asks for it."""

    model: str
    load_format: str | None
    dtype: str
    device: str
    deterministic: bool

    def llm_options(self) -> dict[str, Any]:
        """The keyword arguments of LLM: no prefix cache, so that every repetition does all the work."""
        from strata.cli.costing import find_config
        from strata.models.shapes import SHAPES

        length = min(workloads.MAX_MODEL_LEN, find_config(self.model).max_length)
        return {
            "model": self.model,
            "load_format": self.load_format or ("dummy" if self.model in SHAPES else "auto"),
            "dtype": self.dtype,
            "device": self.device,
            "max_model_len": length,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "deterministic": self.deterministic,
        }

    def test_name(self, name: str) -> str:
        """Deterministic mode is a test of its own, so that it does not pass for the newest result of the other."""
        return f"{name}-deterministic" if self.deterministic else name


def run(test: workloads.Test, setup: Setup, *, repeat: int, as_json: bool, save: Path | None) -> None:
    """Start an engine, warm it up, and time `repeat` calls of the whole test."""
    from strata import LLM

    llm = LLM(**setup.llm_options())
    call(llm, test, WARMUP_TOKENS)
    values = [test.value(call(llm, test)) for _ in range(repeat)]
    name = device_name(llm)
    floor = floor_on(test, setup, name)
    result = make_result(setup.test_name(test.name), setup.model, setup.dtype, values, test.unit, floor, name)
    report(result, as_json=as_json, save=save)


def call(llm: LLM, test: workloads.Test, most: int | None = None) -> float:
    """Seconds of one `generate` with the requests of a test, each cut to `most` output tokens if that is given.

    Raises RuntimeError if a request did not yield as many tokens as it was asked for.
    """
    from strata import SamplingParams

    vocabulary = llm.engine.config.vocab_size
    prompts = [{"prompt_token_ids": [token % vocabulary for token in prompt]} for prompt in test.prompts]
    lengths = [output if most is None else min(output, most) for output in test.outputs]
    params = [SamplingParams(temperature=test.temperature, max_tokens=length, ignore_eos=True) for length in lengths]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    yielded = [len(output.outputs[0].token_ids) for output in outputs]
    if yielded != lengths:
        raise RuntimeError(f"{test.name} asked for {sum(lengths)} output tokens and got {sum(yielded)}")
    return seconds


def floor_on(test: workloads.Test, setup: Setup, product: str) -> float | None:
    """The floor of a test on a device, by the cost of the model's graph; None if the device is not in the database."""
    from strata.cli.costing import dtype_name, find_config, meta_model
    from strata.models.config import DTYPES

    device = recognize(product)
    if device is None:
        return None
    model = meta_model(find_config(setup.model), DTYPES.get(setup.dtype))
    return test.floor(model.step_costs().step, device, dtype_name(model.dtype))


def device_name(llm: LLM) -> str:
    """The device that an engine runs on, as its driver or the system names it."""
    import torch

    device = next(llm.engine.model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def first_token(llm_options: dict[str, Any]) -> tuple[float, str]:
    """Seconds until a new process has generated its first token, and the name of its device.

    Raises RuntimeError if the process ends without one; its own error stands above.
    """
    command = [sys.executable, "-m", "strata.cli.first_token", json.dumps(llm_options)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if process.returncode or not line:
        raise RuntimeError(f"the process ended with exit code {process.returncode} and no token")
    return seconds, str(json.loads(line)["device"])
