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
        ("decode_beside", "--tpot-target-ms"),
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


@pytest.mark.parametrize(
    ("floor", "words"),
    [
        (0.0012, "over their floor: 0.2% of them is the least"),
        (0.42, "near their floor: 70.0%"),
        (None, "whose floor is not known"),
    ],
)
def test_one_that_nothing_held(floor: float | None, words: str) -> None:
    found = explain_request(
        ledger({**OWN, "inbox": 0.01}, floor), name="cmpl-1", server="http://x", device="cpu", model="builtin"
    )
    assert (found.verdict.layer, found.verdict.cause, found.verdict.remedies) == ("kernel", "unknown", ())
    assert words in found.verdict.symptom
    command = "`strata explain T3-b8 --model builtin --prompt 100 --output 50`"
    assert (command in found.verdict.evidence[-1]) == ("near" not in words)
    assert {part.cause for part in found.waterfall.parts if part.layer == "kernel"} == {"unknown"}
    assert (found.device, found.sources[0]) == ("cpu", "the ledger of http://x")
    assert explain_request(ledger(OWN), name="cmpl-1", server="http://x").device is None


def test_a_folder_is_not_asked_for_by_the_name_under_which_it_is_served() -> None:
    served = {"name": "cmpl-1", "server": "http://x", "device": "cpu"}
    told = explain_request(ledger(OWN, 0.0012), model="model", **served).verdict.evidence[-1]
    assert "`strata explain T3-b8 --model MODEL --prompt 100 --output 50`" in told
    assert told.endswith("MODEL being the folder that is served as 'model'")
    shape = explain_request(ledger(OWN, 0.0012), model="8B", **served).verdict.evidence[-1]
    assert "--model 8B" in shape
    assert "MODEL" not in shape


def test_phases_are_all_of_its_time_one_after_another() -> None:
    parts: dict[Part, float] = {"text": 0.01, "slot": 0.2, **OWN, "prompt_beside": 0.05, "decode_beside": 0.3}
    found = explain_request(ledger(parts), name="cmpl-1", server="http://x").phases
    told = [(phase.name, phase.begin, phase.end) for phase in found]
    assert [name for name, _, _ in told] == ["queue", "prefill", "decode"]
    assert [end for _, _, end in told] == pytest.approx([0.21, 0.36, 1.16])
    assert [begin for _, begin, _ in told] == [0.0, told[0][2], told[1][2]]
    assert found[1].parts == {"prompt": 0.1, "prompt_beside": 0.05}
    delivered = explain_request(ledger({**parts, "delivery": 0.1}), name="cmpl-1", server="http://x").phases
    assert delivered[-1].end == pytest.approx(1.26)
    waits = RequestLedger(0.3, {"text": 0.1, "slot": 0.2}, None, {}, None, 100, 0, 0, 0, 0, 0.0, 0, None)
    only = explain_request(waits, name="cmpl-1", server="http://x").phases
    assert [(phase.name, phase.end) for phase in only] == [("queue", pytest.approx(0.3))]
