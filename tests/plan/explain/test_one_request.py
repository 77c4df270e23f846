"""One request explained from its ledger: the parts add up, and the reason is what took its time."""

from __future__ import annotations

import pytest

from strata.engine.watch.request_ledger import PARTS, Part, RequestLedger
from strata.plan.explain.one_request import explain_request


def ledger(parts: dict[Part, float], floor: float | None = None) -> RequestLedger:
    """Of a request whose first token came after all but its decoding."""
    first = {part: seconds for part, seconds in parts.items() if not part.startswith("decode")}
    total = sum(parts.values())
    return RequestLedger(total, parts, sum(first.values()), first, "length", 100, 16, 50, 2, 49, 7.5, 0, floor)


OWN: dict[Part, float] = {"prompt": 0.1, "decode": 0.5}


@pytest.mark.parametrize(
    ("part", "option"),
    [
        ("slot", "--max-num-seqs"),
        ("pages", "--num-pages"),
        ("preempted", "--num-pages"),
        ("step_full", "--data-parallel-size"),
        ("decode_beside", "--step-target-ms"),
        ("text", "--api-workers"),
    ],
)
def test_what_took_longest_is_the_reason(part: Part, option: str) -> None:
    found = explain_request(ledger({**OWN, part: 0.6, "host_gap": 0.3}), name="cmpl-1", server="http://x")
    first, second = found.verdict.remedies
    assert option in first.option
    assert first.gain == pytest.approx(0.6 / 1.5)
    assert second.gain == pytest.approx(0.3 / 1.5)
    assert found.verdict.layer == "system"
    assert "first token after" in found.verdict.evidence[0]


def test_every_part_is_told_and_they_add_up_with_the_floor() -> None:
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.1)
    found = explain_request(ledger(parts, floor=0.25), name="cmpl-1", server="http://x").waterfall
    assert found.measured == pytest.approx(0.1 * len(PARTS))
    assert found.unexplained == pytest.approx(0.0, abs=1e-12)
    assert found.floor == pytest.approx(0.25 * 2 / 5), "its share of steps that it shared with others"
    assert len(found.parts) == len(PARTS) - 1
    unknown = explain_request(ledger(parts), name="cmpl-1", server="http://x")
    assert unknown.waterfall.floor == 0.0
    assert unknown.waterfall.unexplained == pytest.approx(0.0, abs=1e-12)
    assert unknown.sources


def test_one_that_nothing_held() -> None:
    found = explain_request(ledger({**OWN, "inbox": 0.01}, floor=0.3), name="cmpl-1", server="http://x")
    assert (found.verdict.layer, found.verdict.remedies) == ("kernel", ())
