"""`strata explain`: where the time of a workload goes, what holds it back, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli import options
from strata.cli.bench.options import AsJson, LoadFormat, Model
from strata.cli.explain_output import Html, TraceFile, show

if TYPE_CHECKING:
    from strata.bench.explain.measure import Workload
    from strata.bench.run import Setup
    from strata.plan.explain.explanation import Explanation
    from strata.plan.explain.measurement import MeasuredStep


def explain(
    test: Annotated[str, typer.Argument(help="T1, T2, T3-bN (N requests) or T4, as of strata bench.")] = "T3-b8",
    model: Model = "builtin",
    load_format: LoadFormat = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    deterministic: options.Deterministic = False,
    tensor_parallel_size: options.TensorParallelSize = 1,
    max_num_seqs: options.MaxNumSeqs = 256,
    prompt: Annotated[int | None, typer.Option(min=1, help="T3: tokens of each prompt, 512 if left out.")] = None,
    output: Annotated[int | None, typer.Option(min=1, help="T3: tokens of each output, 256 if left out.")] = None,
    probe: Annotated[bool, typer.Option(help="Try the best remedies on a short form of the test.")] = False,
    html: Html = None,
    trace: TraceFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a test and explain it: from the measured time down to the floor, and the verdict.

    Example: strata explain T3-b16 --model builtin --device cpu --probe
    """
    from strata.bench.run import Setup

    setup = Setup(model, load_format, dtype, device, deterministic, tensor_parallel_size)
    workload = _workload(test, prompt, output)
    found = explained(setup, workload, {"max_num_seqs": max_num_seqs}, probe=probe)
    show(found, as_json=as_json, html=html, trace=trace)


def _workload(name: str, prompt: int | None, output: int | None) -> Workload:
    from strata.bench import workloads
    from strata.bench.explain.measure import Workload

    test = workloads.named(name)
    if prompt is None and output is None:
        return Workload(test)
    if not name.startswith("T3-b"):
        raise ValueError(f"--prompt and --output are of T3-bN, whose requests are alike; {name} has lengths of its own")
    count = len(test.prompts)
    prompts = test.prompts if prompt is None else workloads.random_prompts(count, prompt)
    return Workload(dataclasses.replace(test, prompts=prompts, outputs=(output or test.outputs[0],) * count))


def explained(setup: Setup, workload: Workload, changes: Mapping[str, Any], *, probe: bool = False) -> Explanation:
    """A test on an engine with these changes of its options. Raises ValueError for a model that reads too little."""
    from strata.bench.explain.measure import measure, measured_steps
    from strata.bench.run import engine, floor_on
    from strata.plan.explain.ceilings import processor_device, steps_on_gpu, steps_on_processor
    from strata.plan.explain.explain import explain as explain_run
    from strata.plan.meta_model import dtype_name

    test = workload.test
    given = setup.llm_options() | dict(changes)
    if test.longest > given["max_model_len"]:
        raise ValueError(
            f"{test.name} has sequences of up to {test.longest:,} tokens and {setup.model} reads "
            f"{given['max_model_len']:,}: take another --model, or T3 with a smaller --prompt and --output"
        )
    llm = engine(given)
    on_host = llm.engine.device.type == "cpu"
    ran = dtype_name(next(llm.engine.model.parameters()).dtype)
    sources: Sequence[str] = ()
    ideal = None
    if on_host:
        here, sources = processor_device()
        times = steps_on_processor(llm.engine.config, ran, here, setup.deterministic)
        ideal = test.floor(times.costs.step, times.device, times.dtype)
    else:
        import torch

        product = torch.cuda.get_device_name(llm.engine.device)
        times = steps_on_gpu(llm.engine.config, ran, product, setup.deterministic)
        ideal = floor_on(test, setup, product)
    measured_steps(llm, workload.short())  # compiles and fills what the first run needs
    title = f"{setup.test_name(test.name)} {setup.model}"
    measured = measure(llm, workload, given, times, title=title, ideal=ideal, short=workload.short())

    def tried(change: Mapping[str, Any]) -> Sequence[MeasuredStep]:
        return measured_steps(engine(given | dict(change)), workload.short())

    prober: Callable[[Mapping[str, Any]], Sequence[MeasuredStep]] | None = tried if probe else None
    return explain_run(measured, times, prober=prober, sources=sources)
