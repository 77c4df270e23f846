"""Weights that are packed while they are read stand for what packing whole matrices gives, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.engine.startup.packing import Packing
from strata.kernels.quant.packed import dense, pack
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import config_from_dict, read_config
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.save import save
from strata.models.weights import WeightStore, load, packed_bytes
from strata.parallel.serving_shard import RankShard
from tests.dummies import randomize
from tests.engine.ranks.layouts import CONFIG as MIXTURE
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.parallel.models import random_model
from tests.parallel.shards import shard_of

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
    model, packed = store.model, store.packed
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
    assert packed_bytes(own, torch.float32, packing.planned) == allocated


@torch.no_grad()
def test_dummy_weights_are_those_of_a_plain_model(folder: Path) -> None:
    twin, config = load(folder, dtype="bfloat16", load_format="dummy", seed=3)
    with torch.device("meta"):
        schemes = Packing.of("int4", build(config)).schemes
        shard = RankShard.of(config, 2, 1)
    options: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "seed": 3}
    store = WeightStore.load(folder, schemes, **options)
    model, packed = store.model, store.packed
    part = WeightStore.load(folder, schemes, part=shard, **options).packed
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


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "nvfp4"])
@torch.no_grad()
def test_parts_of_stacked_rows_have_the_scales_of_the_whole(scheme: str, tmp_path: Path) -> None:
    """Gates, channels and steps of a state space's heads, in ranges that blocks of 128 rows do not divide."""
    sizes = {"hidden_size": 96, "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_d_state": 20, "head_dim": 32}
    config = config_from_dict(RECURRENT_CONFIGS["granite-hybrid"] | sizes | {"shared_intermediate_size": 128})
    save(random_model(config, torch.float32), config, tmp_path)
    twin, config = load(tmp_path)
    with torch.device("meta"):
        schemes = Packing.of(scheme, build(config)).schemes
    assert "model.layers.0.mamba.in_proj.weight" in schemes
    for name in schemes:
        twin.get_parameter(name).copy_(by_matrix(twin.get_parameter(name), 1, scheme))
    for rank in (0, 1):
        check(tmp_path, scheme, *shard_of(twin, config, 2, rank)[::-1])


@pytest.mark.parametrize("scheme", ["fp8_block", "nvfp4"])
@torch.no_grad()
def test_experts_in_one_tensor_are_packed_each_by_itself(scheme: str, tmp_path: Path) -> None:
    """Of Granite: gate and up too, whose rows blocks do not divide; of ranks by width and by expert."""
    sizes = {"hidden_size": 32, "intermediate_size": 72, "num_local_experts": 6, "mamba_n_heads": 8, "head_dim": 8}
    config = config_from_dict(RECURRENT_CONFIGS["granite-hybrid-experts"] | sizes)
    save(random_model(config, torch.float32), config, tmp_path)
    twin, config = load(tmp_path)
    with torch.device("meta"):
        schemes = Packing.of(scheme, build(config)).schemes
    experts = {name for name in schemes if ".experts." in name}
    assert {name.rpartition(".")[2] for name in experts} == {"gate_up_proj", "down_proj"}
    for name in schemes:
        value = twin.get_parameter(name)
        value.copy_(by_matrix(value, 2 if name in experts and "gate_up" in name else 1, scheme))
    check(tmp_path, scheme, twin, None)
    check(tmp_path, scheme, *shard_of(twin, config, 2, 1)[::-1])
    check(tmp_path, scheme, *shard_of(twin, config, 2, 1, expert_parallel=True)[::-1])
    dummy, _ = load(tmp_path, load_format="dummy", seed=3)
    packed = WeightStore.load(tmp_path, schemes, load_format="dummy", seed=3).packed
    for name in experts:
        value = by_matrix(dummy.get_parameter(name), 2 if "gate_up" in name else 1, scheme)
        assert torch.equal(dense(packed[name]), value)
