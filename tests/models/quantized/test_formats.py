"""Packed checkpoints of the hubs stand for the weights that their layouts say, and run as those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strata.graph.bind import bind
from strata.graph.capture import capture, capture_head
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.quantize import quantize, weights_of_products
from strata.kernels.quant.packed import Scheme, dense, round_activations
from strata.models.checkpoint import read_checkpoint
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.layers import CausalLM, Linear
from strata.models.quantized.formats.read import PackedFormat, read_packed_experts
from strata.models.sources import match_tensors
from strata.models.weights import load
from tests.dummies import randomize
from tests.models.batches import packed, random_sequences
from tests.models.checkpoints import make_checkpoint

from .made import INPUT_SCALE, LAYOUTS, Layout, make, read, rounded_statically

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# Rows that blocks and words do not divide, where the layout lets them be.
OWNERS = {"a.proj": (72, 64), "b.experts.3.down_proj": (40, 96)}


def found(format: PackedFormat | None) -> PackedFormat:
    assert format is not None
    return format


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_read_is_what_the_layout_says(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    stored, expected = make(layout, OWNERS)
    plain = {"a.proj.bias": torch.ones(72), "norm.weight": torch.ones(64), "lm_head.weight": torch.ones(4, 64)}
    format = found(read(tmp_path, layout.config, stored | plain))
    assert format.matrices == expected.keys()
    assert format.claimed == stored.keys()
    for matrix, wanted in expected.items():
        assert format.shape(matrix) == wanted.shape
        (out, width), scheme = wanted.shape, format.scheme_of(matrix)
        assert (scheme.values, scheme.activations) == (layout.values, layout.activations)
        whole = format.read(matrix, (0, out), (0, width))
        assert whole.shape == wanted.shape
        assert whole.scheme == scheme
        assert whole.input_scale == (torch.tensor(INPUT_SCALE).item() if layout.static else None)
        assert torch.equal(dense(whole), wanted)
        for rows in ((0, 8), (5, 21), (33, out), (out, out)):
            assert torch.equal(dense(format.read(matrix, rows, (0, width))), wanted[slice(*rows)])
            if whole.order is None:
                part = format.read(matrix, rows, (24, 56))
                assert torch.equal(dense(part), wanted[slice(*rows), 24:56])
    if name.endswith("ordered"):
        assert whole.order is not None
        with pytest.raises(ValueError, match=r"b\.experts\.3\.down_proj\.weight: the columns .* cannot be divided"):
            format.read(matrix, (0, 8), (0, 32))
    with pytest.raises(ValueError, match=r"40 x 96; rows \(0, 41\)"):
        format.read("b.experts.3.down_proj.weight", (0, 41), (0, 96))


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("fp8", {"kv_cache_scheme": "static"}),
        ("float-tensor", {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}),
        ("modelopt-fp8", {"kv_cache_quant_algo": "FP8"}),
    ],
)
def test_scales_of_a_cache_are_passed_over_where_the_config_tells_of_one(
    name: str, cache: dict, tmp_path: Path
) -> None:
    stored, _ = make(LAYOUTS[name], {"a.k_proj": (40, 64)})
    scales = {"a.k_proj.k_scale": torch.ones(1), "a.v_scale": torch.ones(1)}
    assert found(read(tmp_path, LAYOUTS[name].config | cache, stored | scales)).claimed >= scales.keys()
    with pytest.raises(ValueError, match=r"does not call for: a\.(k_proj\.k|v)_scale"):
        read(tmp_path, LAYOUTS[name].config, stored | scales)


def made_llama() -> tuple[CausalLM, dict[str, tuple[int, int]]]:
    model = build(config_from_dict(LLAMA))
    randomize(model, 0)
    names = [name for name in weights_of_products([capture(model), capture_head(model)]) if "layers" in name]
    return model, {name.removesuffix(".weight"): tuple(model.get_parameter(name).shape) for name in names}


@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        "fp8-block",
        "float-tensor",
        "float-channel",
        "int",
        "int-tensor",
        "modelopt-fp8",
        "pack-4-asymmetric",
        "nvfp4",
        "mxfp4",
        "awq",
        "gptq-ordered",
    ],
)
@torch.no_grad()
def test_a_llama_runs_from_it_as_from_what_it_stands_for(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    model, owners = made_llama()
    assert len(owners) == 7
    stored, expected = make(layout, owners)
    kept = {one: value for one, value in model.state_dict().items() if one not in expected and "rotary" not in one}
    format = found(read(tmp_path, layout.config, stored | kept))
    weights = {one: format.read(one, *((0, size) for size in format.shape(one))) for one in format.matrices}
    batch = packed(random_sequences(LLAMA["vocab_size"], (9, 4)))
    bound = bind(fuse(merge(quantize(capture(model), weights))), "cpu")(batch)
    plain_llama(model, expected, layout, weights[f"{next(iter(owners))}.weight"].scheme)
    torch.testing.assert_close(model.head(bound), model.head(model(batch)), rtol=1e-4, atol=1e-4)


def plain_llama(model: CausalLM, expected: dict[str, Tensor], layout: Layout, scheme: Scheme) -> None:
    """Give a model what packed weights stand for, and let its products round what they read."""
    for name, value in expected.items():
        model.get_parameter(name).copy_(value)
        if layout.activations:
            owner = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(owner, Linear)
            if layout.static:
                owner.register_forward_pre_hook(lambda _, x: (rounded_statically(x[0], layout.values),))
            else:
                owner.register_forward_pre_hook(lambda _, x: (round_activations(x[0], scheme),))


def test_experts_of_gpt_oss_stay_packed(tmp_path: Path) -> None:
    """They equal the floats that loading reads; biases are not theirs."""
    config = {key: LLAMA[key] for key in ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size")}
    config |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16, "intermediate_size": 32}
    config |= {"num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    make_checkpoint(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    experts = "model.layers.0.mlp.experts"
    for name, groups in (("gate_up_proj", 2), ("down_proj", 1)):
        rows = tensors.pop(f"{experts}.{name}").shape[2]
        shape = 3, rows, groups
        tensors[f"{experts}.{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
        tensors[f"{experts}.{name}_scales"] = torch.randint(118, 124, shape, generator=generator).byte()
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    assert read(tmp_path, method, tensors) is None
    format = read_packed_experts(read_checkpoint(tmp_path, packed=True), tmp_path)
    assert format.claimed == {name for name in tensors if name.endswith(("_blocks", "_scales"))}
    model = build(config_from_dict(config | {"quantization_config": method}))
    sources = match_tensors(model, read_checkpoint(tmp_path), tmp_path)
    assert format.matrices == {name for name in sources if ".experts." in name and name.endswith(".weight")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    parameters = dict(load(tmp_path)[0].named_parameters())
    gate_up, down = (next(p for n, p in parameters.items() if part in n and p.dim() == 3) for part in ("gate", "down"))
    for number in range(3):
        own = [format.read(f"{experts}.{number}.{part}_proj.weight", *box) for part, box in BOXES.items()]
        assert torch.equal(torch.cat([dense(own[0]), dense(own[1])]), gate_up[number])
        assert torch.equal(dense(own[2]), down[number, 7:41])


BOXES = {"gate": ((0, 32), (0, 64)), "up": ((0, 32), (0, 64)), "down": ((7, 41), (0, 32))}
