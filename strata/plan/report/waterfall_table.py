"""The waterfall of a run: from what was measured, part by part, down to the floor, each with its bar."""

from __future__ import annotations

from collections.abc import Iterator

from strata.plan.report.markup import Markup, element
from strata.plan.report.units import seconds, share
from strata.plan.waterfall import LAYERS, Part, Waterfall

# Less of the measured time than this is rounding.
ROUNDING = 5e-4


def ordered(parts: tuple[Part, ...]) -> list[Part]:
    """From the outermost layer to the innermost, and within a layer from the longest on."""
    return sorted(parts, key=lambda part: (-LAYERS.index(part.layer), -part.seconds))


def waterfall_table(waterfall: Waterfall) -> Markup:
    """A row for each part. The bar of a part begins where that of the next one ends."""
    head = [
        element("th", name, scope="col", class_=kind)
        for name, kind in (("part", None), ("from measured down to the floor", "bars"), ("time", "number"))
    ]
    head.append(element("th", "share", scope="col", class_="number"))
    rows = element("tbody", *_rows(waterfall))
    return element("table", element("thead", element("tr", *head)), rows, class_="waterfall")


def _rows(waterfall: Waterfall) -> Iterator[Markup]:
    whole, left = waterfall.measured, waterfall.measured
    yield _row("measured", "", "measured", 0.0, whole, whole)
    for part in ordered(waterfall.parts):
        yield _row(part.name, f"{part.layer}, {part.cause}", part.layer, left - part.seconds, part.seconds, whole)
        left -= part.seconds
    if abs(waterfall.unexplained) > ROUNDING * whole:
        missing = waterfall.unexplained
        note = "no part tells of it" if missing > 0 else "parts tell of too much"
        yield _row("unexplained", note, "unexplained", left - missing, missing, whole)
    if waterfall.floor:
        yield _row("floor", "the least that the device allows", "floor", 0.0, waterfall.floor, whole)


def _row(name: str, note: str, kind: str, begin: float, length: float, whole: float) -> Markup:
    low, high = sorted((begin, begin + length))
    low, high = (min(max(value / whole, 0.0), 1.0) if whole else 0.0 for value in (low, high))
    bar = element("span", class_=f"bar {kind}", style=f"left:{low:.3%};width:{max(high - low, 0.002):.3%}")
    named = element("span", name)
    return element(
        "tr",
        element("th", named, element("small", note) if note else "", scope="row"),
        element("td", element("div", bar, class_="track", aria_hidden="true"), class_="bars"),
        element("td", seconds(length), class_="number"),
        element("td", share(length, whole), class_="number"),
    )
