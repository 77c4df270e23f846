"""The page of an explanation: whole by itself, every text escaped, and its figures those of the explanation."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from strata.engine.watch.verdict import Remedy, Verdict
from strata.plan.explain.explanation import Explanation, LostTime, OperationTime, StepTime, Waterfall
from strata.plan.report.page import html_page, ordered
from strata.plan.report.roofline import points
from strata.plan.report.timeline import timeline, timeline_text
from strata.plan.report.units import quantity, seconds, share
from tests.plan.report.sample import HOSTILE, sample

VOID = {"meta"}


class Page(HTMLParser):
    """What a browser would make of it: elements, their attributes, the text; every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(tag == name for name, _ in self.elements)


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(html_page(sample()))


def test_nothing_is_loaded_and_nothing_runs(page: Page) -> None:
    names = {name for name, _ in page.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "base", "form", "image", "use"}
    assert page.open == []
    for _, attributes in page.elements:
        assert not {"src", "href", "xlink:href", "onload", "onclick"} & attributes.keys()
    assert "url(" not in html_page(sample())
    assert "@import" not in html_page(sample())
    policies = [attributes["content"] for name, attributes in page.elements if "http-equiv" in attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_text_of_others_is_escaped() -> None:
    """A name that is markup is shown as it is, wherever a value holds it, and no element comes of it."""
    value = sample()
    operation = replace(value.operations[0], name=HOSTILE, bound='"><script>')
    part = LostTime(HOSTILE, "kernel", "compute", 0.1)
    verdict = Verdict("graph", HOSTILE, "launch", (HOSTILE,), (Remedy(HOSTILE, 0.1, HOSTILE),))
    waterfall = Waterfall(1.9, 1.8, (part,))
    hostile = Explanation(HOSTILE, HOSTILE, waterfall, verdict, (operation,), value.steps, (HOSTILE,), value.peaks)
    found = Page(html_page(hostile))
    assert found.open == []
    assert not found.count("script")
    shown = "".join(found.texts)
    # Title, heading, device, symptom, evidence, remedy, option, part twice, operation, its two points, fastest, source.
    assert shown.count(HOSTILE) == 14


def test_the_figures_of_the_explanation_stand_in_text(page: Page) -> None:
    value, shown = sample(), " ".join(page.texts)
    for part in value.waterfall.parts:
        assert part.name in shown
        assert seconds(part.seconds) in shown
    for one in value.operations:
        assert one.name in shown
    for wanted in (
        "62.0%",
        value.verdict.symptom,
        *value.verdict.evidence,
        *value.sources,
        value.verdict.remedies[0].option,
    ):
        assert wanted in shown
    pictures = [attributes for name, attributes in page.elements if name == "svg"]
    assert len(pictures) == 6
    assert all(attributes["aria-label"] and attributes["role"] == "img" for attributes in pictures)


def test_a_floor_that_is_not_known_is_no_floor_of_0() -> None:
    value = sample()
    unknown = replace(value, waterfall=replace(value.waterfall, floor=0.0))
    page = html_page(unknown)
    assert "nothing is known of the floor" in page
    assert "bar floor" not in page
    assert "bar floor" in html_page(value)


def test_bars_of_the_waterfall_follow_one_another_down_to_the_floor() -> None:
    value = sample()
    found = Page(html_page(value))
    bars = [attributes for name, attributes in found.elements if (attributes.get("class") or "").startswith("bar ")]
    kinds = [str(attributes["class"]).split(" ")[1] for attributes in bars]
    parts = ordered(value.waterfall.parts)
    assert kinds == ["measured", *(part.layer for part in parts), "unexplained", "floor"]
    assert [part.layer for part in parts] == ["system"] * 2 + ["graph"] * 2 + ["kernel"] * 3
    places = [tuple(map(float, re.findall(r"[\d.]+", str(attributes["style"])))) for attributes in bars]
    end = 100.0
    for (left, width), part in zip(places[1:-2], parts, strict=True):
        assert left + width == pytest.approx(end, abs=0.01)
        assert width == pytest.approx(100 * part.seconds / value.waterfall.measured, abs=0.01)
        end = left
    assert places[-1][1] == pytest.approx(places[-2][0], abs=0.01)


def test_parts_that_tell_of_too_much_stay_in_the_picture() -> None:
    parts = (LostTime("host gaps", "system", "host", 3.0),)
    found = Page(html_page(replace(sample(), waterfall=Waterfall(2.0, 1.0, parts))))
    styles = [str(attributes["style"]) for _, attributes in found.elements if "style" in attributes]
    for style in styles:
        left, width = map(float, re.findall(r"[\d.]+", style))
        assert left + width <= 100.3
    assert "parts tell of too much" in " ".join(found.texts)


def test_a_bare_explanation_has_a_page_without_pictures() -> None:
    bare = replace(sample(), operations=(), steps=(), sources=(), peaks=None, waterfall=Waterfall(0.0, 0.0, ()))
    found = Page(html_page(bare))
    assert found.open == []
    assert not found.count("svg")
    assert not {"Roofline", "Timeline", "Operations", "Sources"} & set(found.texts)


def test_only_what_computes_and_moves_bytes_is_on_the_roofline() -> None:
    found = points(sample().operations)
    assert [one.number for one in found] == [1, 2, 3, 4, 5]
    assert found[0].intensity == pytest.approx(2.1e14 / 3.2e12)
    assert found[0].reached == pytest.approx(2.1e14 / 0.82)


def test_many_operations_do_not_make_a_long_page() -> None:
    many = tuple(OperationTime(f"operation {number}", 1e-3, 1e-4, 10, 10, "memory") for number in range(500))
    found = Page(html_page(replace(sample(), operations=many)))
    assert found.count("circle") == 80
    assert "460 more take less" in " ".join(found.texts)


def test_columns_of_the_timeline_cover_what_steps_cover() -> None:
    """Half of the first second, all of the second, nothing of the third, a prompt within the fourth."""
    steps = (
        StepTime(0.0, 0.5, "decode", 3, 3),
        StepTime(1.0, 2.0, "mixed", 9, 4),
        StepTime(3.25, 3.5, "prompt", 70, 1, 0.25),
        StepTime(3.5, 4.0, None, 5, 0),
    )
    found = timeline(steps, columns=4)
    assert found.busy == {
        "decode": pytest.approx([0.5, 0, 0, 0]),
        "mixed": pytest.approx([0, 1, 0, 0]),
        "prompt": pytest.approx([0, 0, 0, 0.25]),
        "training": pytest.approx([0, 0, 0, 0.5]),
    }
    assert found.kv == [0, 0, 0, 0.25]
    assert found.tokens == [3, 9, 9, 70]  # the mixed step ends where the third column begins
    assert "1 decode step of 500 ms on average (12.5% of the time)" in timeline_text(steps)


TIMES = [(3.8271e-3, "3.83 ms"), (1.0, "1.00 s"), (0.99996, "1.00 s"), (1234.5, "1,234 s"), (0, "0 us")]


@pytest.mark.parametrize(("value", "text"), [*TIMES, (99.96e-6, "100 us")])
def test_times(value: float, text: str) -> None:
    assert seconds(value) == text


def test_quantities_and_shares() -> None:
    assert quantity(7.5671e14, "FLOP/s") == "757 TFLOP/s"
    assert quantity(999.9, "B") == "1.00 kB"
    assert (share(1, 3), share(1, 0)) == ("33.3%", "-")
