"""The live page in Chromium: what it draws, and that its figures are those of the metrics."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from strata.engine.process.messages import Statistics
from strata.engine.watch.verdict import FINDINGS
from strata.serve.observe.metrics import Metrics
from tests.serve.browser.conftest import Server
from tests.serve.browser.webdriver import Browser

# How many pixels of each chart have the colour that is asked for, however thin the colour lies there.
PIXELS = """
    const probe = document.body.appendChild(document.createElement('i'));
    const wanted = arguments[0].map((name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    });
    probe.remove();
    return [...document.querySelectorAll('.chart canvas')].map((canvas, chart) => {
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let count = 0;
      for (let at = 0; at < data.length; at += 4) {
        count += data[at + 3] > 20 && wanted[chart].every((value, part) => Math.abs(value - data[at + part]) < 16);
      }
      return count;
    });
"""
# Of percentiles the p50: it is drawn last. All three lie on one another where a reply's first token takes 1 to 1.5 ms.
SEEN_SERIES = ["accent", "moss", "slate", "slate", "slate", "moss"]


def tile(browser: Browser, label: str) -> str:
    script = """
        const tiles = [...document.querySelectorAll('.tile')];
        const tile = tiles.find((one) => one.querySelector('dt').innerText === arguments[0]);
        return tile?.querySelector('.value').innerText ?? '';
    """
    text: str = browser.run(script, label)
    return text


def number(shown: str) -> float:
    """Of "92 tokens/s" or "9.8 ms"; not a number while there is none."""
    return float(shown.split()[0]) if shown[:1].isdigit() else math.nan


def asking(tokens: int) -> dict[str, Any]:
    """A request that is given a hundred tokens a second."""
    return {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": tokens}


def generate(server: Server, tokens: int) -> None:
    httpx.post(f"{server.url}/v1/chat/completions", json=asking(tokens), timeout=60)


@contextmanager
def generating(server: Server) -> Iterator[None]:
    """A request is under way, for as long as the page takes to show it."""
    body = {**asking(50_000), "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60):
        yield


def test_it_draws_what_the_server_does(browser: Browser, server: Server) -> None:
    with generating(server):
        browser.open(f"{server.url}/live")
        browser.wait(lambda: tile(browser, "Running") == "1", "the request that runs")
        generate(server, 1)
        browser.wait(lambda: 70 <= number(tile(browser, "Generated")) <= 110, "its hundred tokens a second")
        browser.wait(
            lambda: 5 <= number(tile(browser, "Between tokens")) <= 20, "ten milliseconds, as its bucket has it"
        )
        browser.wait(lambda: min(browser.run(PIXELS, SEEN_SERIES)[:4]) > 20, "lines in the first four charts")
        *_, prefix_cache = browser.run(PIXELS, SEEN_SERIES)
        assert prefix_cache == 0, "the stub has none, so there is nothing to draw"
    browser.wait(lambda: tile(browser, "Running") == "0", "the end of the request")


def test_it_rests_while_it_is_not_seen_or_paused(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/live")
    # As they begin: one that is under way when the page pauses may end at any time.
    browser.run("""
        window.reads = 0;
        const real = window.fetch;
        window.fetch = (path, options) => { window.reads += path === "/metrics"; return real(path, options); };
    """)
    reads = "return window.reads"
    browser.wait(lambda: browser.run(reads) >= 2, "two readings")
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    for stop, start in [
        (lambda: browser.run(hide + tell, True), lambda: browser.run(hide + tell, False)),
        (lambda: browser.click("#pause"), lambda: browser.click("#pause")),
    ]:
        stop()
        assert browser.text("#state") == "Paused"
        before = browser.run(reads)
        after = browser.run(f"await new Promise((done) => setTimeout(done, 1600)); {reads}")
        assert after == before
        start()
        browser.wait(lambda before=before: browser.run(reads) > before, "the next reading")


def test_it_says_when_the_server_does_not_answer_and_goes_on(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/live")
    browser.run("window.real = window.fetch; window.fetch = async () => { throw new TypeError('Failed to fetch') }")
    browser.wait(lambda: browser.sees("#fault"), "the fault")
    assert "does not answer" in browser.text("#fault")
    browser.run("window.fetch = window.real")
    browser.wait(lambda: not browser.sees("#fault"), "the next reading")


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_those_of_the_observations(browser: Browser, seed: int) -> None:
    """Read from buckets of two /metrics texts, they are within a bucket of the exact ones of what came in between."""
    chance = random.Random(seed)
    metrics = Metrics("m")
    for _ in range(500):
        metrics.first_token(chance.lognormvariate(2, 1))  # before the first reading: to be left out
    before = metrics.render(Statistics()).decode()
    seconds = sorted(chance.lognormvariate(-3, 0.8) for _ in range(1000))
    for one in seconds:
        metrics.first_token(one)
    script = """
        const { parseMetrics, histogram, percentile } = await import("/page/prometheus.js");
        const read = (text) => histogram(parseMetrics(text), "strata_time_to_first_token_seconds");
        const [before, after] = [read(arguments[0]), read(arguments[1])];
        return [0.5, 0.9, 0.99].map((q) => percentile(q, before, after)).concat(percentile(0.5, after, after));
    """
    *found, nothing = browser.run(script, before, metrics.render(Statistics()).decode())
    assert nothing is None
    for share, value in zip((0.5, 0.9, 0.99), found, strict=True):
        exact = seconds[int(share * len(seconds)) - 1]
        assert exact / 1.7 < value < exact * 1.7, "no bucket is wider"


def test_labels_may_hold_anything(browser: Browser) -> None:
    name = 'we"ird \\ {model},x="y"'
    script = """
        const { parseMetrics, total } = await import("/page/prometheus.js");
        const samples = parseMetrics(arguments[0]);
        return [samples.get("strata_requests_total")[0].labels, total(samples, "strata_requests_total")];
    """
    metrics = Metrics(name)
    metrics.received("chat", "alice")
    labels, total = browser.run(script, metrics.render(Statistics()).decode())
    assert labels == {"endpoint": "chat", "model_name": name}
    assert total == 1


def test_the_verdict_of_every_finding_is_a_sentence(browser: Browser, server: Server) -> None:
    """As the page shows it, from the metrics that a server renders; the stub tells of none."""
    browser.open(f"{server.url}/live")
    browser.wait(lambda: "The engine rests" in browser.text("#verdict"), "the verdict of an engine that tells none")
    script = """
        const { parseMetrics } = await import("/page/prometheus.js");
        const { readVerdict } = await import("/page/verdict.js");
        return readVerdict(parseMetrics(arguments[0]));
    """
    for finding in FINDINGS:
        told = Statistics(floor_share=0.42, gap_share=0.25, finding=finding, layer="system", cause="host")
        shown = browser.run(script, Metrics("m").render(told).decode())
        assert (shown["finding"], shown["floor"]) == (finding, "42 %")
        assert shown["text"].startswith("System: ")
        assert len(shown["text"].removeprefix("System: ").removesuffix(" (host)").split()) > 3, "more than its name"
        assert shown["beside"] == "25 % of the time the device waits for the host"


def labels(browser: Browser, unit: str, values: list[float], step: float) -> list[str]:
    script = """
        const { UNITS } = await import("/page/units.js");
        return UNITS[arguments[0]].labels(arguments[1], arguments[2]);
    """
    shown: list[str] = browser.run(script, unit, values, step)
    return shown


@pytest.mark.parametrize(
    ("unit", "step", "count"),
    [
        *[
            ("seconds", step, 5)
            for step in (0.0001, 0.00025, 0.0005, 0.002, 0.0025, 0.01, 0.025, 0.1, 0.25, 0.5, 2.5, 20)
        ],
        *[("tokens", step, 6) for step in (1, 2, 5, 20, 500, 2000, 5000, 20_000)],
        *[("share", step, 5) for step in (0.2, 0.25)],
        ("whole", 1, 5),
    ],
)
def test_a_label_of_an_axis_is_the_value_of_its_line(browser: Browser, unit: str, step: float, count: int) -> None:
    values = [step * at for at in range(count)]
    shown = labels(browser, unit, values, step)
    assert len(set(shown)) == len(shown)
    scales = {"ms": 1e-3, "s": 1.0, "%": 0.01, "k": 1e3, "": 1.0}
    for value, text in zip(values, shown, strict=True):
        parts = re.fullmatch(r"([\d.,]+) ?(ms|s|%|k|)", text)
        assert parts is not None
        assert float(parts[1].replace(",", "")) * scales[parts[2]] == pytest.approx(value, rel=1e-9), text


# What the charts write on their canvases: (which chart, text, left, right, the canvas's width), in its pixels.
WRITTEN = """
    const written = [];
    const charts = [...document.querySelectorAll(".chart")];
    const real = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
      const at = this.getTransform().transformPoint({ x, y }).x;
      const width = this.measureText(text).width;
      const left = at - width * { left: 0, center: 0.5, right: 1, start: 0, end: 1 }[this.textAlign];
      written.push([charts.indexOf(this.canvas.closest(".chart")), text, left, left + width, this.canvas.width]);
      return real.call(this, text, x, y);
    };
    // Two drawings, of which the first may be of a page without figures.
    const read = () => performance.getEntriesByType("resource").filter(({ name }) => name.endsWith("/metrics")).length;
    const before = read();
    while (read() < before + 3) await new Promise((done) => setTimeout(done, 100));
    await new Promise((done) => setTimeout(done, 500));
    CanvasRenderingContext2D.prototype.fillText = real;
    return written;
"""


@pytest.mark.parametrize("width", [1280, 360])
def test_no_label_is_cut_and_those_of_a_scale_are_evenly_apart(browser: Browser, server: Server, width: int) -> None:
    browser.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        browser.open(f"{server.url}/live")
        browser.wait(lambda: tile(browser, "Running") == "0", "the first reading")
        written = browser.run(WRITTEN)
    finally:
        browser.cdp("Emulation.clearDeviceMetricsOverride")
    assert [one for one in written if one[2] < 0 or one[3] > one[4]] == []
    assert any(text.count(":") == 2 for _, text, *_ in written)
    for chart in range(6):
        scale = sorted({float(text.split()[0]) for at, text, *_ in written if at == chart and ":" not in text})
        assert len(scale) > 2
        assert {round(high - low, 9) for low, high in pairwise(scale)} == {round(scale[1], 9)}, scale


def test_a_clock_at_the_right_end_has_room(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/live")
    browser.wait(lambda: browser.sees(".u-over"), "a chart")
    room = browser.run("""
        const plot = document.querySelector(".plot").getBoundingClientRect();
        return plot.right - document.querySelector(".u-over").getBoundingClientRect().right;
    """)
    wide = browser.run("""
        const context = document.createElement("canvas").getContext("2d");
        context.font = "11px Inter, system-ui, sans-serif";
        return context.measureText("00:00:00").width;
    """)
    assert room >= wide / 2


def legend(browser: Browser) -> str:
    """Of the first chart."""
    text: str = browser.run("return document.querySelector('.chart .u-legend').innerText")
    return text


def test_a_chart_without_figures_says_so(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/live")
    browser.wait(lambda: legend(browser) == "generated0prompt0", "two readings")
    said = (
        "return [...document.querySelectorAll('.nothing')].map((one) => (one.checkVisibility() ? one.innerText : ''))"
    )
    rates, sequences, first, between, kv, cached = browser.run(said)
    assert (rates, sequences, kv) == ("", "", "")
    assert (first, between, cached) == ("No reply so far", "No reply so far", "No prompt so far")


def test_the_legend_outlives_a_change_of_colours(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/live")
    browser.wait(lambda: legend(browser) == "generated0prompt0", "two readings")
    browser.click("#pause")
    browser.click("#theme")
    browser.run("return new Promise((done) => setTimeout(done, 200))")
    assert legend(browser) == "generated0prompt0"


def test_what_was_read_is_there_again_when_the_reader_comes_back(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/live")
    browser.wait(lambda: tile(browser, "Running") == "0", "the first reading, to which the next is compared")
    generate(server, 100)
    browser.wait(lambda: browser.run(PIXELS, SEEN_SERIES)[0] > 20, "a line")
    browser.open(f"{server.url}/docs")
    browser.open(f"{server.url}/live")
    peak = "return [...document.querySelectorAll('.tile')][0].querySelector('.beside').innerText"
    browser.wait(lambda: number(tile(browser, "Generated")) == 0, "a reading")
    assert number(browser.run(peak).removeprefix("most ")) > 0, "of the visit before"
    assert browser.run(PIXELS, SEEN_SERIES)[0] > 20
