"""`strata bench train` over ranks, on the CPU, and what it reads and adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strata.bench.trace import covered
from strata.bench.training.speed import TrainingTest, work_of
from strata.parallel.layout import Layout, read_layout
from strata.plan.meta_model import find_config

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 600,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def test_two_ranks_report_once(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    arguments = ["--shape", str(config), "--batch", "2", "--sequence", "16", "--steps", "2", "--repeat", "2"]
    arguments += ["--ranks", "2", "--layout", "shard=2,zero=2,micro_batches=2", "--device", "cpu", "--json"]
    command = [sys.executable, "-m", "strata", "bench", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    values = json.loads(line)
    assert (values["test"], values["ranks"], values["unit"]) == ("train", 2, "tok/s")
    assert values["value"] > 0
    assert len(values["all"]) == 2
    assert values["layout"]["zero"] == 2
    assert 6 < values["loss_first"] < 7  # log(600) is 6.4


def test_a_layout_is_read_strictly() -> None:
    wanted = Layout(pp=4, micro_batches=8, schedule="zero-bubble", sequence_parallel=True, tp=2, context="ulysses")
    text = "pp=4,micro_batches=8,schedule=zero-bubble,sequence_parallel=true,tp=2,context=ulysses"
    assert read_layout(text) == wanted
    assert read_layout("") == Layout()
    for text, message in (
        ("shards=2", "'shards' is unknown; known are pp, dp, shard"),
        ("shard=two", "shard = 'two' must be a whole number"),
        ("sequence_parallel=1", "sequence_parallel = '1' must be true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            read_layout(text)


def test_work_of_a_rank() -> None:
    """T7, and the mixture of experts on 8 ranks: active parameters of Qwen3-30B-A3B, 3.3 billion with the embedding."""
    test = TrainingTest("8B", 2, 8192)
    work = work_of(test, find_config("8B"), Layout(shard=8, zero=2))
    assert work.tokens == 16384
    assert work.weights == 8_030_261_248 - 128256 * 4096
    assert work.parameters == 8_030_261_248 // 8
    # The peer's 9,925 tokens a second are 52 % of 989 TFLOP/s.
    assert 9925 * work.flops_per_token / 989e12 == pytest.approx(0.517, abs=1e-3)
    sparse = work_of(test, find_config("30B-A3B"), Layout(shard=8, ep=8, zero=2))
    assert sparse.weights + 151936 * 2048 == pytest.approx(3.35e9, rel=0.01)
    assert work_of(test, find_config("8B"), Layout(pp=4, micro_batches=8)).tokens == 8 * 16384 // 4


def test_covered_time_counts_overlaps_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 9), (0, 3), (2, 4), (6, 7)]) == 8
