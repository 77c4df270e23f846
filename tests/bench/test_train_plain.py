"""`strata bench train` beside the script in plain PyTorch on the CPU: one model, one workload, speed over ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import optimizer_step, train_plain
from benchmarks.training import speed as train_speed
from benchmarks.training import workload as train_workload
from benchmarks.training.speed import SEED, TrainingTest, measure, work_of
from benchmarks.training.workload import TrainingWork, learning_rate, synthetic_batch, synthetic_tokens
from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.initialize import dummy_values
from strata.models.shapes import SHAPES
from strata.parallel.layout import Layout, read_layout
from strata.plan.meta_model import find_config

SMALL = train_plain.Shape(vocabulary=600, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, inner=48)
FIELDS: dict[str, Any] = SHAPES["1B"] | {
    "vocab_size": 600, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48,
}  # fmt: skip
# Names of a parameter there and here.
NAMES = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    **{one: f"self_attn.{one}_proj" for one in "qkvo"},
    **{one: f"mlp.{one}_proj" for one in ("gate", "up", "down")},
    "norm": "model.norm",
    "head": "lm_head",
}


def test_the_shapes_are_one() -> None:
    with torch.device("meta"):
        plain = train_plain.Llama(train_plain.Shape(), 8192, torch.float32)
        ours = build(config_from_dict(SHAPES["1B"]))
    found = {named(name): parameter.shape for name, parameter in plain.named_parameters()}
    assert found == {name: parameter.shape for name, parameter in ours.named_parameters()}
    flops = train_plain.flops_per_token(train_plain.Shape(), 8192)
    assert flops == 6 * 1_235_814_400 + 6 * 16 * 2048 * 8192


def named(name: str) -> str:
    return ".".join(NAMES.get(piece, piece) for piece in name.split("."))


def test_the_angles_of_all_positions_are_one() -> None:
    cos, sin = train_plain.rotation(train_plain.Shape(), 8192)
    table = build(config_from_dict(SHAPES["1B"] | {"num_hidden_layers": 1, "vocab_size": 8}), 8192).model.rotary.table
    torch.testing.assert_close(torch.cat((cos[:, :32], sin[:, :32]), -1), table, rtol=0, atol=2e-3)


def test_initial_weights_and_rates_are_one() -> None:
    ours = dict(dummy_values(build(config_from_dict(FIELDS)), SEED, torch.device("cpu")))
    for name, parameter in train_plain.make_model(SMALL, 64, "cpu").named_parameters():
        assert torch.equal(ours.pop(named(name)), parameter), name
    assert not ours
    rates = [learning_rate(step) for step in range(30)]
    assert (rates[0], rates[19]) == (pytest.approx(1e-5 / 20), pytest.approx(1e-5))
    assert [train_plain.rate_of(step) for step in range(30)] == pytest.approx(rates)


def kept(call: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    """The same call, whose results are kept."""

    def calls(*args: Any, **kwargs: Any) -> Any:
        results.append(call(*args, **kwargs))
        return results[-1]

    return calls


def test_losses_and_weights_are_one_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in float32, over the whole warm-up, at a rate at which the loss falls and half of the steps are clipped."""
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    steps, models, norms = [], [], []
    monkeypatch.setattr(train_speed, "make_step", kept(train_speed.make_step, steps))
    monkeypatch.setattr(train_plain, "make_model", kept(train_plain.make_model, models))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", kept(torch.nn.utils.clip_grad_norm_, norms))

    test = TrainingTest(str(tmp_path / "config.json"), 2, 64, peak_rate=1e-2)
    assert measure(test, "cpu", steps=14, repeat=2, losses=tmp_path / "ours.json", kernels=False) is not None
    ours = json.loads((tmp_path / "ours.json").read_text())
    plain, _ = train_plain.train(SMALL, 2, 64, 30, "cpu", peak_rate=1e-2)
    assert plain[-1] < plain[0] - 1
    assert sum(norm > 1 for norm in norms) >= 10
    assert ours == pytest.approx(plain, rel=2e-6)
    assert train_plain.largest_difference(ours, plain)["loss_difference"] < 1e-5

    masters = {shard.name: shard.tensor for shard in steps[0].state_shards() if shard.kind == "master"}
    for name, parameter in models[0].named_parameters():
        error = masters.pop(named(name)) - parameter.detach().flatten()
        assert error.norm() < 2e-5 * parameter.norm(), name
    assert not masters


@pytest.mark.parametrize("script", [optimizer_step, train_plain])
def test_without_a_gpu_a_script_says_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["script"])
    with pytest.raises(SystemExit, match=r"^benchmarks/\w+\.py .* a CUDA GPU: none here$"):
        script.main()


def test_losses_that_cannot_be_read_are_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--against .*ours\.json cannot be read"):
        train_plain.read_losses(tmp_path / "ours.json")


TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 600, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


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


def test_tokens_are_those_of_the_plain_script() -> None:
    for step in (0, 7):
        tokens, targets = synthetic_tokens(step, 2, 300, 128256)
        others = train_plain.tokens_of(step, 2, 300, 128256)
        assert torch.equal(tokens, others[0].flatten())
        assert torch.equal(targets, others[1].flatten())
    assert not torch.equal(tokens, synthetic_tokens(8, 2, 300, 128256)[0])


def test_batch_holds_these_tokens_in_equal_sequences() -> None:
    packed = synthetic_batch(7, 2, 300, 128256)
    batch, rows, targets = packed.to(torch.device("cpu"))
    tokens, wanted = synthetic_tokens(7, 2, 300, 128256)
    assert torch.equal(batch.tokens, tokens.int())
    assert torch.equal(targets, wanted)
    assert rows.tolist() == list(range(600))
    assert batch.positions.tolist() == [*range(300), *range(300)]
    assert batch.offsets.tolist() == [0, 300, 600]


def test_nine_tokens_in_ten_follow_from_the_one_before() -> None:
    tokens, targets = synthetic_tokens(3, 4, 5000, 1000)
    assert len(tokens.unique()) == train_workload.CYCLE
    pairs = torch.stack([tokens, targets]).unique(dim=1, return_counts=True)[1]
    likely = pairs.sort(descending=True).values[: train_workload.CYCLE].sum() / len(tokens)
    assert likely == pytest.approx(0.9, abs=0.01)


def test_flops_and_floor_by_hand() -> None:
    config = find_config("1B")
    with torch.device("meta"):
        model = build(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == 1_498_482_688
    work = TrainingWork(config, 16384, 8192, parameters - 128256 * 2048, parameters)
    assert work.flops_per_token == 6 * 1_235_814_400 + 6 * 16 * 2048 * 8192
    seconds = 16384 * work.flops_per_token / 800e12 + 28 * parameters / 4.28e12
    assert math.isclose(work.floor(device("h200"), "bf16"), seconds)
    layers = 1_235_814_400 - 128256 * 2048
    saved = 16384 * 6 * layers * (1 / 800e12 - 1 / 1470e12)
    assert math.isclose(work.floor(device("h200"), "fp8-row"), seconds - saved)
    # The figure of the peers: 54,138 tokens a second are 49.41 % of 989 TFLOP/s.
    assert 54138.2 * work.flops_per_token / 989e12 == pytest.approx(0.4941, abs=1e-4)
