"""`strata plan`: how to serve or train a model on given devices, what to expect, and the command that starts it."""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli import options
from strata.cli.groups import Values, grouped
from strata.hardware.figures import GIGA
from strata.hardware.specs import device_to_plan
from strata.models.folder import folder_shape_or_file

if TYPE_CHECKING:
    from strata.hardware.figures import Device
    from strata.plan.search.report import ServingPlan

_MAX_TOKENS = 10**7
# Heads of the last column of tables.
_PRECISION, _LACKS = "weights, KV", "lacks"


@grouped
def plan(
    context: typer.Context,
    model: options.ModelOrSizes,
    *,
    hardware: options.Hardware = "h200",
    gpus: Annotated[int, typer.Option(min=1, max=100_000, help="How many of them there are.")] = 1,
    input_len: Annotated[int | None, typer.Option(min=1, max=_MAX_TOKENS, help="Tokens of a prompt.")] = None,
    isl: options.InputLenBefore = None,
    output_len: Annotated[int | None, typer.Option(min=1, max=_MAX_TOKENS, help="Tokens of an answer.")] = None,
    osl: options.OutputLenBefore = None,
    trace: Annotated[Path | None, typer.Option(help="JSON lines with input_length and output_length instead.")] = None,
    cached: Annotated[int, typer.Option(min=0, help="First tokens of prompts that the prefix cache has.")] = 0,
    ttft: Annotated[float | None, typer.Option(help="Most milliseconds to the first token, on average.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Most milliseconds of each token after it.")] = None,
    price: Annotated[float | None, typer.Option(min=0, max=1e9, help="Of one device an hour, in any currency.")] = None,
    precisions: Annotated[Values, options.engine("quantization kv_cache_dtype")],
    gpus_per_host: Annotated[int, typer.Option(min=1, help="Devices that a fast link joins.")] = 8,
    network: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="GB/s of a device to other hosts, each way.")
    ] = 50.0,
    train: Annotated[
        bool, typer.Option("--train", help="Train it; then the next four options, which are of that alone.")
    ] = False,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a step, on all devices.")] = None,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    precision: Annotated[str, typer.Option(help="Of its layers: bf16, fp8-tensor, fp8-row.")] = "bf16",
    out: Annotated[Path | None, typer.Option(help="Write the run file of the training there.")] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw tokens a second a device against those of a user (.svg).")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the plan as a page that loads nothing (.html).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Choose how to serve a model: ranks, replicas, sequences at once and tokens of a step that give the most tokens a
    second within the objectives, predicted from what was measured of the device.

    Weights and pages in fewer bits stand beside it unless asked for, and what Strata cannot run yet. With --train,
    choose the quickest layout of a training step that fits.

    Example: strata plan 70B --hardware h200 --gpus 8 --input-len 2000 --output-len 500 --tpot 30
    """
    if train != (batch_tokens is not None):
        raise ValueError("a plan of a training run takes --train and --batch-tokens, one of serving neither")
    in_bits = {name.replace("_", "-"): value for name, value in precisions.items() if value != "auto"}
    if batch_tokens is not None:
        serving = {"input-len": input_len, "output-len": output_len, "trace": trace, "ttft": ttft, "tpot": tpot}
        serving |= {"cached": cached or None, "svg": svg, "html": html}
        if given := [f"--{name}" for name, value in {**serving, **in_bits}.items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: for serving alone; leave out --train, or this")
        on = (device_to_plan(hardware), gpus, batch_tokens, sequence, gpus_per_host, network * GIGA, precision)
        _plan_training(model, folder_shape_or_file(model), on, price, out, as_json=as_json)
        return
    if given := [f"--{name}" for name in ("out", "sequence", "precision") if options.is_passed(context, name)]:
        raise ValueError(
            f"{', '.join(given)}: for a training run alone; add --train and --batch-tokens, or leave it out"
        )
    from strata.bench.result import PAGE_ENDINGS, ending_in, writable
    from strata.plan.search.frontier import drawable, frontier_svg
    from strata.plan.search.page import html_page
    from strata.plan.search.precision import Precision
    from strata.plan.search.report import serving_plan
    from strata.plan.search.traffic import Objectives, Traffic, read_traffic

    if svg or html:
        drawable()
    svg, html = writable(ending_in(svg, "--svg", ".svg")), writable(ending_in(html, "--html", *PAGE_ENDINGS))
    if trace is not None and (input_len or output_len):
        raise ValueError(f"--trace {trace} has the lengths of requests: leave it out, or --input-len and --output-len")
    if trace is None and not (input_len and output_len):
        raise ValueError("give the lengths of requests by --input-len and --output-len, or by --trace FILE")
    if input_len and output_len:
        traffic = Traffic.of(input_len, output_len, cached)
    else:
        traffic = read_traffic(trace or Path(), cached)
    if tpot is not None and traffic.output == 1:
        raise ValueError(f"--tpot {tpot:g}: answers of one token have no time after the first; leave it out")
    if svg is not None and traffic.output == 1:
        raise ValueError(f"--svg {svg}: answers of one token have no tokens a second of a user to draw; leave it out")
    objectives = Objectives(*(None if value is None else value / 1e3 for value in (ttft, tpot)))
    file = folder_shape_or_file(model)
    asked, way, spec = Precision(**precisions), network * GIGA, device_to_plan(hardware)
    found = serving_plan(model, file, spec, gpus, traffic, objectives, gpus_per_host, way, price, asked)
    if svg is not None:
        svg.write_text(frontier_svg(found), encoding="utf-8")
    if html is not None:
        html.write_text(html_page(found), encoding="utf-8")
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        draw_plan(found)


def _plan_training(
    model: str,
    file: str,
    on: tuple[Device, int, int, int, int, float, str],
    price: float | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print the plan, and write the run file of the best. on: device, devices, tokens of a batch and of a sequence,
    devices of a host, bytes/s between hosts, precision.

    Raises ValueError for a task that cannot be fulfilled, and for an `out` that exists; OSError for one that cannot be
    written.
    """
    from strata.bench.result import writable
    from strata.plan.meta_model import find_config
    from strata.plan.training.plan import layout_name, milliseconds, training_plan
    from strata.plan.training.task import TrainingTask

    if out is not None and out.exists():
        raise ValueError(f"{out} exists; give --out another name, or remove it")
    writable(out)
    found = training_plan(model, TrainingTask(find_config(file), *on), price)
    if out is not None:
        out.write_text(found.run_file(), encoding="utf-8")
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    for name, value in found.lines():
        print(_named(name, value))
    print(f"\n{'run.toml' if out is None else out}:\n\n{found.run_file()}")
    print(shlex.join(str(out) if out is not None and one == "run.toml" else one for one in found.command))
    if found.found.others:
        print("\nThe quickest of other divisions among devices:")
    for one in found.found.others:
        how = f"{layout_name(one.shape.layout)}, recompute {one.recompute}"
        print(f"  {milliseconds(one.likely.seconds):>9} ms  {one.likely_mfu:>6.1%}  {how}")


def _named(name: str, value: str) -> str:
    """A line of a plan, several of 80 columns where it is longer."""
    return textwrap.fill(value, 80, initial_indent=f"{name:<14}", subsequent_indent=" " * 14, break_long_words=False)


def draw_plan(found: ServingPlan) -> None:
    """Print a plan as tables and lines."""
    from rich.table import Table

    from strata.bench.result import report_console
    from strata.plan.search.choice import ServingChoice

    console = report_console()

    def table(title: str, choices: tuple[ServingChoice, ...], last: str = "") -> Table:
        made = Table(title=title, title_justify="left", box=None, pad_edge=False)
        names = ("engines", "sequences", "TTFT ms", "TPOT ms", "tok/s", "each", "analytic")
        made.add_column("layout")
        for name in names:
            made.add_column(name, justify="right", no_wrap=True)
        if last:
            made.add_column(last)
        for one in choices:
            ends = {_PRECISION: one.settings.precision.short, _LACKS: ", ".join(one.blocked)}
            made.add_row(
                one.settings.layout.name,
                f"{one.replicas}",
                f"{one.settings.sequences}",
                f"{one.point.ttft * 1e3:,.1f}",
                "-" if one.tpot_ms is None else f"{one.tpot_ms:,.2f}",
                f"{one.tokens:,.0f}",
                f"{one.tokens_per_device:,.0f}",
                f"{one.analytic:.0%}",
                *([ends[last]] if last else ()),
            )
        return made

    console.print(table(f"{found.title}: the best", (found.best,), _LACKS if found.best.blocked else ""))
    for name, value in found.lines():
        print(_named(name, value))
    if found.command is None:
        print(f"\nStrata cannot run this yet: it lacks {', '.join(found.best.blocked)}.")
    else:
        print(f"\n{found.where}\n  {shlex.join(found.command)}")
        if found.remark:
            print(f"  ({found.remark})")
    if found.others:
        console.print(table("\nOther layouts", found.others))
    if found.quantized:
        console.print(
            table(
                "\nIn fewer bits, which changes answers: --quantization, --kv-cache-dtype", found.quantized, _PRECISION
            )
        )
    for line in found.refused:
        print(_named("refused", line))
    if found.blocked:
        console.print(table("\nNot in Strata yet", found.blocked, _LACKS))
    console.print("analytic: share of a step's time that no measurement of the device tells", style="dim")
    for source in found.sources:
        console.print(f"from {source}", style="dim", soft_wrap=True)
