"""`strata simulate`: a served load without the device: the engine's own scheduler under a clock of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.bench.result import report_console, writable
from strata.cli import options
from strata.cli.bench.load_options import LoadOptions
from strata.cli.bench.options import ReportOptions
from strata.cli.groups import OptionGroup, Values, grouped
from strata.hardware.specs import DEVICES
from strata.models.folder import folder_shape_or_file

if TYPE_CHECKING:
    from strata.hardware.figures import Device
    from strata.plan.simulate.fleet import Failure

# Each of them takes memory here.
_MOST = {"num-prompts": 10_000_000, "prefix-groups": 10_000, "data-parallel-size": 10_000}
_FAILURE = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?::(\d+(?:\.\d+)?))?", re.ASCII)


@dataclass(frozen=True)
class SimulatedLoadOptions(LoadOptions):
    dataset: Annotated[
        str,
        typer.Option(
            help="random, shared-prefix, lognormal (lengths as people's), or a JSON-lines file of prompt (ids) or "
            "input_length, maybe with hash_ids, and output_length."
        ),
    ] = "random"
    request_rate: Annotated[
        str, typer.Option(help="Requests a second, inf, or percent of saturation, simulated first; several: 25%,50%.")
    ] = "inf"
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests under way; for rates in percent, of the saturation (256).")
    ] = None
    seed: Annotated[int, typer.Option(help="The same seed gives the same lengths and arrivals.")] = 0


class _FleetOptions(options.EngineOptions):
    data_parallel_size: Annotated[
        int, options.engine_option(min=1, help="Engines that requests are divided among.")
    ] = 1


@dataclass(frozen=True)
class _ReportOptions(ReportOptions):
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a load instead of tables.")] = False
    save: Annotated[
        Path | None,
        typer.Option(help="Append each result to this file, a JSON object a line.", callback=writable),
    ] = None


@grouped
def simulate(
    context: typer.Context,
    model: options.ModelOrSizes,
    *,
    load: Annotated[SimulatedLoadOptions, OptionGroup(SimulatedLoadOptions, make=SimulatedLoadOptions)],
    fail: Annotated[
        list[str] | None,
        typer.Option(help="ENGINE@SECONDS:DOWN: it ends then and serves again after DOWN (19) seconds; repeatable."),
    ] = None,
    hardware: options.Hardware = "h200",
    device: options.HardwareBefore = None,
    engine: Annotated[
        Values,
        OptionGroup(
            _FleetOptions,
            "data_parallel_size tensor_parallel_size message_dtype enable_expert_parallel quantization kv_cache_dtype "
            "max_model_len max_num_seqs max_num_batched_tokens gpu_memory_utilization num_pages enable_prefix_caching "
            "tpot_target_ms step_target_ms ttft_target_ms",
        ),
    ],
    to: Annotated[_ReportOptions, OptionGroup(_ReportOptions, make=_ReportOptions)],
    plot: Annotated[
        Path | None, typer.Option(help="Draw what waits, runs and is held over time (the last load) as SVG or PNG.")
    ] = None,
) -> None:
    """Simulate a server under load, without its device: the engine's own scheduler and router, predicted steps. Loads
    and figures are those of strata bench serve; nothing is refused for a full queue, and no request times out.

    Example: strata simulate 8B --request-rate 10,20,30 --data-parallel-size 2 --goodput 'ttft:200 tpot:15'
    """
    from strata.bench.load.plot import plottable
    from strata.bench.load.report import sweep_table
    from strata.bench.load.simulated import SimulatedServer, simulate_loads
    from strata.engine.engine_config import EngineConfig
    from strata.plan.meta_model import find_config
    from strata.plan.simulate.engine import predicted_engine
    from strata.plan.simulate.fleet import Fleet, FleetConfig
    from strata.plan.simulate.host import SERVER
    from strata.plan.simulate.request import SimulatedRequest
    from strata.plan.simulate.timeline import draw_timeline

    engines = engine.pop("data_parallel_size")
    sizes = {"num-prompts": load.num_prompts, "prefix-groups": load.prefix_groups, "data-parallel-size": engines}
    for name, most in _MOST.items():
        if (sizes[name] or 0) > most:
            raise ValueError(f"--{name} {sizes[name]} is more than can be simulated; give {most} or fewer")
    load.check_used(context)
    asked = load.config()
    spec, source = _device(hardware), folder_shape_or_file(model)
    config = find_config(source)
    picture = None if plot is None else writable(plottable(plot))
    engine["tpot_target_ms"] = engine["tpot_target_ms"] or None
    failures = tuple(_failure(one) for one in fail or ())
    simulated = predicted_engine(EngineConfig(source, **engine), config, spec)
    whole = FleetConfig(simulated.shape, engines, None, failures)

    def make(requests: Sequence[SimulatedRequest], concurrency: int | None, trees: bool) -> Fleet:
        shape = dataclasses.replace(simulated.shape, caches=trees)
        return Fleet(
            dataclasses.replace(whole, shape=shape, max_concurrency=concurrency), simulated.prices, SERVER, requests
        )

    longest_sequence = simulated.shape.scheduler.max_length
    ranks, caches = engine["tensor_parallel_size"], engine["enable_prefix_caching"]
    served = SimulatedServer(model, hardware, engines, ranks, longest_sequence, caches, make, failures)
    results = []
    for result in simulate_loads(served, asked):
        results.append(result)
        to.report(result.values(), result.shown())
    if not to.as_json:
        console = report_console()
        if len(results) > 1:
            console.print(sweep_table(results))
        for source in simulated.sources:
            console.print(f"from {source}", style="dim", soft_wrap=True)
        if not simulated.sources:
            console.print(f"nothing was measured of {hardware}: all times are analytic", style="dim", soft_wrap=True)
    if picture is not None:
        last = results[-1]
        draw_timeline(last.timeline, f"{last.model} on {engines} x {hardware}: {last.data}", picture)


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
