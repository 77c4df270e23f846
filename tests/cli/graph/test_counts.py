"""`strata graph` agrees with counts made by hand from the published sizes of the models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.hardware.probe.report import file_of, keep
from tests.cli.graph.shown import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYER_WEIGHTS, LAYERS, VOCABULARY, app, run
from tests.hardware.probe.test_device import REPORT


def test_predicted_times_are_above_the_floor_and_say_where_they_come_from() -> None:
    shown = run("8B", "--context", 383, "--json")
    # T2 takes 3.87 ms a token on an H200; the host is not in it.
    assert shown["predicted_s"] == pytest.approx(3.87e-3, rel=0.04)
    assert shown["predicted_s"] > shown["step_floor_s"]
    origins = shown["predicted_from"]
    assert sum(origins.values()) == pytest.approx(1)
    assert origins["measured"] > 0.9
    assert "replayed: 9" in run("8B", "--context", 383)
    assert run("8B", "--hardware", "a100", "--json")["predicted_from"]["analytic"] == 1


def test_this_machines_probe_counts_and_is_named(tmp_path: Path) -> None:
    before = run("0.6B", "--json")
    assert before["measurements"] == ["calls measured on another machine with this device, which come with Strata"]
    path = file_of("NVIDIA H200", 1)
    keep(REPORT, path)  # copies at 4.2 TB/s instead of 4.28
    after = run("0.6B", "--json")
    assert after["measurements"][1:] == [f"this machine's probe of 2026-11-23, {path}"]
    assert after["step_floor_s"] == pytest.approx(before["step_floor_s"] * 4.28 / 4.2, rel=1e-6)
    assert "from this machine's probe of 2026-11-23" in run("0.6B")


def test_405b_parameters_and_flops_per_token(config: Path) -> None:
    context = 4000
    shown = run(config, "--context", context, "--hardware", "a100", "--json")
    norms = HIDDEN * (2 * LAYERS + 1)
    assert shown["parameters"] == LAYERS * LAYER_WEIGHTS + norms + 2 * VOCABULARY * HIDDEN == 405_853_388_800
    by_operation: dict[str, int] = {}
    for row in shown["operations"]:
        by_operation[row["operation"]] = by_operation.get(row["operation"], 0) + row["cost"]["flops"]
    linear = 2 * (LAYERS * LAYER_WEIGHTS + VOCABULARY * HIDDEN)
    attention = 4 * LAYERS * HEADS * HEAD_DIM * (context + 1)
    assert by_operation["linear"] == linear
    assert by_operation["attention"] == attention
    assert shown["flops_per_token"] == pytest.approx(linear + attention, rel=1e-3)  # norms, rotations, additions
    assert shown["flops_per_token"] > linear + attention


def test_405b_decode_is_bound_by_reading_weights_once(config: Path) -> None:
    shown = run(config, "--context", 1000, "--sequences", 32, "--json")
    weights = 2 * (LAYERS * LAYER_WEIGHTS + VOCABULARY * HIDDEN)
    cached = 2 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 32 * 1001
    assert shown["step_floor_s"] == pytest.approx((weights + cached) / 4.28e12, rel=1e-3)
    assert shown["step_floor_s"] <= shown["nodes_floor_s"]
    layers = next(row for row in shown["parts"] if row["part"] == "layers")
    assert layers["bound"] == "memory"
    assert layers["parameters"] == LAYERS * (LAYER_WEIGHTS + 2 * HIDDEN) + HIDDEN  # the last norm, in a product


def test_prefill_on_another_device_is_bound_by_compute() -> None:
    shown = run("8B", "--tokens", 4096, "--hardware", "a100", "--json")
    assert shown["device"] == "a100"
    assert next(row for row in shown["parts"] if row["part"] == "layers")["bound"] == "compute"
    assert shown["step_floor_s"] == pytest.approx(shown["flops"] / 312e12, rel=1e-3)
    assert (shown["runs"], set(shown["kernels"])) == ("logits", {"(ATen)"})  # no kernels of its own fit there


def test_a_tied_head_counts_once() -> None:
    shown = run("0.6B", "--json")
    # Qwen3-0.6B: 596,049,920 parameters as published.
    assert shown["parameters"] == 596_049_920
    assert [row["part"] for row in shown["parts"]] == ["inputs", "embedding", "layers", "head", "sampling"]
    (head,) = (row for row in shown["operations"] if row["part"] == "lm_head (embed_tokens)")
    assert head["cost"]["flops"] == 2 * 151_936 * 1024 + 151_936  # logits are scaled by the norm
    assert "embed_tokens" in {row["part"] for row in shown["operations"]}  # the lookup


def test_tables_show_merged_parts_and_totals(config: Path) -> None:
    shown = run(config)
    assert "q_proj&k_proj&v_proj" in shown
    assert "gate_proj&up_proj" in shown
    assert "405,853,388,800" in shown
    assert re.search(r"floor of the step\s+\d+ ms", shown)


@pytest.mark.parametrize(
    ("shape", "layers", "norms", "fused"), [("8B", 32, 2, "rope+kv_write"), ("0.6B", 28, 4, "q_norm+k_norm+rope")]
)
def test_the_graph_is_shown_before_and_after_the_passes(shape: str, layers: int, norms: int, fused: str) -> None:
    counts = run(shape, "--json")["graph"]
    # Of a layer: seven projections, two rotations, two additions, a write, attention, the activation; five kernels.
    captured, executed = layers * (norms + 14) + 4, layers * 5 + 4
    assert counts["captured"]["add"] == counts["run"]["linear_add"] == 2 * layers
    assert "kv_write" not in counts["run"]
    assert [sum(count.values()) for count in counts.values()] == [captured, executed]
    shown = run(shape)
    assert f"{captured:,} operations, {executed:,} after merging and fusion" in shown
    for part in (fused, "o_proj+post_attention_layernorm+add", "down_proj+norm+add"):
        assert part in shown


def test_a_folder_is_its_config(config: Path) -> None:
    assert run(config.parent, "--json")["parameters"] == 405_853_388_800


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            "model folder 'nowhere' does not exist; give a model folder, org/model",
        ),
        (["30B-A3B", "--enable-dp-attention"], "--enable-dp-attention is of experts that --tensor-parallel-size ranks"),
        (["8B", "--passes", "fuse"], "there is no pass 'fuse'; accepted are all, exact, none"),
        (["8B", "--hardware", "abacus"], "device 'abacus' is unknown; give one of h200, .* rtx5090, or cpu, the proc"),
        (
            ["8B", "--hardware", "gaudi3"],
            "'gaudi3' is Intel Gaudi 3, which runs no CUDA kernels; give one of h200, .* cpu",
        ),
        (
            ["8B", "--hardware", "cpu", "--tensor-parallel-size", "2"],
            "cpu shows a step of one process; leave out the oth",
        ),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run(*arguments)
    assert "\n" not in str(error.value)


def test_passes_are_listed_and_chosen() -> None:
    assert "fuse_rounding" in run("0.6B", "--passes", "list")
    shown = run("0.6B", "--passes", "-fuse_products,-fuse_decode_attention")
    assert "linear_add" not in shown
    assert "qk_rope_kv_write" in shown
    assert "passes -fuse_products,-fuse_decode_attention" in shown


def test_a_narrow_terminal_loses_neither_names_nor_figures() -> None:
    narrow = CliRunner(env={"COLUMNS": "60", "FORCE_COLOR": "1"})
    shown = narrow.invoke(app, ["0.6B", "--tensor-parallel-size", "2"], catch_exceptions=False).stdout
    (sums,) = (line for line in shown.splitlines() if line.strip().startswith("down_proj+norm"))
    assert re.search(r"one shot .* kB .* us +communication", sums)
    assert "\u2026" not in shown


def test_a_context_beyond_what_the_model_is_made_for_is_told() -> None:
    assert "50001 tokens are more than its 40960" in run("0.6B", "--context", 50_000)
    assert "are more than" not in run("0.6B", "--context", 40_959)


def test_sizes_end_where_a_count_of_elements_no_longer_fits() -> None:
    most = run("8B", "--tokens", str(10**8), "--context", str(10**8), "--sequences", str(10**3))
    assert "floor of the step" in most
    for option in ("--tokens", "--context", "--sequences"):
        result = CliRunner().invoke(app, ["graph", "8B", option, "9" * 30])
        assert result.exit_code == 2
        assert option in result.stderr


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("[1,\n 2")
    with pytest.raises(ValueError, match=r"config\.json, line 2, column 3: not JSON"):
        run(broken)
    broken.write_text("[1, 2]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        run(broken)
