"""Predicted steps against measured ones of an H200, of cases to which no constant was fitted.

Of 0.6B decodes of one and two sequences are left out: when they were measured the last program of a sequence joined its
splits, as a kernel behind does now.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predictions.cases import PredictionCase, cases
from benchmarks.predictions.errors import ErrorSummary
from strata.cost import attention_times
from strata.cost.step_model import StepModel
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.kernels.attention.decode_tile import DecodeTile, decode_tile
from strata.plan.meta_model import find_config, meta_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BUDGET = 8192  # tokens of a step
DECODES = {1: 0, 2: 1, 3: 2, 6: 3, 11: 4, 24: 5, 48: 6, 90: 7, 160: 8, 250: 9}
CONTEXTS = {60: 0, 700: 1, 2900: 2, 11_000: 3}


def is_fitted(case: PredictionCase) -> bool:
    """Of cases by numbers of sequences and of tokens every other one, like the fields of a chessboard."""
    ((count, tokens, _),) = case.requests
    return (DECODES[count] + CONTEXTS[tokens]) % 2 == 0


def steps(case: PredictionCase) -> Iterator[tuple[str, Workload]]:
    """As the engine runs requests that come at once: decodes, then prompts in their order, within the budget."""
    waiting = [[0, prompt, output] for count, prompt, output in case.requests for _ in range(count)]
    while waiting:
        left, run = BUDGET, []
        for one in sorted(waiting, key=lambda one: one[0] < one[1]):
            new = min(left, max(1, one[1] - one[0]))
            if new:
                one[0] += new
                left -= new
                run.append((new, one[0]))
                one[2] -= one[0] >= one[1]
        waiting = [one for one in waiting if one[2]]
        workload = Workload(tuple(new for new, _ in run), tuple(total for _, total in run))
        kinds = {new == 1 for new in workload.new}
        yield ("mixed" if len(kinds) == 2 else "decode" if kinds == {True} else "prompt"), workload


def like(one: dict[str, Any], other: dict[str, Any]) -> bool:
    same = all(one[key] == other[key] for key in ("kind", "sequences", "tokens"))
    return same and abs(one["keys"] - other["keys"]) <= 0.02 * one["keys"]


def held_out(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of cases that were held out, without those whose like is in a case that was not."""
    known = {case.name: case for case in cases()}
    fitted = [line for line in lines if is_fitted(known[line["case"]])]
    return [line for line in lines if line not in fitted and not any(like(line, one) for one in fitted)]


def errors_of(model: str, lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By kind of step."""
    spec = device("h200")
    predicted_times = StepModel(meta_model(find_config(model), spec), spec)
    known = {case.name: case for case in cases()}
    alike = {name: defaultdict(list) for name in {line["case"] for line in lines}}
    for name, groups in alike.items():
        for kind, workload in steps(known[name]):
            groups[kind, len(workload.new), workload.tokens].append(workload)
    found = defaultdict(list)
    for line in lines:
        workloads = alike[line["case"]][line["kind"], line["sequences"], line["tokens"]]
        assert min(abs(sum(one.total) - line["keys"]) for one in workloads) <= 0.001 * line["keys"]
        predicted = statistics.median(predicted_times.seconds(one) for one in workloads)
        found[line["kind"]].append(predicted / line["measured"] - 1)
    return found


def measured(file: str, model: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (RESULTS / file).read_text().splitlines())
    return [line for line in lines if line["model"] == model]


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    lines = held_out(measured("h200_predictions.jsonl", "0.6B"))
    return errors_of("0.6B", [line for line in lines if line["kind"] != "decode" or line["sequences"] > 2])


def test_half_of_the_held_out_steps_are_within_a_twentieth_and_nine_tenths_within_a_tenth(
    errors: dict[str, list[float]],
) -> None:
    summary = ErrorSummary.of([error for of_kind in errors.values() for error in of_kind])
    assert summary.count >= 35
    assert summary.median <= 0.04
    assert summary.p90 <= 0.085
    assert abs(summary.signed) <= 0.02


def test_each_kind_of_step_is_about_as_well_predicted(errors: dict[str, list[float]]) -> None:
    assert set(errors) == {"decode", "prompt", "mixed"}
    assert all(ErrorSummary.of(of_kind).median <= 0.055 for of_kind in errors.values())


def test_groups_of_four_heads_are_about_as_well_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes of 8B that were held out, and all steps of 1B. Decodes beside prompts are divided as they were when they
    ran: as if all sequences of the recorded size decoded."""

    def as_it_was(*shape: Any, some: bool) -> DecodeTile:
        return decode_tile(*shape)

    monkeypatch.setattr(attention_times, "decode_tile", as_it_was)
    lines = held_out(measured("h200_predictions_larger.jsonl", "8B"))
    decodes = ErrorSummary.of(errors_of("8B", [line for line in lines if line["kind"] == "decode"])["decode"])
    assert decodes.count >= 15
    assert decodes.median <= 0.048
    assert decodes.p90 <= 0.089
    all_of_1b = errors_of("1B", measured("h200_predictions_larger.jsonl", "1B"))
    summary = ErrorSummary.of([error for of_kind in all_of_1b.values() for error in of_kind])
    assert summary.count >= 140
    assert summary.median <= 0.046
    assert summary.p90 <= 0.111
