"""Checkpoints with one scale for what a product multiplies are rounded as they ask; packed weights in parts."""

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
from strata.graph.fuse import fuse
from strata.graph.fuse_rounding import fuse_rounding
from strata.graph.merge import merge
from strata.graph.quantize import quantize, weights_of_products
from strata.graph.trace import trace
from strata.graph.walk import operation_counts
from strata.kernels.quant.quantized import QuantizedWeight, dense, join, joinable, pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import config_from_dict, read_config
from strata.models.experts import stored_parameters
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.save import save
from strata.models.weights import WeightStore, load, quantized_bytes
from strata.parallel.serving_shard import RankShard
from tests.dummies import randomize
from tests.engine.ranks.layouts import CONFIG as MIXTURE
from tests.graph.tiny import LAYERS, Tiny
from tests.graph.tiny import packed as packed_tiny
from tests.models.batches import packed as packed_batch
from tests.models.batches import random_sequences
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.parallel.models import random_model
from tests.parallel.shards import shard_of

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


def loaded(folder: Path) -> tuple[CausalLM, dict[str, QuantizedWeight]]:
    config = config_from_dict(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        empty = build(config)
    schemes = Packing.of(None, empty, folder=folder).schemes
    store = WeightStore.load(folder, schemes, dtype="float32")
    return store.model, store.quantized


def logits_of(folder: Path, sequences: list[list[int]], **changes: Any) -> Tensor:
    model, weights = loaded(folder)
    weights = {name: weight._replace(**changes) for name, weight in weights.items()}
    graph = bind(fuse(merge(quantize(trace(model), weights))), "cpu")
    return model.head(graph(packed_batch(sequences)))


def made_twin(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    twin = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    for one in linears(twin).values():
        one.weight.mul_(8)  # so that layers, and the rounding of what they read, count beside the embedding
    return twin


@pytest.mark.parametrize("apart", [False, True])
@torch.no_grad()
def test_logits_are_those_of_a_twin_that_rounds_so(apart: bool, tmp_path: Path) -> None:
    """Transformers' Llama in float32 whose products read what the checkpoint says. A value on the edge between two of
    e4m3 may fall to the other side, so the mean is held; a scale for each row, which such files do not ask for, is
    another model. apart: products of the same rows have scales of their own in the file, of which the largest counts.
    """
    twin = made_twin(int(apart))
    sequences = random_sequences(CONFIG["vocab_size"], (33, 20, 9))
    scales = calibrated(twin, sequences)
    if apart:
        scales = {name: scale * (0.3 + 0.1 * (number % 7)) for number, (name, scale) in enumerate(scales.items())}
    write(tmp_path, twin, scales, CONFIG)
    for name in scales:
        owner, _, last = name.rpartition(".")
        group = next((group for group in TOGETHER if last in group), (last,))
        scales[name] = torch.stack([scales[f"{owner}.{one}"] for one in group]).max()
    rounds(twin, scales)
    wanted = torch.cat([twin(torch.tensor([ids])).logits[0] for ids in sequences])
    error = (logits_of(tmp_path, sequences) - wanted).abs().mean()
    by_rows = (logits_of(tmp_path, sequences, input_scale=None) - wanted).abs().mean()
    assert error < 0.02 * by_rows, (error, by_rows)


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
        found = WeightStore.load(tmp_path, schemes, part=part).quantized
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
    names = [name for name in weights_of_products([trace(model)]) if "layers" in name]
    weights = {name: pack(model.get_parameter(name), SCHEMES[scheme]) for name in names}
    weights = {
        name: one._replace(input_scale=0.01 + 0.002 * place) for place, (name, one) in enumerate(weights.items())
    }
    wanted, graph = (fuse(merge(quantize(trace(model), weights))) for _ in range(2))
    fuse_rounding(graph, torch.float32, lambda weight: bool(weight.activations))
    assert operation_counts(graph)["quantized_linear"] == 3 * LAYERS
    assert torch.equal(bind(graph, "reference")(batch), bind(wanted, "reference")(batch))


def test_what_is_joined_has_the_largest_scale() -> None:
    one, other = (pack(torch.randn(16, 32), SCHEMES["fp8"])._replace(input_scale=scale) for scale in (0.5, 0.25))
    assert join([one, other]).input_scale == join([other, one]).input_scale == 0.5
    assert not joinable(one, other._replace(input_scale=None))


# Wider than a block of 128; ranks divide it off its grid.
SIZES = {"hidden_size": 136, "intermediate_size": 280, "moe_intermediate_size": 144, "num_experts": 3}
ONE_LAYER = SIZES | {"num_hidden_layers": 1, "vocab_size": 67, "tie_word_embeddings": True}
CONFIGS: dict[str, dict[str, Any]] = {"dense": {"mlp_only_layers": [0]}, "mixture": {}}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param) / "model"
    values = MIXTURE | ONE_LAYER | CONFIGS[request.param]
    config = config_from_dict(values, request.param)
    model = build(config)
    randomize(model, 0)
    save(model, config, path)
    return path


def by_matrix(weight: Tensor, parts: int, scheme: str) -> Tensor:
    """What a parameter stands for of which each matrix is packed by itself."""
    if weight.dim() == 3:
        return torch.stack([by_matrix(one, parts, scheme) for one in weight])
    return torch.cat([dense(pack(one, SCHEMES[scheme])) for one in weight.chunk(parts)])


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_parts_of_packed_weights_stand_for_one_model(folder: Path, scheme: str) -> None:
    twin, config = load(folder)
    with torch.device("meta"):
        empty = build(config)
    packing = Packing.of(scheme, empty)
    parameters = dict(twin.named_parameters())
    left = {name for name, parameter in parameters.items() if parameter.dim() > 1 and name not in packing.schemes}
    assert left == {"model.embed_tokens.weight", *(name for name in parameters if name.endswith("mlp.gate.weight"))}
    for name in packing.schemes:
        parameter = parameters[name]
        parameter.copy_(by_matrix(parameter, 2 if "gate_up" in name else 1, scheme))
    check(folder, scheme, twin, None)
    for rank in (0, 1):
        check(folder, scheme, *shard_of(twin, config, 2, rank)[::-1])
    if config.experts is not None and any(config.experts.layers):
        check(folder, scheme, *shard_of(twin, config, 2, 1, expert_parallel=True)[::-1])


def check(folder: Path, scheme: str, wanted: CausalLM, shard: RankShard | None) -> None:
    """wanted: the model, or the part of it, in floats."""
    config = read_config(folder)
    with torch.device("meta"):
        own = build(config) if shard is None else shard.build()
    packing = Packing.of(scheme, own, shard)
    store = WeightStore.load(folder, packing.schemes, part=shard)
    model, packed = store.model, store.quantized
    for name, parameter in wanted.named_parameters():
        if name not in packed:
            assert torch.equal(model.get_parameter(name), parameter), name
            continue
        assert model.get_parameter(name).is_meta
        assert torch.equal(dense(packed[name]), parameter), name
        planned = packing.planned[name]
        assert planned.scheme == packed[name].scheme
        shapes, held = (
            {field: (one.shape, one.dtype) for field, one in weight.tensors.items()}
            for weight in (planned, packed[name])
        )
        assert shapes == held
    allocated = sum(one.nbytes for one in model.parameters() if not one.is_meta)
    allocated += sum(one.nbytes for one in model.buffers()) + sum(one.nbytes for one in packed.values())
    assert quantized_bytes(own, torch.float32, packing.planned) == allocated


@torch.no_grad()
def test_dummy_weights_are_those_of_a_plain_model(folder: Path) -> None:
    twin, config = load(folder, dtype="bfloat16", load_format="dummy", seed=3)
    with torch.device("meta"):
        schemes = Packing.of("int4", build(config)).schemes
        shard = RankShard.of(config, 2, 1)
    options: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "seed": 3}
    store = WeightStore.load(folder, schemes, **options)
    model, packed = store.model, store.quantized
    part = WeightStore.load(folder, schemes, part=shard, **options).quantized
    assert torch.equal(
        model.get_parameter("model.embed_tokens.weight"), twin.get_parameter("model.embed_tokens.weight")
    )
    for name, weight in packed.items():
        wanted = by_matrix(twin.get_parameter(name), 2 if "gate_up" in name else 1, "int4")
        assert torch.equal(dense(weight), wanted), name
    o_proj = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(dense(part[o_proj]), dense(packed[o_proj]).chunk(2, 1)[1])


def test_what_a_scheme_cannot_pack_is_named_before_anything_is_read() -> None:
    values = MIXTURE | ONE_LAYER | {"intermediate_size": 93, "mlp_only_layers": [0]}
    with torch.device("meta"):
        model = build(config_from_dict(values, "odd"))
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight cannot be packed: int4 packs two columns in a byte"):
        Packing.of("int4", model)
    with pytest.raises(ValueError, match=r"quantization = 'fp7' is not known; accepted are 'fp8'"):
        Packing.of("fp7", model)


# Gates, channels and steps of a state space's heads, in ranges that blocks of 128 rows do not divide.
_STACKED = {"hidden_size": 96, "shared_intermediate_size": 128, "head_dim": 32}
_STACKED |= {"mamba_n_heads": 12, "mamba_d_head": 16, "mamba_d_state": 20}
# Experts of Granite in one tensor are packed each by itself, gate and up too, whose rows blocks do not divide.
_EXPERTS = {"hidden_size": 32, "intermediate_size": 72, "num_local_experts": 6, "mamba_n_heads": 8, "head_dim": 8}


@pytest.mark.parametrize(
    ("name", "sizes", "scheme"),
    [
        *(("granite-hybrid", _STACKED, one) for one in ("fp8", "fp8_block", "nvfp4")),
        *(("granite-hybrid-experts", _EXPERTS, one) for one in ("fp8_block", "nvfp4")),
    ],
)
@torch.no_grad()
def test_parts_of_recurrent_models_have_the_scales_of_the_whole(
    name: str, sizes: dict[str, Any], scheme: str, tmp_path: Path
) -> None:
    config = config_from_dict(RECURRENT_CONFIGS[name] | sizes)
    save(random_model(config, torch.float32), config, tmp_path)
    twin, config = load(tmp_path)
    with torch.device("meta"):
        schemes = Packing.of(scheme, build(config)).schemes
    experts = {one for one in schemes if ".experts." in one}
    assert "model.layers.0.mamba.in_proj.weight" in schemes
    assert {one.rpartition(".")[2] for one in experts} == ({"gate_up_proj", "down_proj"} if config.experts else set())

    def packed_apart(model: CausalLM, one: str) -> Tensor:
        return by_matrix(model.get_parameter(one), 2 if one in experts and "gate_up" in one else 1, scheme)

    for one in schemes:
        twin.get_parameter(one).copy_(packed_apart(twin, one))
    check(tmp_path, scheme, twin, None)
    for rank in (0, 1):
        check(tmp_path, scheme, *shard_of(twin, config, 2, rank)[::-1])
    if config.experts is not None:
        check(tmp_path, scheme, *shard_of(twin, config, 2, 1, expert_parallel=True)[::-1])
    dummy, _ = load(tmp_path, load_format="dummy", seed=3)
    packed = WeightStore.load(tmp_path, schemes, load_format="dummy", seed=3).quantized
    assert all(torch.equal(dense(packed[one]), packed_apart(dummy, one)) for one in experts)
