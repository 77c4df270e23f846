"""A plan as one HTML page: the best, its command, the frontier as a picture and as a table, the others."""

from __future__ import annotations

import re
import shlex

from strata.plan.report.page import rendered
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
    has_latency = plan.best.tokens_per_user is not None  # answers of one token have none to draw
    return rendered(
        "plan.html",
        plan=plan,
        title=title,
        subtitle=subtitle,
        command=None if plan.command is None else shlex.join(plan.command),
        facts=[f"{name}: {value}" if name else value for name, value in plan.lines()],
        picture=_picture(plan) if has_latency else None,
        outer=_rows("frontier", tuple(frontier(runs))) if has_latency else None,
        best=_rows("the best", (plan.best,)),
        others=_rows("other layouts", plan.found.others),
        packed=_rows("in fewer bits", plan.quantized),
        blocked=_rows("lacking", plan.found.blocked),
    )


def _picture(plan: ServingPlan) -> str:
    """As wide as the page, in the colour of its words."""
    text = re.sub(r"^.*?(?=<svg)", "", frontier_svg(plan, _PLACE, "none"), flags=re.DOTALL)
    root = re.match(r"<svg[^>]*>", text)
    assert root is not None
    sized = re.sub(r' (width|height)="[^"]*"', "", root[0])
    return (sized + text[root.end() :]).replace(_PLACE, "currentColor")


def _rows(label: str, choices: tuple[ServingChoice, ...]) -> tuple[str, list[str], list[list[str]], int] | None:
    """What the template's `table` takes; None of no choice."""
    last = "with" if label == "in fewer bits" else "lacks" * any(one.blocked for one in choices)
    return (label, [*_HEAD, *([last] * bool(last))], [_row(one, last) for one in choices], 1) if choices else None


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
