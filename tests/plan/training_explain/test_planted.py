"""Runs in which one thing is wrong: the verdict names it, the parts add up, and the gain is what mending it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata.parallel.layout import Layout
from strata.plan.explain.explanation import Explanation
from strata.plan.training_explain.explain_run import explain_run
from strata.plan.training_explain.recorded_run import read_run
from strata.train.predict.min_time import predicted_time
from tests.plan.training_explain.planted import H200, LINES, STEPS, Planted

NORMAL = {
    "nvjet_tst_256x128": 0.55,
    "cudnn_sdpa_bprop": 0.27,
    "rms_norm_kernel": 0.05,
    "adamw_kernel": 0.04,
    "silu_mul_kernel": 0.05,
}
WIDE = {"ampere_sgemm_128x64_tn": 1.6, "nvjet_tst_256x128": 0.2, "cudnn_sdpa_bprop": 0.3, "adamw_kernel": 0.05}
OVERLAPPED = "--parallel.overlap true --parallel.sequence_parallel true"
EIGHT: dict[str, Any] = {"model": "8B", "tokens": 8192}


def explained(planted: Planted, folder: Path) -> Explanation:
    return explain_run(read_run(planted.write(folder / "planted")))


# What is planted, and of the verdict: layer, cause, words of the symptom, the option of the best remedy, and the gain
# if that is known by hand.
CASES = {
    "data": (Planted(data=0.5), "system", "host", "data-bound", "--data.window 256", 0.5 / 1.5),
    "checkpoints": (
        Planted(checkpoint=0.25), "system", "host", "checkpoints", "--run.checkpoint_every 10000", 0.2 * 19 / 20,
    ),
    "host between steps": (
        Planted(between=0.3, changes={"log_every": 1}),
        "system", "host", "host-bound", "--run.log_every 10", 0.3 / 1.3 * 0.9,
    ),
    "launches, untraced": (Planted(device=1.6, waits=0.0, phase="passes"), "graph", "launch", "launching", "", 0.375),
    "launches, traced": (
        Planted(device=1.4, waits=0.0, phase="passes", trace=NORMAL), "graph", "launch", "launching", "", 0.44 / 1.4,
    ),
    "a slow rank": (
        Planted(layout=Layout(shard=2, zero=2), slowest=0.2, device=1.25), "system", "scheduling", "rank 1", "", 0.2,
    ),
    "messages": (
        Planted(**EIGHT, layout=Layout(tp=4)), "system", "communication", "communication", OVERLAPPED, None,
    ),
    "bubbles": (
        Planted(**EIGHT, layout=Layout(pp=4, micro_batches=4), packs=4),
        "system", "scheduling", "bubbles", "--data.packs_per_step 8", None,
    ),
    "activations computed again": (
        Planted(recompute="layers"), "graph", "compute", "computed again", "--run.recompute none", None,
    ),
    "optimizer": (Planted(tokens=1024), "kernel", "memory", "optimizer", "--data.packs_per_step 2", None),
    "state on the host": (
        Planted(offload=True), "system", "memory", "from the host", "--optimizer.offload false", None,
    ),
    "float32": (Planted(device=2.2, waits=1.0, trace=WIDE), "graph", "compute", "precision", "", None),
    "a short run": (Planted(first=40.0), "graph", "compilation", "beginning", "--run.steps 1000", 0.9 * 40 / 90),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_verdict_names_what_was_planted(
    case: tuple[Planted, str, str, str, str, float | None], tmp_path: Path
) -> None:
    planted, layer, cause, words, option, gain = case
    found = explained(planted, tmp_path)
    verdict = found.verdict
    assert (verdict.layer, verdict.cause) == (layer, cause), verdict
    assert words in verdict.symptom
    assert verdict.remedies[0].option == option, verdict.remedies
    if gain is not None:
        assert verdict.remedies[0].gain == pytest.approx(gain, rel=0.02)
    gains = [one.gain for one in verdict.remedies]
    assert gains == sorted(gains, reverse=True)
    assert all(0.03 <= one < 1 for one in gains)
    # The parts, the floor and what is not explained are what was measured.
    whole = STEPS * LINES * planted.step + planted.first * planted.likely.seconds
    assert found.waterfall.measured == pytest.approx(whole)
    assert abs(found.waterfall.unexplained) < 0.02 * whole
    assert 0 < found.waterfall.floor < whole


def test_a_run_without_faults_is_near_its_floor(tmp_path: Path) -> None:
    found = explained(Planted(), tmp_path)
    assert "near the floor" in found.verdict.symptom
    assert [one.option for one in found.verdict.remedies] == ["--run.precision fp8-tensor"]
    assert any("MFU" in line for line in found.verdict.evidence)
    assert len(found.steps) == STEPS * LINES
    assert found.steps[-1].end == pytest.approx(found.waterfall.measured)


def test_a_little_lost_to_data_makes_no_run_data_bound(tmp_path: Path) -> None:
    verdict = explained(Planted(data=0.05), tmp_path).verdict
    assert verdict.layer == "kernel"
    assert "--data.window 256" in [one.option for one in verdict.remedies]


def test_less_recomputation_saves_what_the_cost_model_says(tmp_path: Path) -> None:
    planted = Planted(recompute="layers")
    now, then = (predicted_time(planted.shape, way, H200).seconds for way in ("layers", "none"))
    best = explained(planted, tmp_path).verdict.remedies[0]
    assert best.gain == pytest.approx((now - then) / now)


def test_mfu_is_that_of_the_log(tmp_path: Path) -> None:
    """The formula's FLOPs of the documents over the time and the maker's peak of both ranks."""
    planted = Planted(layout=Layout(shard=2, zero=2), packs=2)
    run = read_run(planted.write(tmp_path / "run"))
    flops = sum(one.flops.total for one in run.intervals)
    peak = H200.ceiling("compute", "bfloat16", measured=False).value
    wanted = flops / (STEPS * LINES * planted.step * 2 * peak)
    (told,) = [line for line in explain_run(run).verdict.evidence if "MFU" in line]
    assert f"{wanted:.1%} of the maker's peak" in told


def test_a_share_of_packs_that_is_empty_is_no_lost_time(tmp_path: Path) -> None:
    """The floor follows the documents, not the room."""
    planted = Planted()
    full = explained(planted, tmp_path)
    run = read_run(tmp_path / "planted")
    assert run.whole.flops.total > 0
    assert full.waterfall.floor == pytest.approx(
        sum(getattr(run.whole.flops, name) for name in ("products", "attention", "head"))
        / H200.ceiling("compute", "bfloat16").value
        + STEPS * LINES * 28 * 1_498_482_688 / H200.ceiling("bandwidth").value,
        rel=1e-3,
    )


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("times.jsonl", "", "tells of no step yet"),
        ("times.jsonl", '{"step": 1, "steps": 1}\n', "has no 'phases'"),
        ("times.jsonl", "no JSON\n", "is no log of a run"),
        ("log.jsonl", "[1]\n", "is no JSON object"),
        ("profile/trace.json.gz", "no gzip", "is not the trace"),
    ],
)
def test_what_cannot_be_explained_is_named(file: str, text: str, named: str, tmp_path: Path) -> None:
    folder = Planted(trace=NORMAL).write(tmp_path / "run")
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=named) as raised:
        read_run(folder)
    assert str(folder / file) in str(raised.value)


def test_an_unknown_device_is_named(tmp_path: Path) -> None:
    folder = Planted().write(tmp_path / "run")
    path = folder / "run.json"
    path.write_text(path.read_text().replace(H200.product, "Abacus 9"))
    with pytest.raises(ValueError, match=r"Abacus 9.*nothing is known"):
        explain_run(read_run(folder))
