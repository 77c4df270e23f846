"""An explanation as one HTML page: no script, no font and no picture from elsewhere, light or dark as the reader's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from strata.engine.watch.verdict import LAYERS
from strata.plan.explain.explanation import Explanation, LostTime, OperationTime, Waterfall
from strata.plan.report.roofline import Roofline, points
from strata.plan.report.timeline import COLUMNS, panels, timeline, timeline_text
from strata.plan.report.units import quantity, seconds, share

# Less of the measured time than this is rounding.
ROUNDING = 5e-4
_MAX_OPERATIONS = 40


def rendered(template: str, **values: Any) -> str:
    """A page by a template beside this file, in which all text is escaped."""
    pages = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"seconds": seconds, "share": share, "quantity": quantity, "px": _pixels}
    return pages.get_template(template).render(values).strip() + "\n"


def _pixels(value: float) -> str:
    """Two decimals, which is what a picture needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def html_page(explanation: Explanation) -> str:
    """The page. Every figure in a picture stands in text or a table, too."""
    fall, shown = explanation.waterfall, explanation.operations[:_MAX_OPERATIONS]
    values: dict[str, Any] = {
        "explanation": explanation,
        "layers": (*reversed(LAYERS), "floor"),
        "remedies": [(one.what, one.option, f"{one.gain:.0%}") for one in explanation.verdict.remedies],
        "figures": list(_figures(fall)),
        "waterfall_text": _waterfall_text(fall),
        "bars": list(_bars(fall)),
        "rooflines": (),
        "timeline": None,
        "operations": [_operation(number, one, fall.measured) for number, one in enumerate(shown, 1)],
        "operations_text": "The longest first, each beside the least time that its FLOPs and bytes need.",
    }
    if left := len(explanation.operations) - len(shown):
        values["operations_text"] += f" {left} more take less."
    found, peaks = points(shown), explanation.peaks
    if found and peaks is not None:
        best = max(found, key=lambda one: one.reached)
        values["rooflines"] = [
            (name, Roofline(found, peaks, fall.measured, width)) for name, width in (("wide", 760), ("narrow", 380))
        ]
        values["bounds"] = list(dict.fromkeys(one.operation.bound for one in found))
        values["roofline_text"] = (
            f"Each point is an operation by its number in the table below, its area the share of the time. The lines "
            f"are what the device reaches: {quantity(peaks.bandwidth, 'B/s')} and {quantity(peaks.compute, 'FLOP/s')}. "
            f"The fastest is {best.operation.name} at {quantity(best.reached, 'FLOP/s')}, "
            f"{share(best.reached, peaks.compute)} of the peak."
        )
    if explanation.steps:
        line = timeline(explanation.steps)
        values["timeline"] = {
            "panels": panels(line),
            "columns": COLUMNS,
            "seconds": line.end - line.begin,
            "busy": line.busy,
        }
        values["timeline_text"] = timeline_text(explanation.steps)
    return rendered("explanation.html", **values)


def _figures(fall: Waterfall) -> Iterator[tuple[str, str]]:
    yield "measured", seconds(fall.measured)
    yield "floor", seconds(fall.floor) if fall.floor else "not known"
    yield "share of the floor", share(fall.floor, fall.measured) if fall.floor else "-"
    for layer in reversed(LAYERS):
        yield f"lost to the {layer} layer", share(fall.seconds(layer=layer), fall.measured)


def _waterfall_text(fall: Waterfall) -> str:
    least = f"{seconds(fall.floor)} are the floor" if fall.floor else "nothing is known of the floor"
    text = f"Of {seconds(fall.measured)}, {least}"
    if fall.parts:
        largest = max(fall.parts, key=lambda part: part.seconds)
        text += f"; the largest part is {largest.name}, {share(largest.seconds, fall.measured)}"
    return f"{text}."


def ordered(parts: tuple[LostTime, ...]) -> list[LostTime]:
    """From the outermost layer to the innermost, and within a layer from the longest on."""
    return sorted(parts, key=lambda part: (-LAYERS.index(part.layer), -part.seconds))


class _Bar(NamedTuple):
    """A row of the waterfall. left, width: shares of what was measured."""

    name: str
    note: str
    kind: str
    seconds: float
    left: float
    width: float


def _bars(fall: Waterfall) -> Iterator[_Bar]:
    """From what was measured, part by part, down to the floor. The bar of a part begins where that of the next one
    ends."""
    whole, left = fall.measured, fall.measured

    def bar(name: str, note: str, kind: str, begin: float, length: float) -> _Bar:
        ends = sorted((begin, begin + length))
        low, high = (min(max(value / whole, 0.0), 1.0) if whole else 0.0 for value in ends)
        return _Bar(name, note, kind, length, low, max(high - low, 0.002))

    yield bar("measured", "", "measured", 0.0, whole)
    for part in ordered(fall.parts):
        left -= part.seconds
        yield bar(part.name, f"{part.layer}, {part.cause}", part.layer, left, part.seconds)
    missing = fall.unexplained
    if abs(missing) > ROUNDING * whole:
        note = "no part tells of it" if missing > 0 else "parts tell of too much"
        yield bar("unexplained", note, "unexplained", left - missing, missing)
    if fall.floor:
        yield bar("floor", "the least that the device allows", "floor", 0.0, fall.floor)


def _operation(number: int, one: OperationTime, measured: float) -> list[str]:
    rates = [quantity(of / one.seconds, "") if of and one.seconds > 0 else "-" for of in (one.flops, one.bytes)]
    floor = [seconds(one.floor), share(one.floor, one.seconds)] if one.floor else ["-", "-"]
    return [one.name, str(number), one.bound, seconds(one.seconds), share(one.seconds, measured), *floor, *rates]
