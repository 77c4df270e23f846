"""A run's curves as one picture, from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from strata.train.log.json_lines import read_lines
from strata.train.log.logs import FILE

REPORT = "report.svg"
VALIDATION = "validation_loss"
# By name in the log: the title, and from which factor on between its largest and its least value the scale is
# logarithmic, if it ever is.
PANELS = {
    "loss": ("loss", 10.0),
    "gradient_norm": ("gradient norm before clipping", 1.0),
    "learning_rate": ("learning rate", inf),
    "tokens_per_second": ("tokens/s", inf),
    "mfu": ("MFU", inf),
}


def plot_report(folder: Path) -> Path | None:
    """Draw `report.svg` from the log of the run in `folder`, a panel for each curve that it has.

    Returns the picture's path; None, and draws nothing, without matplotlib or without two lines to connect.
    """
    lines = read_lines(folder / FILE) if (folder / FILE).exists() else []
    curves = {name: _points(lines, name) for name in PANELS}
    plotted = {name: points for name, points in curves.items() if len(points) > 1}
    validation = _points(lines, VALIDATION)
    if not plotted or find_spec("matplotlib") is None:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "strata", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(8, 1.6 * len(plotted)), layout="constrained")
        panels = figure.subplots(len(plotted), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (name, points) in zip(panels, plotted.items(), strict=True):
            title, factor = PANELS[name]
            panel.plot(*zip(*points, strict=True), color="#2a6fb0", linewidth=1, label="training")
            if name == "loss" and validation:
                panel.plot(*zip(*validation, strict=True), color="#c4561e", linewidth=1, marker=".", label="validation")
                panel.legend(frameon=False, fontsize=7)
            values = [value for _, value in (points + validation if name == "loss" else points)]
            if is_logarithmic(values, factor):
                panel.set_yscale("log")
                title += " (logarithmic)"
            panel.set_title(title, loc="left", fontsize=8)
            panel.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xlabel("step")
        figure.suptitle(folder.name, fontsize=8)
        figure.savefig(folder / REPORT, metadata={"Date": None})
    return folder / REPORT


def is_logarithmic(values: Sequence[float], factor: float) -> bool:
    """Whether positive values lie so far apart that small ones could not be told from each other on a linear scale."""
    return min(values) > 0 and max(values) >= factor * min(values)


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Step and value of the lines that have one; a step without a finite value is a gap in the data."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]
