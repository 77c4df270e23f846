"""`strata probe`: what this machine reaches, beside what its maker promises."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strata.hardware.figures import Device
    from strata.hardware.probe.ceiling import Ceiling
    from strata.hardware.probe.report import ProbeReport

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
_SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
# Of which promised quantity each measured one is a part; the dtype is the same.
_PROMISED = {
    "copy": "bandwidth",
    "read": "bandwidth",
    "product": "compute",
    "product, burst": "compute",
    "product, sustained": "compute",
    "attention": "compute",
    "host to device": "host",
    "device to host": "host",
}


def probe(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: the first GPU, and messages between all.")] = "auto",
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="What does not fit into this time is left out.")
    ] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Measure this machine's ceilings: copies, reads, products, attention, launches, host copies, collectives.

    A product is also held for seconds, as the power limit allows. The result is kept in ~/.cache/strata/probe,
    unless it lacks what an earlier one there has.

    Example: strata probe --json
    """
    import torch

    from strata.hardware.probe.report import file_of, keep, lost
    from strata.hardware.probe.run import probe as measure

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r} is unknown; give auto, cpu or cuda")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("--device cuda: no CUDA device is here; --device cpu measures the processor")
    kind = "cuda" if device == "cuda" or (device == "auto" and available) else "cpu"
    from strata.bench.comm import measure as comm

    report = measure(kind, seconds, comm.probe_items)
    path = file_of(report.product, len(report.gpus))
    why_not = None
    if more := lost(report, path):
        why_not = f"{path} has {', '.join(more)} too; give more --seconds, or remove it"
    else:
        try:
            keep(report, path)
        except OSError as error:
            why_not = f"{path}: {error.strerror}"
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _draw(report)
    if why_not is not None:
        print(f"strata: warning: not kept: {why_not}", file=sys.stderr)
    elif not as_json:
        typer.echo(f"kept in {path}")


def _draw(report: ProbeReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from strata.hardware.specs import recognize

    known = recognize(report.product)
    console = Console(highlight=False)

    def table(title: str | None, texts: Sequence[str], numbers: Sequence[str]) -> Table:
        made = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for name in texts:
            made.add_column(name, no_wrap=True)
        for name in numbers:
            made.add_column(name, justify="right", no_wrap=True)
        return made

    # Two of them, each of which a terminal of 80 columns shows whole.
    rates = table(
        f"{report.product}, {report.date}", ("what", "dtype", "shape", "by"), ("reached", "promised", "unit", "share")
    )
    times = table(None, ("what", "size", "by"), ("us",))
    for one in report.ceilings:
        if one.unit == "s":
            times.add_row(one.quantity, _shape(one), _by(one), f"{one.value * 1e6:.4g}")
            continue
        figure = _promise(known, one)
        scale, prefix = _prefix(max(one.value, figure or 0.0))
        said, share = ("-", "-") if figure is None else (f"{figure / scale:.4g}", f"{one.value / figure:.0%}")
        cells = f"{one.value / scale:.4g}", said, f"{prefix}{one.unit}", share
        rates.add_row(one.quantity, one.dtype or "-", _shape(one), _by(one), *cells)
    for each in (rates, times):
        if each.row_count:
            console.print(each)
    for name, told in report.summaries.items():
        if told.power is not None and told.clock is not None:
            reasons = f", held down by {', '.join(told.slowed_by)}" if told.slowed_by else ""
            busy = "".join(f", {part} {share:.0%}" for part, share in told.activity.items())
            console.print(
                f"{name}: {told.power:.0f} W, {told.clock / 1e6:.0f} MHz, {told.temperature} C{busy}{reasons}"
            )
    for index, gpu in enumerate(report.gpus):
        console.print(
            f"GPU {index}: {gpu.links or 0} NVLinks, PCIe {gpu.pcie or 'not told'}, NUMA node {gpu.numa}, "
            f"reads the memory of {list(gpu.peers)}"
        )
    here = report.processor
    console.print(f"{here.name}: {here.cores} cores, {here.memory / 2**30:.0f} GiB, {here.nodes} NUMA nodes")
    for name, why in report.missing.items():
        console.print(f"not measured: {name}: {why}")
    console.print(f"{report.seconds:.1f} s")


def _promise(known: Device | None, one: Ceiling) -> float | None:
    if known is None or one.quantity not in _PROMISED:
        return None
    quantity = _PROMISED[one.quantity]
    figure = known.known(quantity, one.dtype if quantity == "compute" else None, measured=False)
    return None if figure is None else figure.value


def _shape(one: Ceiling) -> str:
    """Of operands, or bytes."""
    if len(one.shape) != 1:
        return "x".join(map(str, one.shape))
    (size,) = one.shape
    unit, scale = next((name, scale) for name, scale in _SIZES if size >= scale or scale == 1)
    return f"{size / scale:g} {unit}"


def _by(one: Ceiling) -> str:
    """Threads or ranks, and the algorithm that was fastest."""
    count = f"{one.count} " if one.count > 1 else ""
    return f"{count}{(one.algorithm or '').removesuffix('_attention')}".strip() or "1"


def _prefix(value: float) -> tuple[float, str]:
    return next(((scale, prefix) for scale, prefix in _PREFIXES if value >= scale), (1.0, ""))
