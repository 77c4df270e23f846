"""Engines serve packed checkpoints of the hubs, and weights of which two in four are zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.startup.packing import Packing
from strata.kernels.op import Implementation
from strata.kernels.quant.quantized import dense
from strata.kernels.quant.two_of_four import is_two_of_four
from strata.models.config import config_from_dict
from strata.models.experts import stored_parameters, stored_views
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.pruned.prune import prune
from strata.models.pruned.settings import Pruning
from strata.models.quantized.checkpoint import Checkpoint
from strata.models.save import save
from strata.models.shard import inside
from strata.models.weights import WeightStore, load, quantized_bytes
from strata.parallel.serving_shard import RankShard
from tests.dummies import randomize
from tests.engine.ranks.layouts import CONFIG as MIXTURE
from tests.models.batches import packed, random_sequences
from tests.models.checkpoints import FAMILY_CONFIGS
from tests.models.quantized.made import LAYOUTS, make, read
from tests.models.quantized.test_formats import LLAMA, made_llama, plain_llama
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.parallel.shards import shard_of

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 16,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "skip_tokenizer_init": True,
    "verbose": False,
}
(PROMPT,) = random_sequences(LLAMA["vocab_size"], (9,))


@torch.no_grad()
def written(folder: Path, name: str) -> CausalLM:
    """A checkpoint of a layout, and the plain model of what it stands for."""
    layout = LAYOUTS[name]
    model, owners = made_llama()
    stored, expected = make(layout, owners)
    kept = {one: value for one, value in model.state_dict().items() if one not in expected and "rotary" not in one}
    format = read(folder, layout.config, stored | kept)
    assert format is not None
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": layout.config}))
    plain_llama(model, expected, layout, format.scheme_of(f"{next(iter(owners))}.weight"))
    return model


@pytest.mark.parametrize("name", ["float-tensor", "fp8-block", "pack-4-asymmetric", "nvfp4", "awq", "gptq-ordered"])
@torch.no_grad()
def test_greedy_tokens_are_those_of_what_it_stands_for(name: str, tmp_path: Path) -> None:
    model = written(tmp_path, name)
    llm = LLM(tmp_path, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    ids = list(output.outputs[0].token_ids)
    logits = model.head(model(packed([PROMPT + ids[:-1]])))[len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == ids
    parameters = dict(llm.engine.model.named_parameters())
    assert sum(one.is_meta for one in parameters.values()) == 7
    assert llm.engine.ledger.weights < sum(parameter.nbytes for parameter in parameters.values())


@pytest.mark.parametrize("name", ["fp8-block", "pack-4-asymmetric"])
@torch.no_grad()
def test_ranks_read_their_parts(name: str, tmp_path: Path) -> None:
    written(tmp_path, name)
    config = config_from_dict(LLAMA)
    with torch.device("meta"):
        empty = build(config)
        shards = [RankShard.of(config, 2, index) for index in (0, 1)]
        parts = [(shard, shard.build()) for shard in shards]
    whole = WeightStore.load(tmp_path, Packing.of(None, empty, folder=tmp_path).schemes).quantized
    for shard, own in parts:
        packing = Packing.of(None, own, shard, tmp_path)
        found = WeightStore.load(tmp_path, packing.schemes, part=shard).quantized
        assert found.keys() == whole.keys()
        assert len({id(weight.values) for weight in packing.planned.values()}) == len(whole)  # or none is merged
        for stored, weight in found.items():
            (box,) = shard.boxes(stored, tuple(whole[stored].shape))
            assert torch.equal(dense(weight), dense(whole[stored])[inside(box)])
            assert packing.planned[stored].nbytes == weight.nbytes


@torch.no_grad()
def test_a_mixture_with_latents(tmp_path: Path) -> None:
    """Experts are put together as they are packed; what attention reads in parts becomes floats."""
    values = dict(FAMILY_CONFIGS)["deepseek-v2-lite-yarn"]
    config = config_from_dict(values)
    model = build(config)
    randomize(model, 0)
    plain = {name: value for name, value in stored_parameters(model).items() if value.dim() == 1 or ".gate." in name}
    kept = ("model.embed_tokens.weight", "lm_head.weight")
    plain |= {name: model.get_parameter(name) for name in kept}
    quantized_there = {name: one for name, one in stored_parameters(model).items() if name not in plain}
    owners = {name.removesuffix(".weight"): tuple(one.shape) for name, one in quantized_there.items()}
    layout = LAYOUTS["fp8-block"]
    stored, expected = make(layout, owners)
    read(tmp_path, layout.config, stored | {name: value.clone() for name, value in plain.items()})
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": layout.config}))
    with torch.device("meta"):
        empty = build(config)
    packing = Packing.of(None, empty, folder=tmp_path)
    store = WeightStore.load(tmp_path, packing.schemes, dtype="float32")
    made, found = store.model, store.quantized
    in_floats = {name for name, one in made.named_parameters() if not one.is_meta and name in expected}
    assert in_floats == {name for name in expected if "kv_b_proj" in name}
    for name, parameter in made.named_parameters():
        whole = dense(found[name]) if name in found else parameter
        for one, value in stored_views(made, name, whole):
            assert torch.equal(value, expected.get(one, plain.get(one))), one
    held = sum(one.nbytes for one in found.values())
    assert held == sum(one.nbytes for one in packing.planned.values())


def test_a_tied_head_is_not_one_of_its_own(tmp_path: Path) -> None:
    """Whether it or the embedding is packed; of both alike there is one."""
    written(tmp_path, "int")
    tied = LLAMA | {"tie_word_embeddings": True, "quantization_config": LAYOUTS["int"].config | {"ignore": []}}
    tied["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    (tmp_path / "config.json").write_text(json.dumps(tied))
    stored = load_file(tmp_path / "model.safetensors")
    shape = tuple(stored.pop("lm_head.weight").shape)
    packed_pair, _ = make(LAYOUTS["int"], {"lm_head": shape, "model.embed_tokens": shape})
    del stored["model.embed_tokens.weight"]
    alike = {name: packed_pair[name.replace("lm_head", "model.embed_tokens")].clone() for name in packed_pair}
    with torch.device("meta"):
        empty = build(config_from_dict(LLAMA))
    schemes = Packing.of(None, empty, folder=tmp_path).schemes
    save_file(stored | alike, tmp_path / "model.safetensors")
    WeightStore.load(tmp_path, schemes)
    embedding = {name: tensor for name, tensor in packed_pair.items() if "embed" in name}
    plain = {"lm_head.weight": torch.ones(shape)}
    for head in (packed_pair, embedding | plain):
        save_file(stored | head, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"ties lm_head\.weight to .*, but they are packed apart"):
            WeightStore.load(tmp_path, schemes)
    save_file(stored | plain | {"model.embed_tokens.weight": torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="but they differ"):
        WeightStore.load(tmp_path, schemes)


def test_what_packed_weights_cannot_be_had_with_is_refused_before_they_are_read(tmp_path: Path) -> None:
    written(tmp_path, "pack-8")
    config = config_from_dict(LLAMA)
    asked = EngineConfig(str(tmp_path), device="cpu", tensor_parallel_size=2, deterministic=True)
    shard = RankShard.of(config, 2, 0)
    with pytest.raises(ValueError, match=r"\(compressed-tensors: int8 .*\) with tensor_parallel_size=2 and determ"):
        EngineSizes.of(asked, shard.config, torch.device("cpu"), None, shard)


def test_what_is_packed_already_is_not_packed_again(tmp_path: Path) -> None:
    expected = written(tmp_path, "awq")
    with pytest.raises(
        ValueError, match=r"quantization='fp8': the weights of .* are packed already \(awq: int4 in gro"
    ):
        LLM(tmp_path, quantization="fp8", **OPTIONS)
    model, _ = load(tmp_path, dtype="float32")
    assert all(torch.equal(one, expected.get_parameter(name)) for name, one in model.named_parameters())


@pytest.mark.parametrize("name", ["gptq", "awq", "pack-4"])
def test_a_matrix_that_is_there_twice_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing tells whether the packed one is meant or the floats."""
    written(tmp_path, name)
    stored = load_file(tmp_path / "model.safetensors")
    floats = {"model.layers.0.mlp.down_proj.weight": torch.ones(64, 96)}
    save_file(stored | floats, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"packed and in floats, too: model\.layers\.0\.mlp\.down_proj\.weight; "):
        LLM(tmp_path, **OPTIONS)


@torch.no_grad()
def test_biases_of_zeros_that_the_model_does_not_have_are_passed_over(tmp_path: Path) -> None:
    """Older files of AutoGPTQ have some; others are refused, and the model's own are read, zeros or not."""
    written(tmp_path, "gptq")
    with torch.device("meta"):
        empty = build(config_from_dict(LLAMA))
        biased = build(config_from_dict(LLAMA | {"mlp_bias": True}))
    stored = load_file(tmp_path / "model.safetensors")
    mlp = {f"model.layers.0.mlp.{name}_proj.bias": size for name, size in (("gate", 96), ("up", 96), ("down", 64))}
    zeros = {name: torch.zeros(size, dtype=torch.float16) for name, size in mlp.items()}
    save_file(stored | zeros, tmp_path / "model.safetensors")
    assert not zeros.keys() & Checkpoint.of(tmp_path, empty).sources.keys()
    assert zeros.keys() <= Checkpoint.of(tmp_path, biased).sources.keys()
    last = "model.layers.0.mlp.up_proj.bias"
    zeros[last][-1] = 1.0
    save_file(stored | zeros, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"does not call for: {last}$"):
        Checkpoint.of(tmp_path, empty)


SIZES = {"hidden_size": 48, "intermediate_size": 96, "moe_intermediate_size": 80, "num_experts": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a layer of a plain MLP and one of experts; and the same, pruned."""
    folder = tmp_path_factory.mktemp("models")
    config = config_from_dict(MIXTURE | SIZES | {"mlp_only_layers": [0], "num_hidden_layers": 2}, "mixture")
    model = build(config)
    randomize(model, 0)
    save(model, config, folder / "whole")
    prune(folder / "whole", folder / "pruned", Pruning.of("2:4", 0.5, "magnitude"), [], torch.device("cpu"))
    return folder / "whole", folder / "pruned"


def test_greedy_tokens_and_memory(folders: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_pages": 48, "max_model_len": 64}
    options |= {"max_num_seqs": 2, "skip_tokenizer_init": True, "verbose": False}
    found, weights = [], []
    for sparsity in (None, "2:4"):
        llm = LLM(folders[1], sparsity=sparsity, **options)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": list(range(3, 20))}], params, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
        weights.append(llm.engine.ledger.weights)
    assert found[0] == found[1]
    assert weights[1] < weights[0]


@torch.no_grad()
def test_parts_of_ranks_are_those_of_the_model(folders: tuple[Path, Path]) -> None:
    whole, config = load(folders[1], dtype="bfloat16")
    for rank in (0, 1):
        shard, wanted = shard_of(whole, config, 2, rank)
        with torch.device("meta"):
            own = shard.build()
        packing = Packing.of(None, own, shard, folders[1], "2:4")
        store = WeightStore.load(folders[1], packing.schemes, dtype="bfloat16", part=shard)
        model, packed = store.model, store.quantized
        assert packed.keys() == packing.schemes.keys()
        for name, weight in packed.items():
            assert torch.equal(dense(weight, torch.bfloat16), wanted.get_parameter(name)), name
            planned = packing.planned[name]
            assert {n: (t.shape, t.dtype) for n, t in planned.tensors.items()} == {
                n: (t.shape, t.dtype) for n, t in weight.tensors.items()
            }
        held = sum(one.nbytes for one in model.parameters() if not one.is_meta)
        held += sum(one.nbytes for one in model.buffers()) + sum(one.nbytes for one in packed.values())
        assert quantized_bytes(own, torch.bfloat16, packing.planned) == held


def test_a_checkpoint_that_is_not_sparse_is_refused_by_name(folders: tuple[Path, Path]) -> None:
    schemes = Packing.of(None, _meta(folders[0]), None, folders[0], "2:4").schemes
    with pytest.raises(ValueError, match=r"_proj.weight cannot be packed: 4 of four .* strata prune"):
        WeightStore.load(folders[0], schemes)
    packed = WeightStore.load(folders[0], schemes, load_format="dummy").quantized
    assert all(is_two_of_four(dense(one)) for one in packed.values())


@pytest.mark.parametrize("family", ["gpt-oss", "granite"])
def test_experts_in_one_tensor_which_nothing_prunes_stay_as_they_are(family: str, tmp_path: Path) -> None:
    values = dict(FAMILY_CONFIGS)["gpt-oss-yarn"] | {"hidden_size": 64, "intermediate_size": 32}
    if family == "granite":
        sizes = {"hidden_size": 32, "intermediate_size": 16, "shared_intermediate_size": 32, "mamba_n_heads": 8}
        values = RECURRENT_CONFIGS["granite-hybrid-experts"] | sizes | {"head_dim": 8}
    config = config_from_dict(values)
    model = build(config)
    randomize(model, 0)
    save(model, config, tmp_path / "whole")
    prune(tmp_path / "whole", tmp_path / "pruned", Pruning.of("2:4", 0.5, "magnitude"), [], torch.device("cpu"))
    schemes = Packing.of(None, _meta(tmp_path / "pruned"), None, tmp_path / "pruned", "2:4").schemes
    assert any("o_proj" in name for name in schemes)
    packed = WeightStore.load(tmp_path / "pruned", schemes).quantized
    assert packed.keys() == {name for name, _ in model.named_parameters() if name.endswith("proj.weight")}


def test_options_that_exclude_each_other() -> None:
    for options, said in (
        ({"sparsity": "1:2"}, "accepted is '2:4'"),
        ({"sparsity": "2:4", "quantization": "fp8"}, "leave out one of them"),
        ({"sparsity": "2:4", "deterministic": True, "tensor_parallel_size": 2}, "sparsity='2:4' with tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            EngineConfig("model", **options)
    with pytest.raises(ValueError, match="leave out one of them"):  # `strata graph` has no EngineConfig
        Packing.of("fp8", build(config_from_dict(MIXTURE)), sparsity="2:4")


def test_experts_are_refused_on_cuda_before_weights_are_read(folders: tuple[Path, Path]) -> None:
    packing = Packing.of(None, _meta(folders[1]), None, folders[1], "2:4")
    experts = next(one for one in packing.operations if one.name == "experts")
    experts.implementations.append(Implementation("other schemes", experts.reference, "cuda", packed=True))
    experts._bound.clear()
    try:
        with pytest.raises(ValueError, match="experts has no kernel for them on cuda"):
            packing.check_kernels("cuda", deterministic=False)
    finally:
        experts.implementations.pop()
        experts._bound.clear()


def _meta(folder: Path) -> Any:
    from strata.models.config import read_config

    with torch.device("meta"):
        return build(read_config(folder))
