"""A plan as one HTML page: the best, its command, the frontier as a picture and as a table, the others."""

from __future__ import annotations

import re
import shlex

from strata.plan.report.document import document, section
from strata.plan.report.markup import Markup, element, joined, table
from strata.plan.search.choice import ServingChoice
from strata.plan.search.frontier import frontier, frontier_svg
from strata.plan.search.report import ServingPlan

# Stands for the colour that the page gives its words.
_PLACE = "#010203"
_HEAD = ["layout", "engines", "sequences", "TTFT ms", "TPOT ms", "tok/s", "tok/s/device", "tok/s/user", "analytic"]


def html_page(plan: ServingPlan) -> str:
    """The page, which loads nothing; every point of the picture stands in a table, too."""
    title, _, subtitle = plan.title.partition(", ")
    asked = [one for one in plan.found.seen if one.settings.precision == plan.question.precision]
    runs = [one for one in asked if not one.blocked] or asked
    parts = [section("The best", *_command(plan), _rows("the best", (plan.best,)), _facts(plan))]
    if plan.best.tokens_per_user is not None:  # answers of one token have no latency to draw
        drawn = element(
            "figure", _picture(plan), class_="scroll", role="img", aria_label="tokens a second a device and of a user"
        )
        outer = _rows("frontier", tuple(frontier(runs)))
        parts += [
            section("Throughput against latency", "Each point is a way to run the engines.", drawn),
            section("The outer points", "From the most tokens a device on.", outer),
        ]
    if plan.found.others:
        parts.append(section("Other layouts", "The best settings of each.", _rows("other layouts", plan.found.others)))
    if plan.packed or plan.refused:
        lines = element("ul", *(element("li", one) for one in plan.refused))
        rows = _rows("in fewer bits", plan.packed) if plan.packed else Markup("")
        parts.append(section("In fewer bits", "Options of the command stand last. They change answers.", rows, lines))
    if plan.found.blocked:
        rows = _rows("lacking", plan.found.blocked)
        parts.append(section("Not in Strata yet", "What it lacks stands last.", rows))
    sources = element("ul", *(element("li", one) for one in plan.sources))
    parts.append(section("Where the prediction comes from", "", sources))
    return document("How to serve it", title, subtitle, *parts)


def _picture(plan: ServingPlan) -> Markup:
    """As wide as the page, in the colour of its words."""
    text = re.sub(r"^.*?(?=<svg)", "", frontier_svg(plan, _PLACE, "none"), flags=re.DOTALL)
    root = re.match(r"<svg[^>]*>", text)
    assert root is not None
    sized = re.sub(r' (width|height)="[^"]*"', "", root[0])
    return Markup((sized + text[root.end() :]).replace(_PLACE, "currentColor"))


def _command(plan: ServingPlan) -> tuple[str, Markup]:
    if plan.command is None:
        return f"Strata cannot run this yet: it lacks {', '.join(plan.best.blocked)}.", Markup("")
    told = element("p", plan.remark) if plan.remark else Markup("")
    return plan.where, joined(element("p", element("code", shlex.join(plan.command))), told)


def _facts(plan: ServingPlan) -> Markup:
    return element("ul", *(element("li", f"{name}: {value}" if name else value) for name, value in plan.lines()))


def _rows(label: str, choices: tuple[ServingChoice, ...]) -> Markup:
    last = "with" if label == "in fewer bits" else "lacks" * any(one.blocked for one in choices)
    return table(label, [*_HEAD, *([last] * bool(last))], [_row(one, last) for one in choices], numbers=1)


def _row(choice: ServingChoice, last: str) -> list[str]:
    point, user = choice.point, choice.tokens_per_user
    found = [
        choice.settings.layout.name,
        f"{choice.replicas:,}",
        f"{choice.settings.sequences:,}",
        f"{point.ttft * 1e3:,.1f}",
        "-" if choice.tpot_ms is None else f"{choice.tpot_ms:,.2f}",
        f"{choice.tokens:,.0f}",
        f"{choice.tokens_per_device:,.0f}",
        "" if user is None else f"{user:,.1f}",
        f"{choice.analytic:.0%}",
    ]
    options = {"with": " ".join(choice.settings.precision.words), "lacks": ", ".join(choice.blocked)}
    return [*found, options[last]] if last else found
