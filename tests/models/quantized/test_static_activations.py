"""Checkpoints with one scale for what a product multiplies (static): rounded as they ask for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from strata.engine.startup.packing import Packing
from strata.graph.bind import bind
from strata.graph.capture import capture
from strata.graph.cost import operation_counts
from strata.graph.fuse import fuse
from strata.graph.fuse_rounding import fuse_rounding
from strata.graph.merge import merge
from strata.graph.quantize import quantize, weights_of_products
from strata.kernels.quant.packed import PackedWeight, join, joinable, pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import config_from_dict
from strata.models.experts import stored_parameters
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.weights import WeightStore
from strata.parallel.serving_shard import RankShard
from tests.engine.ranks.layouts import CONFIG as MIXTURE
from tests.graph.tiny import LAYERS, Tiny
from tests.graph.tiny import packed as packed_tiny
from tests.models.batches import packed as packed_batch
from tests.models.batches import random_sequences

from .made import E4M3, LAYOUTS, make, read
from .test_formats import LLAMA

FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
CONFIG = LLAMA | {"num_hidden_layers": 2}
# Of the same rows: files have one scale for these, or the largest is taken.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and "head" not in name}


def calibrated(model: nn.Module, sequences: list[list[int]]) -> dict[str, Tensor]:
    """Of each product the scale by which the largest that it has read becomes the largest of e4m3."""
    largest: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = torch.maximum(largest.get(name, torch.tensor(0.0)), inputs[0].abs().max())

        return hook

    hooks = [one.register_forward_pre_hook(watch(name)) for name, one in linears(model).items()]
    for ids in sequences:
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return {name: value / 448 for name, value in largest.items()}


def write(folder: Path, twin: nn.Module, scales: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A static fp8 checkpoint of a twin, whose weights become what that stands for."""
    tensors = {name: value.clone() for name, value in twin.state_dict().items()}
    for name, linear in linears(twin).items():
        scale = linear.weight.abs().max() / 448
        values = (linear.weight / scale).to(E4M3)
        linear.weight.copy_(values.float() * scale)
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scale, f"{name}.input_scale": scales[name]}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))


def rounds(twin: nn.Module, scales: dict[str, Tensor]) -> None:
    def hook(scale: Tensor) -> Any:
        def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            return ((inputs[0] / scale).clamp(-448, 448).to(E4M3).float() * scale,)

        return rounded

    for name, linear in linears(twin).items():
        linear.register_forward_pre_hook(hook(scales[name]))


def loaded(folder: Path) -> tuple[CausalLM, dict[str, PackedWeight]]:
    config = config_from_dict(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        empty = build(config)
    schemes = Packing.of(None, empty, folder=folder).schemes
    store = WeightStore.load(folder, schemes, dtype="float32")
    model, weights = store.model, store.packed
    return model, weights


def logits_of(folder: Path, sequences: list[list[int]], **changes: Any) -> Tensor:
    model, weights = loaded(folder)
    weights = {name: weight._replace(**changes) for name, weight in weights.items()}
    graph = bind(fuse(merge(quantize(capture(model), weights))), "cpu")
    return model.head(graph(packed_batch(sequences)))


def twin_logits(twin: nn.Module, sequences: list[list[int]]) -> Tensor:
    return torch.cat([twin(torch.tensor([ids])).logits[0] for ids in sequences])


def made_twin(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    twin = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    for one in linears(twin).values():
        one.weight.mul_(8)  # so that layers, and the rounding of what they read, count beside the embedding
    return twin


@torch.no_grad()
def test_logits_are_those_of_a_twin_that_rounds_so(tmp_path: Path) -> None:
    """Transformers' Llama in float32 whose products read what the checkpoint says. A value on the edge between two of
    e4m3 may fall to the other side, so the mean is held; a scale for each row, which such files do not ask for, is
    another model."""
    twin = made_twin(0)
    sequences = random_sequences(CONFIG["vocab_size"], (33, 20, 9))
    scales = calibrated(twin, sequences)
    write(tmp_path, twin, scales, CONFIG)
    rounds(twin, scales)
    wanted = twin_logits(twin, sequences)
    error = (logits_of(tmp_path, sequences) - wanted).abs().mean()
    by_rows = (logits_of(tmp_path, sequences, input_scale=None) - wanted).abs().mean()
    assert error < 0.02 * by_rows, (error, by_rows)


@torch.no_grad()
def test_products_of_the_same_rows_have_the_largest_of_their_scales(tmp_path: Path) -> None:
    twin = made_twin(1)
    sequences = random_sequences(CONFIG["vocab_size"], (33, 9))
    scales = calibrated(twin, sequences)
    for number, name in enumerate(scales):
        scales[name] = scales[name] * (0.3 + 0.1 * (number % 7))
    write(tmp_path, twin, scales, CONFIG)
    for name in scales:
        owner, _, last = name.rpartition(".")
        group = next((group for group in TOGETHER if last in group), (last,))
        scales[name] = torch.stack([scales[f"{owner}.{one}"] for one in group]).max()
    rounds(twin, scales)
    wanted = twin_logits(twin, sequences)
    by_rows = (logits_of(tmp_path, sequences, input_scale=None) - wanted).abs().mean()
    assert (logits_of(tmp_path, sequences) - wanted).abs().mean() < 0.02 * by_rows


@torch.no_grad()
def test_experts_have_the_largest_of_all_on_every_rank(tmp_path: Path) -> None:
    values = MIXTURE | {"num_hidden_layers": 1, "mlp_only_layers": []}
    config = config_from_dict(values)
    with torch.device("meta"):
        complete = build(config)
        shards = [RankShard.of(config, 2, rank, expert_parallel=True) for rank in (0, 1)]
    tensors, largest = {}, {}
    for number, (name, parameter) in enumerate(stored_parameters(complete).items()):
        value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        if ".experts." not in name:
            tensors[name] = value
            continue
        scale, owner = torch.tensor(0.01 + 0.01 * (number % 5)), name.removesuffix(".weight")
        tensors |= {name: value.to(E4M3), f"{name}_scale": torch.tensor(1.0), f"{owner}.input_scale": scale}
        product = "down" if "down" in name else "gate_up"
        largest[product] = max(largest.get(product, 0.0), scale.item())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": FP8}))
    for part in (None, *shards):
        schemes = Packing.of(None, complete if part is None else part.build(), part, tmp_path).schemes
        found = WeightStore.load(tmp_path, schemes, part=part).packed
        scales = {name.rpartition(".")[2]: weight.input_scale for name, weight in found.items()}
        assert scales == {f"{product}_proj": scale for product, scale in largest.items()}


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (torch.tensor(0.0), r"a\.input_scale is 0; accepted is a scale"),
        (torch.tensor(-1.0), r"a\.input_scale is -1"),
        (torch.tensor(torch.nan), r"a\.input_scale holds a scale that is not a finite number"),
        (torch.ones(2), r"a\.input_scale is \[2\]"),
        (None, r"lacks a\.input_scale"),
    ],
)
def test_scales_that_are_none_are_refused_by_name(scale: Tensor | None, words: str, tmp_path: Path) -> None:
    layout = LAYOUTS["fp8"]
    stored, _ = make(layout, {"a": (40, 64)})
    del stored["a.input_scale"]
    with pytest.raises(ValueError, match=words):  # noqa: PT012
        format = read(tmp_path, layout.config, stored if scale is None else stored | {"a.input_scale": scale})
        assert format is not None
        format.read("a.weight", (0, 40), (0, 64))


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_rows_are_divided_cut_off_and_rounded(kind: str) -> None:
    """Values beyond the largest are that; a row with what is no finite number is seen as such."""
    x, scale = torch.randn(5, 300) * torch.tensor([1e-3, 0.1, 1.0, 30.0, 1000.0])[:, None], 0.02
    values, scales = round_rows.reference(x, kind, 0, scale)
    most = {"e4m3": 448, "int8": 127}[kind]
    wanted = (x * (1 / torch.tensor(scale))).clamp(-most, most)
    assert torch.equal(values.float(), wanted.to(E4M3).float() if kind == "e4m3" else wanted.round())
    assert torch.equal(scales, torch.full((5, 1), scale))
    assert values.float().abs().max() == most
    x[1, 3], x[2, 4] = torch.inf, torch.nan
    assert round_rows.reference(x, kind, 0, scale)[1].isnan().flatten().tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@torch.no_grad()
def test_rows_rounded_where_they_are_made_have_the_same_bits(scheme: str) -> None:
    model, batch = Tiny(), packed_tiny(5, 3)
    names = [name for name in weights_of_products([capture(model)]) if "layers" in name]
    weights = {name: pack(model.get_parameter(name), SCHEMES[scheme]) for name in names}
    weights = {
        name: one._replace(input_scale=0.01 + 0.002 * place) for place, (name, one) in enumerate(weights.items())
    }
    wanted, graph = (fuse(merge(quantize(capture(model), weights))) for _ in range(2))
    fuse_rounding(graph, torch.float32, lambda weight: bool(weight.activations))
    assert operation_counts(graph)["rounded_linear"] == 3 * LAYERS
    assert torch.equal(bind(graph, "reference")(batch), bind(wanted, "reference")(batch))


def test_what_is_joined_has_the_largest_scale() -> None:
    one, other = (pack(torch.randn(16, 32), SCHEMES["fp8"])._replace(input_scale=scale) for scale in (0.5, 0.25))
    assert join([one, other]).input_scale == join([other, one]).input_scale == 0.5
    assert not joinable(one, other._replace(input_scale=None))
