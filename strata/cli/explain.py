"""`strata explain`: where the time of a workload goes, what holds it back, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli import options
from strata.cli.bench.options import AsJson, LoadFormat, Model

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
    as_json: AsJson = False,
) -> None:
    """Run a test and explain it: from the measured time down to the floor, and the verdict.

    Example: strata explain T3-b16 --model builtin --device cpu --probe
    """
    from strata.bench.run import Setup

    setup = Setup(model, load_format, dtype, device, deterministic, tensor_parallel_size)
    workload = _workload(test, prompt, output)
    found = explained(setup, workload, {"max_num_seqs": max_num_seqs}, probe=probe)
    if as_json:
        print(json.dumps(values(found)))
    else:
        draw(found)


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


def values(found: Explanation) -> dict[str, Any]:
    """As JSON has it, with what follows from the parts."""
    fall = found.waterfall
    given = dataclasses.asdict(found)
    given["waterfall"] |= {"unexplained": fall.unexplained, "share_of_floor": fall.floor / fall.measured}
    given["verdict"]["line"] = found.verdict.line
    return given


def draw(found: Explanation) -> None:
    """The waterfall, the operations beside their floors, and the verdict, as tables."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from strata.graph.draw import duration, quantity

    console, fall = Console(highlight=False), found.waterfall
    table = Table(title=f"{found.title}; {found.device}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("layer", "cause"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("measured", "", "", duration(fall.measured), "")
    for part in fall.parts:
        table.add_row(part.name, part.layer, part.cause, duration(part.seconds), f"{part.seconds / fall.measured:.1%}")
    table.add_row("not explained", "", "", duration(fall.unexplained), f"{fall.unexplained / fall.measured:.1%}")
    table.add_row("floor", "", "", duration(fall.floor), f"{fall.floor / fall.measured:.1%}")
    console.print(table)
    operations = Table(title="operations", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    operations.add_column("")
    for name in ("time", "floor", "FLOPs", "bytes"):
        operations.add_column(name, justify="right", no_wrap=True)
    operations.add_column("bound", no_wrap=True)
    for one in found.operations:
        amounts = quantity(one.flops), f"{quantity(one.bytes)}B"
        operations.add_row(one.name, duration(one.seconds), duration(one.floor), *amounts, one.bound)
    console.print(operations)
    verdict = found.verdict
    console.print(f"{verdict.layer}: {verdict.symptom} ({verdict.cause})", style="bold", markup=False, soft_wrap=True)
    for line in verdict.evidence:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    for remedy in verdict.remedies:
        option = f" ({remedy.option})" if remedy.option else ""
        console.print(f"  saves {remedy.gain:.0%}: {remedy.what}{option}", markup=False, soft_wrap=True)
    for source in found.sources:
        console.print(f"from {source}", style="dim", soft_wrap=True, markup=False)
