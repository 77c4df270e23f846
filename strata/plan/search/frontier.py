"""Throughput against latency: what is best of all that was looked at, and its picture."""

from __future__ import annotations

import io
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from strata.plan.search.choice import ServingChoice
from strata.plan.search.precision import Precision
from strata.plan.search.report import ServingPlan
from strata.plan.search.search import BUDGETS, TARGETS

# Names of layouts stand at points of which one has so many times the tokens of the one before.
_APART = 1.35
_INK = "#211e1a"
_BEST = "#c05a3c"
_AS_ASKED, _IN_FEWER_BITS, _LACKING = "Strata runs", "Strata runs, in fewer bits", "not in Strata yet"
_KINDS = {_AS_ASKED: "#2a6fb0", _IN_FEWER_BITS: "#5b8c4a", _LACKING: "#8a8378"}


def frontier(choices: Iterable[ServingChoice]) -> list[ServingChoice]:
    """Those of which no other gives as many tokens a second to a user and more by a device; by tokens of a user."""
    outer: list[ServingChoice] = []
    by_user = sorted(
        (one for one in choices if one.tokens_per_user is not None),
        key=lambda one: (one.tokens_per_user or 0.0, one.tokens_per_device),
        reverse=True,
    )
    for one in by_user:
        if not outer or one.tokens_per_device > outer[-1].tokens_per_device:
            outer.append(one)
    return outer[::-1]


def drawable() -> None:
    """Raises ValueError if pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise ValueError("--svg and --html need matplotlib: pip install matplotlib")


def frontier_svg(plan: ServingPlan, ink: str = _INK, paper: str = "white") -> str:
    """An SVG, its words and axes in `ink`: tokens a second a device over tokens a second of a user, of what Strata runs
    and of what it cannot run yet; small dots are all settings of a server by default."""
    import matplotlib
    from matplotlib.figure import Figure

    seen = plan.found.seen
    style: Any = {"svg.hashsalt": "strata", "svg.fonttype": "none", "font.size": 9}
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(style | dict.fromkeys(inked, ink)):
        figure = Figure(figsize=(8, 4.6), layout="constrained", facecolor=paper)
        panel = figure.add_subplot(facecolor=paper)
        asked = plan.question.precision
        for kind, color in _KINDS.items():
            own = [one for one in seen if _kind(one, asked) == kind and one.tokens_per_user is not None]
            if not own:
                continue
            outer = frontier(own)
            usual = [one for one in own if (one.settings.budget, one.settings.target) == (BUDGETS[0], TARGETS[0])]
            panel.scatter(*_points(usual), s=4, color=color, alpha=0.25, linewidths=0)
            panel.plot(*_points(outer), color=color, marker="o", markersize=3.5, linewidth=1.2, label=kind)
            if kind == _AS_ASKED:
                _name_layouts(panel, outer)
        if plan.best.tokens_per_user is not None:
            (user,), (device,) = _points([plan.best])
            panel.plot([user], [device], marker="*", markersize=13, color=_BEST, linestyle="", label="the best")
        if plan.question.objectives.tpot is not None:
            panel.axvline(1 / plan.question.objectives.tpot, color=ink, linewidth=0.8, linestyle="--", label="TPOT")
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter("")
        panel.set_xlabel("tokens a second of a user")
        panel.set_ylabel("tokens a second a device")
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
        panel.set_title(plan.title, fontsize=9)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _kind(choice: ServingChoice, asked: Precision) -> str:
    if choice.blocked:
        return _LACKING
    return _AS_ASKED if choice.settings.precision == asked else _IN_FEWER_BITS


def _points(choices: Iterable[ServingChoice]) -> tuple[list[float], list[float]]:
    pairs = [(one.tokens_per_user or 0.0, one.tokens_per_device) for one in choices]
    return [user for user, _ in pairs], [device for _, device in pairs]


def _name_layouts(panel: Any, outer: list[ServingChoice]) -> None:
    """Where along the line a layout begins, as far as there is room for names."""
    before, last = None, 0.0
    for one in outer:
        layout, user = one.settings.layout, one.tokens_per_user or 0.0
        if layout != before and user > _APART * last:
            place = (user, one.tokens_per_device)
            panel.annotate(layout.name, place, xytext=(4, 4), textcoords="offset points", fontsize=7)
            last = user
        before = layout
