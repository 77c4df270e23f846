"""How many requests wait and run and how full the KV pools are while a simulation goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# More samples than that are thinned to half as many, twice as far apart.
_MOST = 400
_WAITING, _RUNNING, _PAGES = "#c05a3c", "#2a6fb0", "#5b8f5b"


@dataclass(frozen=True)
class Moment:
    """At `seconds` from the start: requests under way that wait and that run, and the share of all KV pages in use."""

    seconds: float
    waiting: int
    running: int
    kv_usage: float


class SimulatedTimeline:
    """Sums over all engines, kept at moments that are evenly apart; `moments` has them in order."""

    def __init__(self, engines: int, pages: int) -> None:
        """pages: of all engines together."""
        self.moments: list[Moment] = []
        self._of_engine = [(0, 0, 0)] * engines
        self._waiting = self._running = self._used = 0
        self._pages = pages
        self._every = 1e-3
        self._next = 0.0

    def note(self, engine: int, waiting: int, running: int, used: int) -> None:
        """How an engine stands from now on."""
        before = self._of_engine[engine]
        self._of_engine[engine] = (waiting, running, used)
        self._waiting += waiting - before[0]
        self._running += running - before[1]
        self._used += used - before[2]

    def pass_to(self, now: float) -> None:
        """Nothing changes before `now`."""
        while self._next <= now:
            if now - self._next > _MOST * self._every:
                self._thin()
                continue
            self.moments.append(Moment(self._next, self._waiting, self._running, self._used / self._pages))
            self._next += self._every
            if len(self.moments) >= _MOST:
                self._thin()

    def _thin(self) -> None:
        self.moments = self.moments[::2]
        self._every *= 2
        if self.moments:
            self._next = self.moments[-1].seconds + self._every


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
