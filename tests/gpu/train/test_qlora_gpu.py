"""Adapters beside packed weights on CUDA: layers as wide as those of 8B against a twin with the floats of these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from strata.kernels.quant.dequantize import floats
from strata.kernels.quant.quantized import QuantizedWeight, dense, pack
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.save import save
from strata.models.shapes import SHAPES
from strata.models.weights import load
from strata.train.adapters.frozen import planned_weights
from strata.train.adapters.lora import LoraConfig, add_lora
from strata.train.data.encoding import Encoded
from strata.train.data.pack import pack as pack_documents
from tests.dummies import randomize
from tests.train.plain_losses import frozen, loss_of_pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
CONFIG = config_from_dict(SHAPES["8B"] | {"num_hidden_layers": 2, "vocab_size": 2048}, "8B")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.device(CUDA):
        model = build(CONFIG).bfloat16()
    randomize(model, 1)
    folder = tmp_path_factory.mktemp("wide") / "model"
    save(model, CONFIG, folder)
    return folder


def gradients(model: CausalLM, tokens: int) -> tuple[Tensor, dict[str, Tensor], int]:
    """The loss of two documents, the gradients of all adapters, and the bytes at the fullest moment of the pass beyond
    what lay there before."""
    ids = np.arange(tokens, dtype=np.int32) * 37 % CONFIG.vocab_size
    offsets = np.array([0, tokens // 3, tokens])
    packed = pack_documents(Encoded(ids, ~np.isin(np.arange(tokens), offsets), offsets))
    adapters = add_lora(model, LoraConfig(rank=8), seed=4)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in adapters.values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = loss_of_pack(model, packed)
    total.backward()
    fullest = torch.cuda.max_memory_allocated() - before
    found = {name: weight.grad for name, weight in adapters.items() if weight.grad is not None}
    assert found.keys() == adapters.keys()
    return total.detach(), found, fullest


def packed_of(model: CausalLM) -> dict[str, QuantizedWeight]:
    return {
        f"{place}.{name}": held
        for place, module in model.named_modules()
        for name, held in vars(module).items()
        if isinstance(held, QuantizedWeight)
    }


# Few rows have a kernel that reads packed values, many are multiplied by floats of the weight.
@pytest.mark.parametrize(("scheme", "tokens"), [("int4", 48), ("int4", 1536), ("fp8", 1536), ("nvfp4", 1536)])
def test_gradients_are_those_of_the_floats(scheme: str, tokens: int, folder: Path) -> None:
    config: ModelConfig = CONFIG
    before = torch.cuda.memory_allocated()
    model = frozen(folder, scheme, CUDA, torch.bfloat16)
    held = torch.cuda.memory_allocated() - before
    packed, planned = packed_of(model), planned_weights(folder, config, scheme)
    assert packed.keys() == planned.keys()
    plain = sum(parameter.nbytes for parameter in model.parameters()) + sum(one.nbytes for one in model.buffers())
    ours = sum(one.nbytes for one in planned.values())
    assert ours == sum(one.nbytes for one in packed.values())
    assert held <= 1.01 * (plain + ours) + 2**20
    loss, found, fullest = gradients(model, tokens)
    whole = sum(2 * weight.shape.numel() for weight in packed.values())
    of_twins = []
    for dtype in (torch.bfloat16, torch.float32):
        twin, _ = load(folder, CUDA, dtype)
        with torch.no_grad():
            for name, weight in packed.items():
                twin.get_parameter(name).copy_(dense(weight, dtype))
        of_twins.append(gradients(twin, tokens))
        del twin
    (_, of_floats, of_twin), (wanted, exact, _) = of_twins
    assert abs(loss - wanted) <= 2e-3 * wanted
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        error, floats_error = ((one - exact[name]).norm() for one in (gradient, of_floats[name]))
        assert error <= 1.3 * floats_error + 2e-3 * exact[name].norm(), name
    # A weight in floats at a time on top of what the twin needs, and the library's workspace, which stays.
    allowed = 1.05 * 2 * config.hidden_size * config.intermediate_size + 96 * 2**20
    print(
        f"{scheme}: {ours / 2**20:.0f} MiB packed, {whole / 2**20:.0f} in bfloat16; pass {fullest / 2**20:.0f} MiB, "
        f"of the twin {of_twin / 2**20:.0f}"
    )
    assert fullest <= of_twin + allowed
    assert fullest + ours < of_twin + whole


def test_floats_of_stacked_weights_and_of_columns_in_an_order() -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    drawn = torch.randn(5, 96, 256, generator=generator, device=CUDA)
    for name in ("fp8", "int8", "int4", "mxfp4", "nvfp4"):
        weight = pack(drawn, SCHEMES[name])
        assert torch.equal(floats(weight, torch.bfloat16), dense(weight, torch.bfloat16)), name
    order = torch.randperm(256, generator=generator, device=CUDA).int()
    weight = pack(drawn[0], SCHEMES["int4"])._replace(order=order)
    assert torch.equal(floats(weight, torch.bfloat16), dense(weight, torch.bfloat16))
