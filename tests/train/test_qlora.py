"""Adapters beside packed weights against a plain twin, whose frozen weights are the floats that these stand for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strata.kernels.linear.linear import linear
from strata.kernels.quant.quantized import QuantizedWeight, dense, pack
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import config_from_dict, read_config
from strata.models.experts import SparseCausalLM
from strata.models.families import build
from strata.models.folder import BUILTIN_FOLDER
from strata.models.layers import CausalLM
from strata.models.quantized.calibrate.quantize import quantize
from strata.models.quantized.calibrate.settings import Rounding
from strata.models.save import save
from strata.models.weights import load
from strata.parallel.layout import Layout
from strata.train.adapters.frozen import planned_weights
from strata.train.adapters.lora import LoraConfig, add_lora, merge_lora
from strata.train.data.encoding import Encoded
from strata.train.data.pack import PackedBatch
from strata.train.data.pack import pack as pack_documents
from strata.train.finish import save_model
from strata.train.optimizer.config import OptimizerConfig
from strata.train.steps.make import Adapters, make_step, values_of
from strata.train.trainer import Trainer
from tests.dummies import randomize
from tests.engine.packing.test_quantized_checkpoints import written
from tests.models.checkpoints import FAMILY_CONFIGS
from tests.train.conftest import Tune, log
from tests.train.plain_losses import ALONE, frozen, loss_of_pack
from tests.train.predict.saved_bytes import saved_bytes
from tests.train.test_lora import filled

CPU = torch.device("cpu")
# Not all of what is packed, so that packed weights without adapters are among the rest.
LORA = LoraConfig(rank=3, alpha=6.0, projections=["q_proj", "gate_proj", "down_proj"])


def documents() -> PackedBatch:
    return pack_documents(Encoded(np.arange(12, dtype=np.int32), np.arange(12) % 5 != 0, np.array([0, 5, 12])))


def packed_of(model: CausalLM) -> dict[str, QuantizedWeight]:
    """What modules hold packed, by the names of the parameters that it stands for."""
    return {
        f"{place}.{name}": held
        for place, module in model.named_modules()
        for name, held in vars(module).items()
        if isinstance(held, QuantizedWeight)
    }


@torch.no_grad()
def twin_of(model: CausalLM, folder: Path) -> CausalLM:
    """The plain model of the folder, with the floats of what is packed."""
    twin, _ = load(folder, "cpu", torch.float32)
    for name, weight in packed_of(model).items():
        twin.get_parameter(name).copy_(dense(weight))
    return twin


@pytest.mark.parametrize("scheme", ["int4", "fp8", "mxfp4"])
def test_gradients_and_losses_are_those_of_the_floats(scheme: str, folder: Path) -> None:
    model = frozen(folder, scheme)
    packed = packed_of(model)
    assert len(packed) == 7 * 3
    assert "lm_head.weight" not in packed
    original = load(folder, "cpu", torch.float32)[0]
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(dense(packed[q_proj]), dense(pack(original.get_parameter(q_proj), SCHEMES[scheme])))
    twin = twin_of(model, folder)
    seen = []
    for one in (model, twin):
        adapters = filled(one, LORA)
        total = loss_of_pack(one, documents())
        total.backward()
        found = {name: weight.grad for name, weight in adapters.items()}
        assert all(parameter.grad is None for name, parameter in one.named_parameters() if name not in found)
        for weight in adapters.values():
            weight.grad = None
        step = make_step(
            read_config(folder),
            Layout(),
            Layout().mesh(ALONE),
            OptimizerConfig(learning_rate=1e-2),
            values_of(one),
            adapters=Adapters(LORA, packed=packed_of(one)),
        )
        losses = [step([documents()], 1e-2).loss.item() for _ in range(4)]
        assert losses[-1] < 0.9 * losses[0]
        seen.append((found, losses))
    for name, gradient in seen[0][0].items():
        assert gradient is not None
        assert gradient.abs().max() > 0, name
        assert torch.allclose(gradient, seen[1][0][name], rtol=1e-4, atol=1e-6), name
    assert seen[0][1] == pytest.approx(seen[1][1], rel=1e-5)


def test_nothing_is_kept_in_floats(folder: Path) -> None:
    model = frozen(folder, "int4")
    twin = twin_of(model, folder)
    sizes = {name: twin.get_parameter(name).nbytes for name in packed_of(model)}
    own = sum(one.nbytes for one in packed_of(model).values())
    assert own == sum(one.nbytes for one in planned_weights(folder, read_config(folder), "int4").values())
    # 4 bits a value instead of 32, and a scale for each row: 48, 80 or 96 columns, fewer than a group.
    assert own == sum(size // 8 + 4 * twin.get_parameter(name).shape[0] for name, size in sizes.items())
    left = {name for name, _ in model.named_parameters()}
    assert left == {name for name, _ in twin.named_parameters()} - sizes.keys()
    kept = []
    for one in (model, twin):
        filled(one, LORA)
        kept.append(saved_bytes(lambda one=one: loss_of_pack(one, documents()), one))
    assert kept[0] == kept[1]


def test_columns_in_an_order_of_their_own_and_biases_have_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = pack(torch.randn(6, 8, generator=generator), SCHEMES["int4"]._replace(columns=4))
    weight = weight._replace(order=torch.tensor([3, 1, 0, 2, 7, 6, 5, 4], dtype=torch.int32))
    x, bias, upstream = (torch.randn(*shape, generator=generator) for shape in ((5, 8), (6,), (5, 6)))
    found: list[list[Tensor]] = []
    for one in (weight, dense(weight)):
        leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
        result = linear(leaves[0], one, leaves[1])
        found.append([result, *torch.autograd.grad(result, leaves, upstream)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["glm4-moe-groups", "gpt-oss-yarn", "deepseek-v3-groups-yarn"])
def test_experts_and_latents_stay_packed(name: str, tmp_path: Path) -> None:
    config = config_from_dict(dict(FAMILY_CONFIGS)[name], name)
    model = build(config)
    randomize(model, 3)
    save(model, config, tmp_path)
    sparse = frozen(tmp_path, "int8")
    assert isinstance(sparse, SparseCausalLM)
    held = packed_of(sparse)
    assert any(name.endswith("experts.gate_up_proj") for name in held)
    assert not any(name.endswith(("mlp.gate.weight", "kv_b_proj.weight")) for name in held)
    lora, found = LoraConfig(rank=2, projections=["q_proj", "o_proj"]), []
    for one in (sparse, twin_of(sparse, tmp_path)):
        adapters = add_lora(one, lora, seed=4)
        total = loss_of_pack(one, documents())
        total.backward()
        found.append([weight.grad for name, weight in adapters.items() if "lora_B" in name])
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.abs().max() > 0
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["fp8-block", "awq", "gptq-ordered", "nvfp4"])
def test_folders_of_the_hubs_train_as_they_are(name: str, tmp_path: Path) -> None:
    twin = written(tmp_path, name)
    for part in twin.modules():
        part._forward_pre_hooks.clear()  # that round activations as serving does
    model, found = frozen(tmp_path, None), []
    assert len(packed_of(model)) == 7
    for one in (model, twin):
        adapters = filled(one, LORA)
        total = loss_of_pack(one, documents())
        total.backward()
        found.append([weight.grad for weight in adapters.values()])
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.abs().max() > 0
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


@pytest.fixture(scope="module")
def packed_builtin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as a checkpoint in 4 bits."""
    folder = tmp_path_factory.mktemp("packed") / "int4"
    quantize(BUILTIN_FOLDER, folder, Rounding.of("int4", "rtn", 64, ()), [], CPU)
    return folder


def test_a_packed_checkpoint_trains_and_leaves_floats(packed_builtin: Path, tune: Tune, tmp_path: Path) -> None:
    lora = {"rank": 2, "projections": ["q_proj"]}
    start, data = {"model": str(packed_builtin)}, {"tokens_per_pack": 300}
    run = Trainer(tune("style", run={"steps": 2}, start=start, data=data, lora=lora), ALONE)
    base = {name: dense(weight) for name, weight in packed_of(frozen(packed_builtin, None)).items()}
    assert len(base) == 7 * 5
    run.train()
    after = load_file(save_model(run) / "model.safetensors")
    adapter = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "run/model/config.json").read_text())
    for name, weight in base.items():
        expected = weight.bfloat16().float()  # what a GPU computes with
        if "q_proj" in name:
            a, b = (adapter[f"base_model.model.{name.replace('weight', f'lora_{one}.weight')}"] for one in "AB")
            expected = (expected + 8.0 * b @ a).bfloat16().float()
            assert not torch.equal(after[name], weight.bfloat16()), name
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name].float(), expected), name


def test_the_builtin_model_learns_beside_packed_weights(tune: Tune, tmp_path: Path) -> None:
    """And what it leaves has the plain ones, but for the adapters."""
    lora = {"rank": 4, "quantization": "int4", "projections": ["q_proj", "v_proj", "down_proj"]}
    rate = {"learning_rate": 1e-2, "weight_decay": 0.0}
    trainer = Trainer(
        tune("style", run={"steps": 6, "checkpoint_every": 6, "recompute": "mlp"}, lora=lora, optimizer=rate), ALONE
    )
    trainer.train()
    losses = [line["loss"] for line in log(tmp_path / "run")]
    assert losses[-1] < 0.6 * losses[0]
    after, before = load_file(save_model(trainer) / "model.safetensors"), load(BUILTIN_FOLDER)[0]
    untouched = [name for name in after if "k_proj" in name or "norm" in name]
    assert all(torch.equal(after[name], before.get_parameter(name)) for name in untouched)


def test_what_does_not_go_together_is_said_before_weights_are_read(
    packed_builtin: Path, tune: Tune, folder: Path
) -> None:
    packed = {"start": {"model": str(packed_builtin)}}
    with pytest.raises(ValueError, match=r"int4 .*holds packed weights \(compressed-tensors: int4 .*add a \[lora\] ta"):
        Trainer(tune("style", **packed), ALONE)
    with pytest.raises(ValueError, match=r"lora\.quantization = 'int8': the weights of .* are packed already .*leave"):
        Trainer(tune("style", **packed, lora={"quantization": "int8"}), ALONE)
    with pytest.raises(ValueError, match=r"run\.recompute = 'operations' is not for \[lora\].*'none' or 'mlp' or 'lay"):
        tune("style", run={"recompute": "operations"}, lora={"rank": 2})
    with pytest.raises(ValueError, match=r"quantization = 'nf4' is not known; accepted are 'fp8'"):
        tune("style", lora={"quantization": "nf4"})
    model = frozen(folder, "int4")
    add_lora(model, LORA, seed=0)
    with pytest.raises(ValueError, match="packed weights have no room for an adapter"):
        merge_lora(model)
