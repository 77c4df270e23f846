"""`strata bench train` and the script in plain PyTorch that it is compared with train the same model, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import optimizer_step, train_plain
from strata.bench.training import speed as train_speed
from strata.bench.training.speed import SEED, TrainingTest, measure
from strata.bench.training.workload import learning_rate
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.initialize import dummy_values
from strata.models.shapes import SHAPES

SMALL = train_plain.Shape(vocabulary=600, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, inner=48)
FIELDS: dict[str, Any] = SHAPES["1B"] | {
    "vocab_size": 600,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
}
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
    assert [train_plain.rate_of(step) for step in range(30)] == pytest.approx(
        [learning_rate(step) for step in range(30)]
    )


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
