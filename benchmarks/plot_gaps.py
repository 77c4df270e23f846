"""The pictures of docs/performance.md: how much of the floor's speed each test reaches, beside vLLM, and of what the
latencies of a served load are made.

    python benchmarks/plot_gaps.py          # needs matplotlib; writes docs/performance.svg, docs/served_gaps.svg

Reads the newest line of each test from results/h200.jsonl, vLLM's figures from results/h200_vllm.jsonl, and the newest
T5 line of each model and rate from results/h200_gaps.jsonl; without any, the second picture is not drawn.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "performance.svg"
SERVED_PICTURE = HERE.parent / "docs" / "served_gaps.svg"
MODELS = ("8B", "0.6B")
TESTS = ("T1", "T2", "T3-b8", "T3-b32", "T3-b128", "T4")
DTYPE = "bf16"


@dataclass(frozen=True)
class Bar:
    """A test's figure, and the share of the floor's speed that it is."""

    value: float
    unit: str
    share: float

    @property
    def label(self) -> str:
        if self.value >= 10_000:
            return f"{self.value / 1000:.0f}k" if self.value >= 100_000 else f"{self.value / 1000:.1f}k"
        return f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.2f}"


def newest(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last line of each (test, model) of a results file."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {(line["test"], line["model"]): line for line in lines if line["dtype"] == DTYPE}


def bar(result: dict[str, Any], floor: float) -> Bar:
    """floor: in the result's unit, of which more is better unless it is a time."""
    value, unit = result["value"], result["unit"]
    return Bar(value, unit, value / floor if unit == "tok/s" else floor / value)


def bars(ours: Path, others: Path) -> dict[str, dict[str, tuple[Bar, Bar]]]:
    """For each model, each test's bar and that of the other engine. Raises KeyError for a test that has no figure."""
    own, other = newest(ours), newest(others)
    return {
        model: {
            test: (
                bar(own[test, model], own[test, model]["floor"]),
                bar(other[test, model], own[test, model]["floor"]),
            )
            for test in TESTS
        }
        for model in MODELS
    }


def draw(found: dict[str, dict[str, tuple[Bar, Bar]]], picture: Path) -> None:
    """Two groups of bars a test, one panel a model; the floor is the line at the top."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "strata", "svg.fonttype": "none", "font.size": 8})
    figure, panels = pyplot.subplots(1, len(found), figsize=(10, 3.2), sharey=True, layout="constrained")
    width = 0.38
    for panel, (model, tests) in zip(panels, found.items(), strict=True):
        for side, (name, color) in enumerate((("Strata", "#2a6fb0"), ("vLLM 0.25.1", "#c4c9cf"))):
            places = [at + (side - 0.5) * width for at in range(len(tests))]
            sides = [pair[side] for pair in tests.values()]
            drawn = panel.bar(places, [100 * one.share for one in sides], width, label=name, color=color)
            panel.bar_label(drawn, [one.label for one in sides], fontsize=6, padding=1)
        panel.axhline(100, color="#444444", linewidth=1)
        panel.text(len(tests) - 0.5, 101, "floor", ha="right", va="bottom", color="#444444")
        labels = [f"{test}\n{pair[0].unit}" for test, pair in tests.items()]
        panel.set_xticks(range(len(tests)), labels)
        panel.set_title(f"{model}, {DTYPE}, one H200")
        panel.set_ylim(0, 112)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("% of the floor's speed")
    panels[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.98), ncols=2)
    figure.savefig(picture, metadata={"Date": None})


def served(path: Path) -> list[dict[str, Any]]:
    """The newest T5 line of each model and rate in a file of `strata bench gaps`, in the order of the first ones."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    found = {(line["model"], line["request_rate"]): line for line in lines if line["test"] == "T5"}
    return list(found.values())


def draw_served(lines: list[dict[str, Any]], picture: Path) -> None:
    """A panel of TTFT and one of TPOT: of each load two bars, around p50 and p99, of the parts that make them."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "strata", "svg.fonttype": "none", "font.size": 8})
    size = (10, 0.8 + 0.5 * len(lines))
    figure, panels = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    groups = ("p50", "p99")
    names = [f"{line['model']}, {float(line['request_rate']):g}/s, {group}" for line in lines for group in groups]
    colors = ("#9aa5b1", "#c9d1d9", "#2a6fb0", "#e0a458", "#c05a3c")
    for panel, latency in zip(panels, ("ttft_ms", "tpot_ms"), strict=True):
        ends = [0.0] * len(names)
        for part, color in zip(lines[0][latency]["parts"], colors, strict=False):
            widths = [max(0.0, line[latency]["parts"][part][group]) for line in lines for group in groups]
            panel.barh(names, widths, left=ends, color=color, label=part)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        panel.set_title(f"{latency.removesuffix('_ms').upper()}, ms")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=6)
    panels[0].invert_yaxis()
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw(bars(HERE / "results" / "h200.jsonl", HERE / "results" / "h200_vllm.jsonl"), PICTURE)
    if lines := served(HERE / "results" / "h200_gaps.jsonl"):
        draw_served(lines, SERVED_PICTURE)


if __name__ == "__main__":
    main()
