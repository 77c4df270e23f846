"""The picture of a simulated load: what waits, what runs, and how full the KV pools are, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strata.plan.simulate.timeline import Moment

_WAITING, _RUNNING, _PAGES = "#c05a3c", "#2a6fb0", "#5b8f5b"


def draw_timeline(moments: Sequence[Moment], title: str, picture: Path) -> None:
    """Draw at least two moments into an SVG or PNG file, of all engines together. Needs matplotlib."""
    import matplotlib
    from matplotlib import pyplot, ticker

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "strata", "svg.fonttype": "none", "font.size": 8})
    figure, panels = pyplot.subplots(3, 1, figsize=(8, 4.6), sharex=True, layout="constrained")
    seconds = [moment.seconds for moment in moments]
    values = (
        ("requests that wait", [moment.waiting for moment in moments], _WAITING),
        ("requests that run", [moment.running for moment in moments], _RUNNING),
        ("KV pages in use", [moment.kv_usage for moment in moments], _PAGES),
    )
    for panel, (name, heights, color) in zip(panels, values, strict=True):
        panel.stairs(heights, [*seconds, 2 * seconds[-1] - seconds[-2]], fill=True, color=color, alpha=0.6)
        panel.set_title(name, loc="left", fontsize=8)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[:2]:
        panel.yaxis.set_major_locator(ticker.MaxNLocator(nbins=4, integer=True))
    panels[2].yaxis.set_major_locator(ticker.MaxNLocator(nbins=4))
    panels[2].yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1.0, decimals=None))
    panels[2].set_xlabel("seconds")
    panels[2].set_xlim(0, max(seconds[-1], 1e-3))
    figure.suptitle(title, fontsize=8)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    pyplot.close(figure)
