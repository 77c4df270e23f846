"""The frontier, its picture and page, and what Strata lacks."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from strata.cli.plan import draw_plan
from strata.hardware.specs import device
from strata.plan.search import report as report_module
from strata.plan.search import search as search_module
from strata.plan.search import step_table
from strata.plan.search.choice import ServingChoice, command, layer_product_flops, request_flops
from strata.plan.search.frontier import frontier, frontier_svg
from strata.plan.search.layout import ServingLayout
from strata.plan.search.page import html_page
from strata.plan.search.precision import AS_CHECKPOINT, IN_FEWER_BITS, Precision
from strata.plan.search.report import ServingPlan, serving_plan
from strata.plan.search.traffic import Objectives, Traffic


@pytest.fixture(scope="module")
def plan() -> ServingPlan:
    """Of a small model on two hosts, among few settings."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_table, "_ALONE", (1, 16, 64, 248))
        patched.setattr(step_table, "_BESIDE", (0, 248))
        patched.setattr(step_table, "_PROMPTS", (256, 8192))
        patched.setattr(search_module, "SEQUENCES", (1, 16, 64, 256))
        patched.setattr(search_module, "BUDGETS", (8192,))
        patched.setattr(search_module, "IN_FEWER_BITS", IN_FEWER_BITS[:1])
        config = report_module.find_config("1B")
        shallow = replace(config, num_layers=4, windows=(None,) * 4)
        patched.setattr(report_module, "find_config", lambda _: shallow)
        objectives = Objectives(tpot=0.02)
        traffic = replace(Traffic.of(1000, 200), rate=5.0)
        return serving_plan("<1B>", "1B", device("h200"), 4, traffic, objectives, 2, 50e9, 2.0)


def dominates(one: ServingChoice, other: ServingChoice) -> bool:
    assert one.tokens_per_user is not None
    assert other.tokens_per_user is not None
    return one.tokens_per_user > other.tokens_per_user and one.tokens_per_device > other.tokens_per_device


def test_nothing_lies_beyond_the_frontier(plan: ServingPlan) -> None:
    outer = frontier(plan.found.seen)
    assert not any(dominates(one, other) for one in plan.found.seen for other in outer)
    inner = [one for one in plan.found.seen if one not in outer]
    assert all(any(dominates(other, one) or _level(other, one) for other in outer) for one in inner)


def _level(one: ServingChoice, other: ServingChoice) -> bool:
    return one.tokens_per_user == other.tokens_per_user or one.tokens_per_device == other.tokens_per_device


def test_the_picture_names_what_it_shows(plan: ServingPlan) -> None:
    text = frontier_svg(plan)
    words = "".join(ElementTree.fromstring(text).itertext())
    for word in ("tokens a second of a user", "Strata runs", "in fewer bits", "the best", "TPOT"):
        assert word in words


def test_the_page_is_whole_and_loads_nothing(plan: ServingPlan) -> None:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.words: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe")
            for name, value in attrs:
                assert name != "src"
                assert not (name.endswith("href") and not (value or "").startswith("#"))

        def handle_data(self, data: str) -> None:
            self.words.append(data)

    reader = Reader()
    reader.feed(html_page(plan))
    words = " ".join(reader.words)
    assert "<1B> on 4 x NVIDIA H200" in words  # escaped, so that it is read as text
    assert plan.command is not None
    assert " ".join(plan.command[3:]) in words
    assert f"{plan.best.tokens:,.0f}" in words
    assert plan.remark in words


def test_cost_and_use_of_the_devices(plan: ServingPlan) -> None:
    best = plan.best
    assert plan.cost_per_million == pytest.approx(2.0 * 4 / 3600 / best.tokens * 1e6)
    assert 0 < plan.mfu < 1
    assert sum(plan.origins.values()) == pytest.approx(1)
    assert best.analytic == pytest.approx(plan.origins["analytic"], abs=0.05)  # of the steps nearest to it
    assert best.devices <= 4
    assert not best.blocked


def test_products_that_round_activations_are_held_against_the_peak_of_what_they_multiply(plan: ServingPlan) -> None:
    asked = plan.question
    rounded = replace(plan, question=replace(asked, precision=Precision("fp8")))
    listed, layers = asked.machine.listed, layer_product_flops(asked.config, asked.traffic)
    peaks = [listed.ceiling("compute", name, measured=False).value for name in ("float8", "bfloat16")]
    seconds = layers / peaks[0] + (request_flops(asked.config, asked.traffic) - layers) / peaks[1]
    assert rounded.mfu == pytest.approx(plan.best.requests * seconds / plan.best.devices)
    assert rounded.mfu < plan.mfu
    assert ("MFU", f"{rounded.mfu:.1%} of the maker's dense peak, of products in float8") in rounded.lines()
    unpacked = replace(plan, question=replace(asked, precision=Precision("fp8_weights")))  # multiplied as floats
    assert unpacked.mfu == pytest.approx(plan.mfu)


def test_engines_of_a_host_that_is_not_full_are_started_as_many_as_they_are(plan: ServingPlan) -> None:
    """Hosts of two devices."""
    one_device = replace(plan.best, settings=replace(plan.best.settings, layout=ServingLayout()))
    for replicas, where in (
        (2, "run:"),
        (3, "run on one host (on another with --data-parallel-size 1), behind a load balancer:"),
        (4, "run on each of 2 hosts, behind a load balancer:"),
    ):
        told = replace(plan, found=replace(plan.found, best=replace(one_device, replicas=replicas)))
        assert told.where == where
        assert told.command is not None
        assert told.command[told.command.index("--data-parallel-size") + 1] == "2"


def test_what_strata_lacks_is_apart(plan: ServingPlan) -> None:
    assert all(one.blocked for one in plan.found.blocked)
    assert not any("fp8" in lack for one in plan.found.blocked for lack in one.blocked)
    assert not any(one.blocked for one in plan.found.others)


def test_the_load_is_told_as_the_closed_loop_that_it_is(plan: ServingPlan) -> None:
    """Its rate is what comes out, not arrivals at random, which would wait for a place as well."""
    under_way = plan.best.point.concurrency * plan.best.replicas
    assert dict(plan.lines())["load"] == (
        f"{under_way:,.0f} requests under way at all times, a next as each ends: {plan.best.requests:,.2f} a second"
    )
    whole = plan.best.point.ttft + (plan.best.output - 1) * plan.best.point.tpot
    assert plan.best.requests == pytest.approx(under_way / whole, rel=1e-3)  # Little's law


def test_answers_of_one_token_have_no_tpot(plan: ServingPlan, capsys: pytest.CaptureFixture[str]) -> None:
    best = replace(plan.best, output=1.0, point=replace(plan.best.point, tpot=0.0))
    single = replace(plan, found=replace(plan.found, best=best))
    assert "decode steps" in dict(plan.lines())
    assert "decode steps" not in dict(single.lines())
    assert (best.to_dict()["tpot_ms"], plan.best.to_dict()["tpot_ms"]) == (None, plan.best.point.tpot * 1e3)
    draw_plan(single)
    row = capsys.readouterr().out.splitlines()[3].split()
    assert row[-4] == "-"
    pages = [html_page(one) for one in (plan, single)]
    assert [">-</td>" in page for page in pages] == [False, True]
    assert ["<svg" in page for page in pages] == [True, False]


def test_the_best_has_the_checkpoints_precision_and_fewer_bits_stand_beside_it(plan: ServingPlan) -> None:
    assert plan.best.settings.precision == AS_CHECKPOINT
    assert plan.command is not None
    assert "--quantization" not in plan.command
    (packed,) = plan.quantized
    assert packed.tokens > plan.best.tokens
    assert not packed.blocked
    words = command(packed, "1B", length=1200, per_host=2)
    assert words[words.index("--quantization") + 1] == "fp8"


def test_a_folder_stands_in_the_command_and_for_sizes_alone_what_is_to_be_put_there(
    plan: ServingPlan, tmp_path: Path
) -> None:
    file = tmp_path / "Llama-9B" / "config.json"
    file.parent.mkdir()
    for given, shown in ((str(tmp_path), "mine"), ("1B", "path/to/1B"), (str(file), "path/to/Llama-9B")):
        file.touch()
        told = replace(plan, model_file=given, question=replace(plan.question, model="mine"))
        assert told.command is not None
        assert told.command[:3] == ["strata", "serve", shown]
        assert "--load-format" not in told.command
        assert told.remark.startswith(f"{shown}: ") == (shown != "mine")


def test_a_trace_of_few_requests_is_served_sooner(plan: ServingPlan) -> None:
    assert plan.at_rate is not None
    assert plan.at_rate.requests * plan.best.replicas == pytest.approx(5.0, rel=1e-3)
    assert plan.at_rate.tpot < plan.best.point.tpot
    share = 5.0 / plan.best.requests
    told = dict(plan.lines())["the trace"]
    assert told.startswith(f"5.00 requests a second, {share:.0%} of the most: TTFT ")
    assert plan.at_rate.waiting < 1e-6  # so few find a place at once
    assert " of it for a place" not in told
