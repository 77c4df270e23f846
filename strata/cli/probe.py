"""`strata probe`: what this machine reaches, beside what its maker promises."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strata.hardware.figures import Device
    from strata.hardware.probe.ceiling import Ceiling
    from strata.hardware.probe.report import ProbeReport

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
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
    seconds: Annotated[float, typer.Option(min=1, help="What does not fit into this time is left out.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Measure this machine's ceilings: copies, reads, products, attention, launches, host copies, collectives.

    A product is also held for seconds, as the power limit allows. The result is kept in ~/.cache/strata/probe.

    Example: strata probe --json
    """
    import torch

    from strata.hardware.probe.report import file_of, keep
    from strata.hardware.probe.run import probe as measure

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r} is unknown; give auto, cpu or cuda")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("--device cuda: no CUDA device is here; --device cpu measures the processor")
    kind = "cuda" if device == "cuda" or (device == "auto" and available) else "cpu"
    from strata.bench.comm import ceilings as comm

    report = measure(kind, seconds, comm.parts)
    path = file_of(report.product, len(report.gpus))
    try:
        keep(report, path)
    except OSError as error:
        print(f"strata: warning: not kept: {path}: {error.strerror}", file=sys.stderr)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _draw(report)
        typer.echo(f"kept in {path}")


def _draw(report: ProbeReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from strata.hardware.specs import recognize

    known = recognize(report.product)
    console = Console(highlight=False)
    table = Table(title=f"{report.product}, {report.date}", title_justify="left", box=None)
    for name in ("what", "dtype", "shape", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("reached", "promised", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.ceilings:
        figure = _promise(known, one)
        said, share = ("-", "-") if figure is None else (_quantity(figure, one.unit), f"{one.value / figure:.0%}")
        shape = "x".join(map(str, one.shape))
        table.add_row(one.quantity, one.dtype or "-", shape, _by(one), _quantity(one.value, one.unit), said, share)
    console.print(table)
    for name, told in report.summaries.items():
        if told.power is not None and told.clock is not None:
            reasons = f", held down by {', '.join(told.slowed_by)}" if told.slowed_by else ""
            console.print(f"{name}: {told.power:.0f} W, {told.clock / 1e6:.0f} MHz, {told.temperature} C{reasons}")
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


def _by(one: Ceiling) -> str:
    """Threads or ranks, and the algorithm that was fastest."""
    count = f"{one.count} " if one.count > 1 else ""
    return f"{count}{one.algorithm or ''}".strip() or "1"


def _quantity(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e6:.4g} us"
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if value >= scale), (1.0, ""))
    return f"{value / scale:.4g} {prefix}{unit}"
