"""Runs of models whose routers have biases: they move by counts, or stay, and are in the finished folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from strata.files.toml_tables import read_table
from strata.models.balance import routers
from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.save import save
from strata.models.weights import load
from strata.text.tokenizer import Tokenizer
from strata.train.config import TrainConfig
from strata.train.finish import save_model
from strata.train.start import fresh_config
from strata.train.trainer import Trainer
from tests.models.batches import packed
from tests.train.conftest import cut_off, log
from tests.train.tiny_run import LLAMA, Files, Table, write_files
from tests.train.train_ranks import ALONE

V3: Table = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": None,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "tie_word_embeddings": False,
}
NAME = "model.layers.1.mlp.gate.e_score_correction_bias"
RATE = 0.0078125  # a power of two, so that what a bias has moved is a whole number of it


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def start(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSeek-V3 in bfloat16 whose biases are float32, as they are published."""
    with Tokenizer.load(files.tokenizer) as tokenizer:
        config = fresh_config({key: value for key, value in V3.items() if value is not None}, tokenizer)
    model = build(config)
    initialize(model, seed=5)
    model.get_parameter(NAME).copy_(torch.tensor([0.5, -0.25, 0.125, 0.0]) + 2**-15)
    folder = tmp_path_factory.mktemp("start") / "model"
    save(model.to(torch.bfloat16), config, folder, files.tokenizer)
    return folder


def config_of(files: Files, start: Path, out: Path, **sections: Any) -> TrainConfig:
    table = files.tuning(out, **{"start": {"tokenizer": None, "model": str(start)}} | sections)
    return read_table(TrainConfig, table)


def bias_of(folder: Path) -> Tensor:
    return load_file(folder / "model.safetensors")[NAME]


def test_biases_move_by_counts_and_stand_in_the_model(files: Files, start: Path, tmp_path: Path) -> None:
    said: list[str] = []
    balance = {"method": "bias", "rate": RATE}
    through, cut = (config_of(files, start, tmp_path / name, balance=balance) for name in ("through", "cut"))
    run = Trainer(through, ALONE, warn=said.append)
    run.train()
    cut_off(Trainer(cut, ALONE), 2)
    Trainer(cut, ALONE, resume=True).train()
    assert log(tmp_path / "cut") == log(tmp_path / "through")
    assert not said
    assert "balance_loss" not in log(tmp_path / "through")[0]
    folder = save_model(run)
    before, after = bias_of(start), bias_of(folder)
    moved = (after - before) / RATE
    assert moved.abs().max() > 0
    assert torch.equal(moved, moved.round().clamp(-3, 3))
    stored = load_file(tmp_path / "through/checkpoints/step-00000003/rank-00000.safetensors")
    assert torch.equal(stored["selection_bias/model.layers.1.mlp.gate"], after)
    assert not any(name.endswith("e_score_correction_bias") for name in stored)
    names = {one["torch_dtype"] for one in (json.loads((at / "config.json").read_text()) for at in (start, folder))}
    assert names == {"bfloat16"}
    ours, _ = load(folder, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = [5, 9, 3, 7, 11]
    with torch.no_grad():
        error = ours.head(ours(packed([tokens]))) - theirs(torch.tensor([tokens])).logits[0]
    assert error.abs().max() < 2e-5


@pytest.mark.parametrize("tuned", [{"dpo": {}}, {"lora": {"rank": 2}}])
def test_tuning_leaves_biases_as_they_are(tuned: Table, files: Files, start: Path, tmp_path: Path) -> None:
    data = {"sources": [{"folder": str(files.pairs)}]} if "dpo" in tuned else {}
    config = config_of(files, start, tmp_path / "run", data=data, run={"steps": 1, "checkpoint_every": 1}, **tuned)
    run = Trainer(config, ALONE)
    run.train()
    folder = save_model(run)
    assert torch.equal(bias_of(folder), bias_of(start))
    changed, was = (load_file(one / "model.safetensors") for one in (folder, start))
    assert any(not torch.equal(changed[name], was[name]) for name in was)


def test_the_balancing_loss_is_refused(files: Files, start: Path, tmp_path: Path) -> None:
    config = config_of(files, start, tmp_path / "run", balance={"method": "loss"})
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM scores each expert by itself; use 'bias'"):
        Trainer(config, ALONE)


def test_a_bias_is_no_parameter_of_a_model_in_training(start: Path) -> None:
    model, _ = load(start)
    (router,) = routers(model).values()
    router.hold_bias()
    assert NAME not in dict(model.named_parameters())
    assert torch.equal(router.selection_bias, bias_of(start))  # type: ignore[arg-type]
