"""The picture of latency against load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strata.bench.result import ending_in

PANELS = {"ttft_ms": "time to first token", "tpot_ms": "time per output token"}
TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
LINES = {"p50": "#2a6fb0", "p90": "#8fb7dc", "p99": "#c05a3c"}


def plottable(picture: Path) -> Path:
    """The file, if pictures can be drawn into it; else raises ValueError, before there is a measurement to lose."""
    ending_in(picture, "--plot", ".svg", ".png")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    return picture


def plot_latency(results: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw results (as `LoadResult.values` gives them) of several rates into an SVG or PNG file.

    One panel a latency, milliseconds on a logarithmic scale over requests a second; dashed: the bounds of goodput, and
    the measured saturation. Raises ValueError if no result has a finite rate.
    """
    import matplotlib
    from matplotlib import pyplot, ticker

    points = sorted((one for one in results if _is_plottable(one)), key=lambda one: float(one["request_rate"]))
    if not points:
        raise ValueError("--plot draws latency against --request-rate: give it finite rates (such as 25%,50%,75%,90%)")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "strata", "svg.fonttype": "none", "font.size": 8})
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(8, 3.2), layout="constrained")
    rates = [one["request_rate"] for one in points]
    for panel, (field, name) in zip(panels, PANELS.items(), strict=True):
        for line, color in LINES.items():
            panel.plot(rates, [one[field][line] for one in points], marker="o", markersize=3, color=color, label=line)
        _bounds(panel, points[0], field.removesuffix("_ms"))
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=TICKS))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        panel.set_xlim(left=0)
        panel.set_xlabel("requests/s")
        panel.set_title(f"{name}, ms")
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"{points[0]['model']}, {points[0]['data']}", fontsize=8)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    pyplot.close(figure)


def _is_plottable(result: Mapping[str, Any]) -> bool:
    return isinstance(result["request_rate"], float) and all(result[field] is not None for field in PANELS)


def _bounds(panel: Any, result: Mapping[str, Any], latency: str) -> None:
    objectives = (result["goodput"] or {}).get("objectives", {})
    if latency in objectives:
        panel.axhline(objectives[latency], color="#444444", linewidth=0.8, linestyle="--")
        panel.annotate("objective", (0, objectives[latency]), xytext=(3, 2), textcoords="offset points", fontsize=7)
    if result["saturation"] is not None:
        panel.axvline(result["saturation"], color="#444444", linewidth=0.8, linestyle="--", label="saturation")
