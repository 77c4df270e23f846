"""`strata graph` agrees with counts made by hand from published sizes, of whole models and of one rank."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.hardware.probe.report import file_of, keep
from tests.cli.graph.shown import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYER_WEIGHTS,
    LAYERS,
    LLAMA_405B,
    VOCABULARY,
    app,
    run,
)
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


def test_a_rank_of_8_of_405b(config: Path) -> None:
    """An eighth of each matrix and of the cache; two sums over ranks a layer, one of the embedding, and a number a row
    by which ids are drawn."""
    rows, ranks = 32, 8
    shown = run(config, "--context", 1000, "--sequences", rows, "--tensor-parallel-size", ranks, "--json")
    whole = run(config, "--context", 1000, "--sequences", rows, "--json")
    assert shown["ranks"] == ranks
    norms = HIDDEN * (2 * LAYERS + 1)
    assert shown["parameters"] == (LAYERS * LAYER_WEIGHTS + 2 * VOCABULARY * HIDDEN) // ranks + norms
    assert shown["step_floor_s"] == pytest.approx(whole["step_floor_s"] / ranks, rel=2e-3)
    assert (shown["messages"], whole["messages"]) == (2 * LAYERS + 2, 0)
    # Of a sum each rank sends 7/8 of its rows, and of what it has added up as much; to draw, 8 bytes of each row to 7.
    sums = (2 * LAYERS + 1) * 2 * rows * HIDDEN * 2 * (ranks - 1) // ranks
    assert shown["sent_bytes"] == sums + rows * 8 * (ranks - 1)
    assert shown["messages_floor_s"] == pytest.approx((2 * LAYERS + 2) * 1.96e-6 + shown["sent_bytes"] / 359e9)
    by_part = {row["part"]: row for row in shown["parts"]}
    assert (by_part["embedding"]["bound"], by_part["sampling"]["cost"]["messages"]) == ("communication", 1)
    assert by_part["layers"]["cost"]["messages"] == 2 * LAYERS  # products send, the last norm is behind one
    drawn = run(config, "--tensor-parallel-size", ranks)
    assert "one rank of 8" in drawn
    assert re.search(r"messages\s+254, ", drawn)


def test_experts_of_one_rank_are_those_of_the_model() -> None:
    assert run("30B-A3B", "--enable-expert-parallel", "--json") == run("30B-A3B", "--json")


def test_the_figures_of_a_link_that_floors_count_with_are_told() -> None:
    """Of an H200: the fit to all messages, and the best of them."""
    told = " ".join(run("0.6B", "--tensor-parallel-size", 2).split())
    assert "339 GB/s each way, 2.33 us a message (floors by the best that was seen: 359 GB/s, 1.96 us)" in told


def test_stages_of_layers_as_those_of_405b(tmp_path: Path) -> None:
    """Each has its layers, and one message of hidden states leaves the first; only the last has a head and draws."""
    config, layers = tmp_path / "config.json", 14
    config.write_text(json.dumps(LLAMA_405B | {"num_hidden_layers": layers}))
    rows, options = 32, ("--context", 1000, "--sequences", 32, "--pipeline-parallel-size", 2, "--json")
    first, last = (run(config, *options, "--stage", stage) for stage in range(2))
    norms = HIDDEN * (2 * layers + 1)
    assert first["parameters"] + last["parameters"] == layers * LAYER_WEIGHTS + 2 * VOCABULARY * HIDDEN + norms
    assert (first["messages"], last["messages"]) == (1, 0)
    assert first["sent_bytes"] == rows * HIDDEN * 2
    parts = [{row["part"] for row in shown["parts"]} for shown in (first, last)]
    assert parts[0] == {"inputs", "embedding", "layers"}
    assert parts[1] == {"inputs", "stage before", "layers", "head", "sampling"}
    assert "one rank of 4, of stage 1 of 2" in " ".join(
        run(config, "--pipeline-parallel-size", 2, "--tensor-parallel-size", 2, "--stage", 1).split()
    )


def test_a_rank_of_two_that_divide_a_prompt() -> None:
    """32 layers of 8 KV heads of 128 in bfloat16: half of 8,192 keys and values a rank, and half of the pairs."""
    ranks = ("--prefill-context-parallel-size", 2)
    chunk = ("8B", "--tokens", 8192, "--context", 57344)
    shown, whole = run(*chunk, *ranks, "--json"), run(*chunk, "--json")
    assert (shown["ranks"], shown["runs"]) == (2, "divided")
    assert shown["parameters"] == whole["parameters"]
    rows = 4096 * 2 + 4096 * 2  # what attention makes of the row that draws, and the residual
    assert shown["sent_bytes"] == 32 * 4096 * 2 * 8 * 128 * 2 + rows
    assert (shown["messages"], whole["messages"]) == (32 + 2, 0)
    assert shown["step_floor_s"] == pytest.approx(whole["step_floor_s"] / 2, rel=5e-3)
    by_operation = [{row["operation"]: row["cost"] for row in one["operations"]} for one in (shown, whole)]
    halves, wholes = (costs["attention"]["flops"] for costs in by_operation)
    assert halves * 2 == wholes
    # A decode and a short prompt are those of one rank.
    for few in (("8B", "--context", 1000), ("8B", "--tokens", 511)):
        assert run(*few, *ranks, "--json") | {"ranks": 1} == run(*few, "--json")


def test_a_rank_of_two_that_divide_keys() -> None:
    """48 layers, of which 8 ranks have one of 4 KV heads of 128 each, and 4 of 32 heads, in bfloat16."""
    ranks = ("--tensor-parallel-size", 8, "--context", 1001, "--sequences", 3, "--json")
    whole, part = run("30B-A3B", *ranks), run("30B-A3B", *ranks, "--decode-context-parallel-size", 2)
    assert part["messages"] == whole["messages"] + 2 * 48
    sent = 3 * 4 * 128 * 2 + 3 * 4 * (128 + 1) * 4  # queries, and averages with their logarithms
    assert part["sent_bytes"] == whole["sent_bytes"] + 48 * sent
    by_operation = [{row["operation"]: row["cost"] for row in one["operations"]} for one in (whole, part)]
    assert by_operation[1]["dcp_attention"]["cached"] == 48 * 3 * 501 * 2 * 128 * 2
    assert 2 * by_operation[1]["dcp_attention"]["cached"] == by_operation[0]["decode_attention"]["cached"]


def test_ranks_with_sequences_of_their_own() -> None:
    shared = ("--tensor-parallel-size", 2, "--enable-expert-parallel", "--sequences", 4, "--json")
    apart, together = run("30B-A3B", *shared, "--enable-dp-attention"), run("30B-A3B", *shared)
    # There and back for each of 48 layers, and once which rows are padding.
    assert (apart["messages"], together["messages"]) == (2 * 48 + 1, 2 * 48 + 2)
    assert apart["sent_bytes"] == 48 * 2 * (4 * 2048 * 2) + 4 * 4
    assert apart["parameters"] > together["parameters"]
