"""`strata graph` of one rank of several agrees with counts made by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.graph.shown import HIDDEN, LAYER_WEIGHTS, LAYERS, LLAMA_405B, VOCABULARY, run


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
    assert by_operation[1]["kept_attention"]["cached"] == 48 * 3 * 501 * 2 * 128 * 2
    assert 2 * by_operation[1]["kept_attention"]["cached"] == by_operation[0]["decode_attention"]["cached"]
    with pytest.raises(ValueError, match="2 with tensor_parallel_size=4: no ranks have the same of 4 KV heads"):
        run("30B-A3B", "--tensor-parallel-size", 4, "--decode-context-parallel-size", 2)
    with pytest.raises(ValueError, match="which has layers with windows: leave it out"):
        run("gpt-oss-20b", "--tensor-parallel-size", 8, "--decode-context-parallel-size", 2)
    apart = "--enable-expert-parallel", "--enable-dp-attention", "--decode-context-parallel-size", 2
    with pytest.raises(ValueError, match="and enable_dp_attention=True are not there together"):
        run("30B-A3B", "--tensor-parallel-size", 8, *apart)


def test_ranks_that_cannot_share_a_model_or_have_no_link() -> None:
    with pytest.raises(ValueError, match="--stage 2 of --pipeline-parallel-size 2: stages count from 0 to 1"):
        run("8B", "--pipeline-parallel-size", 2, "--stage", 2)
    with pytest.raises(ValueError, match="pipeline_parallel_size=33: each stage needs a layer, and this model has 32"):
        run("8B", "--pipeline-parallel-size", 33)
    with pytest.raises(ValueError, match="heads"):
        run("8B", "--tensor-parallel-size", 3)
    with pytest.raises(ValueError, match="no link is recorded for l40s"):
        run("8B", "--tensor-parallel-size", 2, "--hardware", "l40s")
    with pytest.raises(ValueError, match="and pipeline_parallel_size=2 divides them"):
        run("8B", "--prefill-context-parallel-size", 2, "--pipeline-parallel-size", 2)
    with pytest.raises(ValueError, match="make that 2 or more"):
        run("30B-A3B", "--enable-dp-attention")
    for option in ("--prefill-context-parallel-size", "--pipeline-parallel-size"):
        with pytest.raises(ValueError, match="layers keep a state of fixed size: leave it out"):
            run("80B-A3B", option, 2)


def test_ranks_with_sequences_of_their_own() -> None:
    shared = ("--tensor-parallel-size", 2, "--enable-expert-parallel", "--sequences", 4, "--json")
    apart, together = run("30B-A3B", *shared, "--enable-dp-attention"), run("30B-A3B", *shared)
    # There and back for each of 48 layers, and once which rows are padding.
    assert (apart["messages"], together["messages"]) == (2 * 48 + 1, 2 * 48 + 2)
    assert apart["sent_bytes"] == 48 * 2 * (4 * 2048 * 2) + 4 * 4
    assert apart["parameters"] > together["parameters"]
