"""Memory of adapters beside frozen weights by hand count, against what models hold and autograd keeps."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.cli.train_estimate import estimate_text
from strata.files.toml_tables import read_table
from strata.kernels.quant.quantized import QuantizedWeight
from strata.models.config import read_config
from strata.models.layers import CausalLM
from strata.models.shapes import SHAPES
from strata.models.weights import load
from strata.parallel.layout import Layout
from strata.train.adapters.lora import PROJECTIONS, LoraConfig, add_lora
from strata.train.config import TrainConfig
from strata.train.data.encoding import Encoded
from strata.train.data.pack import PackedBatch, pack
from strata.train.dpo import DpoConfig
from strata.train.predict.adapters import AdapterMemory, AdapterStep
from strata.train.recompute import recompute_modules
from tests.train.plain_losses import frozen, loss_of_pack

from .saved_bytes import saved_bytes

CPU = torch.device("cpu")
# Of 8B: elements of the layers' matrices, and the bytes of what else there is, with the rotary table.
MATRICES = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
OTHERS = 2 * (2 * 128256 * 4096 + 65 * 4096) + 4 * 131072 * 128


def run(model: Path, tokens: int = 8192, recompute: str = "auto", **lora: Any) -> TrainConfig:
    table = {
        "run": {"out": "runs/x", "steps": 10, "recompute": recompute},
        "start": {"model": str(model)},
        "data": {"sources": [{"folder": "runs/none"}], "tokens_per_pack": tokens},
        "optimizer": {"learning_rate": 1e-4},
        "schedule": {"warmup": 1, "decay": 1},
        "lora": {name: value for name, value in lora.items() if value is not None},
    }
    return read_table(TrainConfig, table)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of 8B; an estimate needs no weights."""
    folder = tmp_path_factory.mktemp("8b")
    (folder / "config.json").write_text(json.dumps(SHAPES["8B"]))
    return folder


def memory_of(folder: Path, recompute: str, **lora: Any) -> AdapterMemory:
    return AdapterStep.of(run(folder, **lora), read_config(folder), Layout()).memory(recompute)


def test_memory_of_8b_by_hand(wide: Path) -> None:
    plain, packed = (memory_of(wide, "none", rank=16, quantization=scheme) for scheme in (None, "int4"))
    assert plain.frozen == 2 * MATRICES + OTHERS
    assert packed.frozen == MATRICES // 2 + 4 * MATRICES // 128 + OTHERS
    elements = 32 * 16 * (4 * 4096 + 4096 + 1024 + 4096 + 1024 + 3 * (4096 + 14336))
    assert packed.adapters == plain.adapters == 16 * elements
    # Of a token in a layer, as if all were trained: two residuals and what norms make of them, q k v, attention's
    # result with 32 float32, gate, up and what they become; and seven times 16 float32.
    layer = 2 * (4 * 4096 + 6144 + 4096 + 3 * 14336) + 4 * 32
    assert packed.activations == 32 * 8192 * (layer + 7 * 16 * 4)
    most = memory_of(wide, "layers", rank=16, quantization="int4")
    assert most.activations == 32 * 8192 * 2 * 4096 + 8192 * 7 * 16 * 4
    # A layer once more, the gradient of gate or up in float32 twice, and its weight in bfloat16.
    assert most.workspace == 8192 * (layer - 2 * 4096) + 2 * 4 * 8192 * 14336 + 2 * 4096 * 14336


def test_a_loss_of_pairs_keeps_its_logits_in_floats(wide: Path) -> None:
    plain = run(wide, tokens=64, rank=16)
    found = [
        AdapterStep.of(one, read_config(wide), Layout()).memory("none").workspace
        for one in (plain, replace(plain, dpo=DpoConfig()))
    ]
    assert found == [2 * 64 * 128256, 6 * 64 * 128256]


def test_frozen_memory_of_ranks_by_hand(wide: Path) -> None:
    found = {}
    for scheme in (None, "int4"):
        for layout in (Layout(tp=2), Layout(pp=2, micro_batches=2), Layout(shard=4, zero=3), Layout(shard=4, zero=2)):
            step = AdapterStep.of(run(wide, rank=16, quantization=scheme), read_config(wide), layout)
            found[scheme, layout.tp, layout.pp, layout.zero] = step.memory("none").frozen
    packed = MATRICES // 2 + 4 * MATRICES // 128
    assert found[None, 1, 1, 2] == 2 * MATRICES + OTHERS
    assert found[None, 1, 1, 3] == pytest.approx((2 * MATRICES + OTHERS) / 4, rel=1e-6)
    assert found["int4", 1, 1, 3] == pytest.approx(packed + OTHERS / 4, rel=1e-6)
    assert found[None, 2, 1, 0] == pytest.approx((2 * MATRICES + OTHERS) / 2, rel=1e-3)
    # The first stage has 17 of 32 layers, the second the head.
    assert found["int4", 1, 2, 0] == pytest.approx(17 / 32 * packed + OTHERS / 2, rel=0.03)


def test_what_is_chosen_and_said(wide: Path) -> None:
    step = AdapterStep.of(run(wide, rank=16, quantization="int4"), read_config(wide), Layout())
    assert [step.choose_recompute(gib * 2**30) for gib in (48, 24, 12, 1)] == ["none", "mlp", "layers", "layers"]
    text = estimate_text(run(wide, rank=16, quantization="int4"), "h200", 1)
    assert "adapters of rank 16 beside 224 packed weights of 3.45 GiB" in text
    assert "* recompute none: " in text
    assert "usable" not in text
    huge = estimate_text(run(wide, tokens=2**20, recompute="mlp", rank=16), "h200", 2)
    assert "dp 2 (documents are divided)" in huge
    assert "* recompute mlp: " in huge
    assert "more than is usable: lower data.tokens_per_pack" in huge


@pytest.mark.parametrize("scheme", [None, "int4", "fp8_block"])
def test_frozen_bytes_are_what_a_model_holds(scheme: str | None, folder: Path) -> None:
    config = read_config(folder)
    model = frozen(folder, scheme, dtype=torch.bfloat16)
    tensors = [*model.parameters(), *model.buffers()]
    packed = [one for part in model.modules() for one in vars(part).values() if isinstance(one, QuantizedWeight)]
    held = sum(one.nbytes for one in tensors) + sum(one.nbytes for one in packed)
    step = AdapterStep.of(run(folder, tokens=64, quantization=scheme), config, Layout())
    assert step.memory("none").frozen == held


def documents() -> PackedBatch:
    return pack(Encoded(np.arange(12, dtype=np.int32), np.arange(12) % 5 != 0, np.array([0, 5, 12])))


def test_adapters_keep_no_more_than_training_all_weights_and_their_inner_rows(folder: Path) -> None:
    model = load(folder, "cpu", torch.bfloat16)[0]
    batch, *_ = documents().to(CPU)
    whole = saved_bytes(lambda: model(batch), model)
    add_lora(model, LoraConfig(rank=3), seed=0)
    kept = saved_bytes(lambda: model(batch), model)
    assert kept <= whole + 12 * 3 * 4 * len(PROJECTIONS) * 3


@pytest.mark.parametrize("recompute", ["mlp", "layers"])
def test_recomputation_keeps_less_and_changes_no_bit(recompute: str, folder: Path) -> None:
    model = frozen(folder, "int4")
    adapters = add_lora(model, LoraConfig(rank=3), seed=0)
    with torch.no_grad():
        for weight in adapters.values():
            weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))

    def step(of: CausalLM) -> tuple[int, dict[str, torch.Tensor]]:
        kept = saved_bytes(lambda: loss_of_pack(of, documents()), of)
        loss_of_pack(of, documents()).backward()
        found = {name: weight.grad for name, weight in of.named_parameters() if weight.grad is not None}
        return kept, found

    again = copy.deepcopy(model)
    recompute_modules(again, recompute)
    (kept, wanted), (less, found) = step(model), step(again)
    assert less < 0.8 * kept
    assert found.keys() == wanted.keys() == adapters.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
