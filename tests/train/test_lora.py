"""LoRA against a plain twin: values, gradients, merging, PEFT's files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strata.files.toml_tables import read_table
from strata.hardware.specs import device
from strata.models.batch import Batch
from strata.models.config import config_from_dict, read_config
from strata.models.folder import BUILTIN_FOLDER
from strata.models.layers import CausalLM, Linear
from strata.models.weights import load
from strata.parallel.layout import Layout
from strata.plan.training.task import TrainingTask
from strata.train.adapters.lora import (
    PROJECTIONS,
    LoraConfig,
    adapters_of,
    add_lora,
    load_adapter,
    merge_lora,
    save_adapter,
)
from strata.train.config import TrainConfig
from strata.train.data.encoding import Encoded
from strata.train.data.pack import pack
from strata.train.optimizer.config import OptimizerConfig
from strata.train.start import starting_point
from strata.train.steps.make import Adapters, make_step, stored
from tests.models.checkpoints import FAMILY_CONFIGS
from tests.train.conftest import SMALL
from tests.train.plain_losses import ALONE, loss_of_pack
from tests.train.predict.saved_bytes import saved_bytes

CONFIG = LoraConfig(rank=3, alpha=6.0, projections=["q_proj", "down_proj"])


def batch() -> Batch:
    tokens = torch.randint(0, 300, (12,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], dtype=torch.int32)
    return Batch(tokens, positions, torch.tensor([0, 5, 12], dtype=torch.int32), 7)


@pytest.fixture
def model(folder: Path) -> CausalLM:
    return load(folder, "cpu", torch.float32)[0]


def filled(model: CausalLM, config: LoraConfig = CONFIG) -> dict[str, nn.Parameter]:
    """Adapters with values, as after some training."""
    adapters = add_lora(model, config, seed=4)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in adapters.values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return adapters


def test_the_model_computes_the_same_at_first(model: CausalLM) -> None:
    before = model(batch())
    adapters = add_lora(model, CONFIG, seed=4)
    assert torch.equal(model(batch()), before)
    assert len(adapters) == 2 * 2 * 3  # A and B of two projections in three layers
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable == set(adapters)


def test_gradients_equal_those_through_a_full_weight(model: CausalLM) -> None:
    """A twin without adapters whose weights are W + s B A, built by autograd from copies of A and B."""
    plain = copy.deepcopy(model).requires_grad_(False)
    adapters = filled(model)
    goal = torch.randn(12, 48, generator=torch.Generator().manual_seed(3))
    (model(batch()) * goal).sum().backward()
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in adapters.items()}
    weights: dict[str, Tensor] = {}
    for name, a in leaves.items():
        if name.endswith("lora_A.weight"):
            base = name.removesuffix("lora_A.weight") + "weight"
            weights[base] = plain.get_parameter(base) + 2.0 * leaves[name.replace("lora_A", "lora_B")] @ a
    (torch.func.functional_call(plain, weights, (batch(),)) * goal).sum().backward()
    for name, weight in adapters.items():
        assert weight.grad is not None
        assert leaves[name].grad.abs().max() > 0, name
        assert torch.allclose(weight.grad, leaves[name].grad, rtol=1e-3, atol=1e-4), name
    assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)


def test_training_changes_adapters_alone(folder: Path) -> None:
    """And keeps state of them alone: beside the folder's weights they compute what the step does."""
    layout, optimizer = Layout(), OptimizerConfig(learning_rate=1e-2)
    step = make_step(
        read_config(folder), layout, layout.mesh(ALONE), optimizer, stored(folder), adapters=Adapters(CONFIG)
    )
    before = {piece.name: piece.tensor.clone() for piece in step.state_shards() if piece.kind == "master"}
    documents = pack(Encoded(np.arange(12, dtype=np.int32), np.arange(12) % 5 != 0, np.array([0, 5, 12])))
    for _ in range(2):  # of A there is a gradient once B is not zero
        step([documents], 1e-2)
    held = step.state_shards()
    assert all(not torch.equal(piece.tensor, before[piece.name]) for piece in held if piece.kind == "master")
    assert sorted((one.kind, one.name) for one in held) == sorted(
        (kind, name) for kind in ("master", "exp_avg", "exp_avg_sq") for name in before
    )
    model = load(folder, "cpu", torch.float32)[0]
    adapters = add_lora(model, CONFIG, seed=0)
    assert adapters.keys() == before.keys()
    with torch.no_grad():
        for piece in held:
            if piece.kind == "master":
                adapters[piece.name].copy_(piece.tensor.view(piece.shape))
    wanted = loss_of_pack(model, documents).item() / len(documents.targets)
    assert step.measured([documents])["loss"].item() == pytest.approx(wanted, rel=1e-6)


def test_merged_weights_compute_the_same_under_the_old_names(model: CausalLM) -> None:
    names = [name for name, _ in model.named_parameters()]
    filled(model)
    with_adapters = model(batch()).detach()
    merge_lora(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model.model.layers[0].self_attn.q_proj) is Linear
    assert torch.allclose(model(batch()), with_adapters, rtol=1e-4, atol=1e-5)


def test_bfloat16_base_keeps_float32_adapters(model: CausalLM) -> None:
    adapters = filled(model.to(torch.bfloat16))
    assert {weight.dtype for weight in adapters.values()} == {torch.float32}
    hidden = model(batch())
    assert hidden.dtype == torch.bfloat16
    hidden.float().sum().backward()
    assert all(weight.grad is not None for weight in adapters.values())


def test_files_are_peft_s_and_load_again(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    filled(model)
    save_adapter(adapters_of(model), CONFIG, str(folder), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert tensors[first].shape == (3, 48)
    assert tensors[first.replace("lora_A", "lora_B")].shape == (96, 3)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 3, 6.0)
    other, _ = load(folder, "cpu", torch.float32)
    load_adapter(other, tmp_path)
    assert torch.equal(other(batch()), model(batch()))


def test_peft_loads_the_files(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    filled(model)
    save_adapter(adapters_of(model), CONFIG, str(folder), tmp_path)
    theirs = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), tmp_path)
    tokens = batch().tokens[None, :5].long()
    logits = theirs(tokens).logits[0]
    assert torch.allclose(model.head(model(batch()))[:5], logits, rtol=1e-3, atol=1e-4)


def test_adapters_that_do_not_fit_are_refused(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    filled(model)
    save_adapter(adapters_of(model), CONFIG, str(folder), tmp_path)

    def fresh() -> CausalLM:
        return load(folder, "cpu", torch.float32)[0]

    settings = tmp_path / "adapter_config.json"
    text = settings.read_text()
    settings.write_text(json.dumps(json.loads(text) | {"use_dora": True}))
    with pytest.raises(ValueError, match="use_dora = True is not supported"):
        load_adapter(fresh(), tmp_path)
    settings.write_text(text)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="is an adapter of another model"):
        load_adapter(fresh(), tmp_path)
    with pytest.raises(ValueError, match="holds no LoRA adapter"):
        load_adapter(fresh(), tmp_path / "none")


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match=r"'embed' is unknown; accepted are q_proj"):
        LoraConfig(projections=["embed"])
    with pytest.raises(ValueError, match="must be positive"):
        LoraConfig(rank=0)
    assert LoraConfig().projections == list(PROJECTIONS)


def test_adapters_beside_each_other_keep_their_input_once(model: CausalLM) -> None:
    """As it is, in bfloat16; of each adapter besides, what lies between its two matrices, in float32."""
    kept = {}
    for names in (["q_proj"], ["q_proj", "k_proj", "v_proj"]):
        other = copy.deepcopy(model).to(torch.bfloat16)
        add_lora(other, LoraConfig(rank=3, projections=names), seed=4)
        kept[len(names)] = saved_bytes(lambda other=other: other(batch()), other)
    assert kept[3] - kept[1] == 3 * 2 * 12 * 3 * 4  # layers, adapters more, tokens, rank, bytes


def test_neither_a_plan_nor_adapters_nor_preferences_train_a_head_with_a_softcap(tmp_path: Path) -> None:
    said = "final_logit_softcapping = 3.0"
    values = dict(FAMILY_CONFIGS)["gemma3-softcap-untied-biases"]
    with pytest.raises(ValueError, match=said):
        TrainingTask(config_from_dict(values, "model"), device("h200"), 1, 64, 64)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer.json").symlink_to(BUILTIN_FOLDER / "tokenizer.json")
    table = {name: value for name, value in SMALL.items() if name != "model"}
    table |= {"start": {"model": str(tmp_path)}, "data": SMALL["data"] | {"sources": [{"folder": "text"}]}}
    for tuned in ({}, {"lora": {"rank": 2, "alpha": 4.0}}, {"dpo": {}}):
        data: Any = [SimpleNamespace(index=SimpleNamespace(kind="text"))]
        with pytest.raises(ValueError, match=said):
            starting_point(read_table(TrainConfig, table | tuned), data)
