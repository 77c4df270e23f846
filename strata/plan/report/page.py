"""An explanation as one HTML page: no script, no font and no picture from elsewhere, light or dark as the reader's."""

from __future__ import annotations

from strata.plan.explain.explanation import Explanation, OperationTime
from strata.plan.report.document import document, section
from strata.plan.report.markup import Markup, element, joined, table
from strata.plan.report.roofline import points, roofline
from strata.plan.report.timeline import timeline_figure, timeline_text
from strata.plan.report.units import quantity, seconds, share
from strata.plan.report.waterfall_table import ordered, waterfall_table
from strata.plan.waterfall import LAYERS, Verdict, Waterfall

_MOST_OPERATIONS = 40


def html_page(explanation: Explanation) -> str:
    """The page. Every figure in a picture stands in text or a table, too."""
    sections = [
        _verdict(explanation.verdict),
        _figures(explanation),
        _waterfall(explanation.waterfall),
        *_roofline(explanation),
        *_timeline(explanation),
        *_operations(explanation),
        *_sources(explanation),
    ]
    return document("Where the time goes", explanation.title, explanation.device or "", *sections)


def _verdict(verdict: Verdict) -> Markup:
    evidence = element("ul", *(element("li", one) for one in verdict.evidence))
    remedies = Markup("")
    if verdict.remedies:
        rows = [
            [one.what, element("code", one.option) if one.option else "", f"{one.gain:.0%}"] for one in verdict.remedies
        ]
        remedies = table("remedies", ["what helps", "option", "saves"], rows, numbers=2)
    badge = element("span", verdict.layer, class_=f"badge {verdict.layer}")
    return element(
        "section",
        element("p", badge, f" {verdict.cause}", class_="eyebrow"),
        element("h2", verdict.symptom),
        evidence,
        remedies,
        class_="verdict",
        aria_label="verdict",
    )


def _figures(explanation: Explanation) -> Markup:
    waterfall = explanation.waterfall
    shown = [
        ("measured", seconds(waterfall.measured)),
        ("floor", seconds(waterfall.floor) if waterfall.floor else "not known"),
        ("share of the floor", share(waterfall.floor, waterfall.measured) if waterfall.floor else "-"),
    ]
    for layer in reversed(LAYERS):
        shown.append((f"lost to the {layer} layer", share(waterfall.seconds(layer=layer), waterfall.measured)))
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in shown))


def _waterfall(waterfall: Waterfall) -> Markup:
    largest = max(ordered(waterfall.parts), key=lambda part: part.seconds, default=None)
    least = f"{seconds(waterfall.floor)} are the floor" if waterfall.floor else "nothing is known of the floor"
    text = f"Of {seconds(waterfall.measured)}, {least}"
    if largest is not None:
        text += f"; the largest part is {largest.name}, {share(largest.seconds, waterfall.measured)}"
    keys = [element("span", layer, class_=f"key {layer}") for layer in (*reversed(LAYERS), "floor")]
    return section("Waterfall", f"{text}.", waterfall_table(waterfall), element("p", *keys, class_="keys"))


def _roofline(explanation: Explanation) -> list[Markup]:
    found, peaks = points(explanation.operations[:_MOST_OPERATIONS]), explanation.peaks
    if peaks is None or not found:
        return []
    best = max(found, key=lambda one: one.reached)
    text = (
        f"Each point is an operation by its number in the table below, its area the share of the time. The lines are "
        f"what the device reaches: {quantity(peaks.bandwidth, 'B/s')} and {quantity(peaks.compute, 'FLOP/s')}. The "
        f"fastest is {best.operation.name} at {quantity(best.reached, 'FLOP/s')}, "
        f"{share(best.reached, peaks.compute)} of the peak."
    )
    wide, narrow = (
        element("div", roofline(found, peaks, explanation.waterfall.measured, width), class_=f"roofline {name}")
        for name, width in (("wide", 760), ("narrow", 380))
    )
    bounds = dict.fromkeys(one.operation.bound for one in found)
    keys = [element("span", f"{bound} bound", class_=f"key {bound}") for bound in bounds]
    return [section("Roofline", text, wide, narrow, element("p", *keys, class_="keys"))]


def _timeline(explanation: Explanation) -> list[Markup]:
    if not explanation.steps:
        return []
    return [section("Timeline", timeline_text(explanation.steps), timeline_figure(explanation.steps))]


def _operations(explanation: Explanation) -> list[Markup]:
    if not explanation.operations:
        return []
    measured = explanation.waterfall.measured
    head = ["operation", "no.", "bound", "time", "share", "floor", "of floor", "FLOP/s", "B/s"]
    shown = explanation.operations[:_MOST_OPERATIONS]
    rows = [_operation(number, one, measured) for number, one in enumerate(shown, 1)]
    text = "The longest first, each beside the least time that its FLOPs and bytes need."
    if left := len(explanation.operations) - len(shown):
        text += f" {left} more take less."
    return [section("Operations", text, table("operations", head, rows, numbers=3))]


def _operation(number: int, one: OperationTime, measured: float) -> list[str]:
    rates = ("-", "-")
    if one.seconds > 0:
        rates = (
            quantity(one.flops / one.seconds, "") if one.flops else "-",
            quantity(one.bytes / one.seconds, "") if one.bytes else "-",
        )
    return [
        one.name,
        str(number),
        joined(element("span", one.bound, class_=f"key {one.bound}")),
        seconds(one.seconds),
        share(one.seconds, measured),
        seconds(one.floor) if one.floor else "-",
        share(one.floor, one.seconds) if one.floor else "-",
        *rates,
    ]


def _sources(explanation: Explanation) -> list[Markup]:
    if not explanation.sources:
        return []
    listed = element("ul", *(element("li", one) for one in explanation.sources))
    return [section("Sources", "Where the floor and all that is predicted come from.", listed)]
