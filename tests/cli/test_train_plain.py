"""`strata bench train` and the script in plain PyTorch that it is compared with train the same model, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import optimizer_step, train_plain
from strata.cli.train_speed import SEED, TrainingTest, measure
from strata.cli.train_workload import learning_rate
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


def test_losses_are_one_to_rounding(tmp_path: Path) -> None:
    """Both in float32, with clipping, over the whole warm-up of the rate."""
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    test = TrainingTest(str(tmp_path / "config.json"), 2, 64)
    assert measure(test, "cpu", steps=14, repeat=2, losses=tmp_path / "ours.json", kernels=False) is not None
    ours = json.loads((tmp_path / "ours.json").read_text())
    plain, _ = train_plain.train(SMALL, 2, 64, 30, "cpu")
    assert ours == pytest.approx(plain, rel=1e-5)
    assert len({round(loss, 3) for loss in plain}) > 10
    assert train_plain.largest_difference(ours, plain)["loss_difference"] < 1e-4


@pytest.mark.parametrize("script", [optimizer_step, train_plain])
def test_without_a_gpu_a_script_says_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["script"])
    with pytest.raises(SystemExit, match=r"^benchmarks/\w+\.py .* a CUDA GPU: none here$"):
        script.main()


def test_losses_that_cannot_be_read_are_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--against .*ours\.json cannot be read"):
        train_plain.read_losses(tmp_path / "ours.json")
