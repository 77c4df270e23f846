"""`strata simulate`: a served load without the device: the engine's own scheduler under a clock of its own."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli import options
from strata.cli.bench import load_options
from strata.engine.scheduling.room import SERVER_TPOT_MS, SERVER_TTFT_MS
from strata.hardware.specs import DEVICES
from strata.models.folder import folder_shape_or_file

if TYPE_CHECKING:
    from strata.hardware.figures import Device
    from strata.plan.simulate.fleet import Failure

# Each of them takes memory here.
_MOST = {"num-prompts": 10_000_000, "prefix-groups": 10_000, "data-parallel-size": 10_000}
_FAILURE = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?::(\d+(?:\.\d+)?))?", re.ASCII)


def simulate(
    context: typer.Context,
    model: options.ModelOrSizes,
    dataset: Annotated[
        str,
        typer.Option(
            help="random, shared-prefix, lognormal (lengths as people's), or a JSON-lines file of prompt (ids) or "
            "input_length, maybe with hash_ids, and output_length."
        ),
    ] = "random",
    num_prompts: load_options.NumPrompts = None,
    input_len: load_options.InputLen = 512,
    output_len: load_options.OutputLen = 128,
    length_spread: load_options.LengthSpread = 0.0,
    longest: load_options.Longest = 2048,
    prefix_len: load_options.PrefixLen = 1024,
    prefix_groups: load_options.PrefixGroups = 8,
    request_rate: Annotated[
        str, typer.Option(help="Requests a second, inf, or percent of saturation, simulated first; several: 25%,50%.")
    ] = "inf",
    burstiness: load_options.Burstiness = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests under way; for rates in percent, of the saturation (256).")
    ] = None,
    replay: load_options.Replay = False,
    goodput: load_options.Goodput = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same lengths and arrivals.")] = 0,
    fail: Annotated[
        list[str] | None,
        typer.Option(help="ENGINE@SECONDS:DOWN: it ends then and serves again after DOWN (19) seconds; repeatable."),
    ] = None,
    hardware: options.Hardware = "h200",
    device: options.HardwareBefore = None,
    data_parallel_size: Annotated[
        int, options.engine_option(min=1, help="Engines that requests are divided among.")
    ] = 1,
    tensor_parallel_size: options.TensorParallelSize = 1,
    message_dtype: options.MessageDtype = "auto",
    enable_expert_parallel: options.EnableExpertParallel = False,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: Annotated[int | None, options.engine_option(min=1, help="Most tokens of a step.")] = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    num_pages: Annotated[
        int | None, options.engine_option(min=1, help="KV pages; what memory allows if left out.")
    ] = None,
    enable_prefix_caching: Annotated[
        bool, options.engine_option(help="Reuse the pages of prompts that begin alike.")
    ] = True,
    tpot_target_ms: options.TpotTargetMs = SERVER_TPOT_MS,
    step_target_ms: options.TpotTargetMsBefore = None,
    ttft_target_ms: options.TtftTargetMs = SERVER_TTFT_MS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a load instead of tables.")] = False,
    save: Annotated[Path | None, typer.Option(help="Append each result to this file, a JSON object a line.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what waits, runs and is held over time (the last load) as SVG or PNG.")
    ] = None,
) -> None:
    """Simulate a server under load, without its device: the engine's own scheduler and router, predicted steps. Loads
    and figures are those of strata bench serve; nothing is refused for a full queue, and no request times out.

    Example: strata simulate 8B --request-rate 10,20,30 --data-parallel-size 2 --goodput 'ttft:200 tpot:15'
    """
    from strata.bench.load.plot import plottable
    from strata.bench.load.report import report_console, sweep_table
    from strata.bench.load.simulated import SimulatedServer, simulate_loads
    from strata.bench.result import writable
    from strata.engine.engine_config import EngineConfig
    from strata.plan.meta_model import find_config
    from strata.plan.simulate.engine import predicted_engine
    from strata.plan.simulate.fleet import Fleet, FleetConfig
    from strata.plan.simulate.host import SERVER
    from strata.plan.simulate.request import SimulatedRequest
    from strata.plan.simulate.timeline import draw_timeline

    sizes = {"num-prompts": num_prompts, "prefix-groups": prefix_groups, "data-parallel-size": data_parallel_size}
    for name, most in _MOST.items():
        if (sizes[name] or 0) > most:
            raise ValueError(f"--{name} {sizes[name]} is more than can be simulated; give {most} or fewer")
    load_options.check_used(context, dataset, request_rate)
    load = load_options.load_config(
        dataset=dataset,
        chat=False,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        length_spread=length_spread,
        longest=longest,
        prefix_len=prefix_len,
        prefix_groups=prefix_groups,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        replay=replay,
        goodput=goodput,
        timeout=0.0,
        seed=seed,
    )
    spec, source = _device(hardware), folder_shape_or_file(model)
    config = find_config(source)
    picture, saved = None if plot is None else writable(plottable(plot)), writable(save)
    asked = EngineConfig(
        source,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        message_dtype=message_dtype,
        enable_expert_parallel=enable_expert_parallel,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        num_pages=num_pages,
        enable_prefix_caching=enable_prefix_caching,
        tpot_target_ms=tpot_target_ms or None,
        ttft_target_ms=ttft_target_ms,
    )
    failures = tuple(_failure(one) for one in fail or ())
    engine = predicted_engine(asked, config, spec)
    whole = FleetConfig(engine.shape, data_parallel_size, None, failures)

    def make(requests: Sequence[SimulatedRequest], concurrency: int | None, trees: bool) -> Fleet:
        shape = dataclasses.replace(engine.shape, caches=trees)
        return Fleet(
            dataclasses.replace(whole, shape=shape, max_concurrency=concurrency), engine.prices, SERVER, requests
        )

    longest_sequence = engine.shape.scheduler.max_length
    engines = data_parallel_size, tensor_parallel_size, longest_sequence, enable_prefix_caching, make
    served = SimulatedServer(model, hardware, *engines, failures)
    console, results = report_console(), []
    for result in simulate_loads(served, load):
        results.append(result)
        line = json.dumps(result.values())
        if as_json:
            print(line, flush=True)
        else:
            console.print(result.shown(), "")
        if saved is not None:
            with saved.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    if len(results) > 1 and not as_json:
        console.print(sweep_table(results))
    if not as_json:
        for source in engine.sources:
            console.print(f"from {source}", style="dim", soft_wrap=True)
        if not engine.sources:
            console.print(f"nothing was measured of {hardware}: all times are analytic", style="dim", soft_wrap=True)
    if picture is not None:
        last = results[-1]
        draw_timeline(last.timeline, f"{last.model} on {data_parallel_size} x {hardware}: {last.data}", picture)


def _device(name: str) -> Device:
    """Of the database; whether it runs the kernels is found later. Raises ValueError, naming those that do."""
    from strata.kernels.device_limits import DeviceLimits, why_not

    if name in DEVICES:
        return DEVICES[name]
    limits = {key: DeviceLimits.listed(one) for key, one in DEVICES.items() if one.cuda is not None}
    able = ", ".join(key for key, one in limits.items() if why_not(one, has_triton=True) is None)
    what = f"{name!r} is unknown"
    if name == "cpu":
        what = "cpu: steps of processors are not simulated, those of Strata's CUDA kernels are"
        able += ", or load a server that runs on it by strata bench serve"
    raise ValueError(f"--hardware {what}; give one of {able}")


def _failure(text: str) -> Failure:
    from strata.plan.simulate.fleet import Failure

    found = _FAILURE.fullmatch(text)
    if found is None:
        raise ValueError(f"--fail {text}: give ENGINE@SECONDS or ENGINE@SECONDS:DOWN, like 0@20:19")
    return Failure(int(found[1]), float(found[2]), float(found[3] or 19))
