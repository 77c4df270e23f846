"""Packed checkpoints of the hubs stand for what their layouts say, run as those, and are refused where they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.graph.bind import bind
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.quantize import quantize, weights_of_products
from strata.graph.trace import trace, trace_head
from strata.kernels.quant.quantized import Scheme, dense, round_activations
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.layers import CausalLM, Linear
from strata.models.quantized.formats.compressed_rules import Group, Numbers, Rules
from strata.models.quantized.formats.read import QuantizedFormat, read_format
from tests.dummies import randomize
from tests.models.batches import packed, random_sequences
from tests.models.calibrate.models import LLAMA as THREE_LAYERS

from .made import INPUT_SCALE, LAYOUTS, Layout, make, read, rounded_statically

LLAMA = THREE_LAYERS | {"num_hidden_layers": 1}
# Rows that blocks and words do not divide, where the layout lets them be.
OWNERS = {"a.proj": (72, 64), "b.experts.3.down_proj": (40, 96)}


def found(format: QuantizedFormat | None) -> QuantizedFormat:
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
    names = [name for name in weights_of_products([trace(model), trace_head(model)]) if "layers" in name]
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
    bound = bind(fuse(merge(quantize(trace(model), weights))), "cpu")(batch)
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


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def put(**values: Any) -> Change:
    """Other values at keys of quantization_config."""
    return lambda config, _: config.update(values)


def in_group(part: str, **values: Any) -> Change:
    return lambda config, _: config["config_groups"]["group_0"][part].update(values)


def group(**values: Any) -> Change:
    return lambda config, _: config["config_groups"]["group_0"].update(values)


def without(last: str) -> Change:
    return lambda _, tensors: tensors.pop(f"a.{last}")


def other(last: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, tensors: tensors.update({f"a.{last}": change(tensors[f"a.{last}"]).contiguous()})


def more(name: str, tensor: Tensor) -> Change:
    return lambda _, tensors: tensors.update({name: tensor})


REFUSED: list[tuple[str, Change, str]] = [
    ("fp8", put(quant_method="bitsandbytes"), "quant_method = 'bitsandbytes' .* 'awq', 'compressed-tensors', 'fp8'"),
    ("fp8", put(quant_method=None), "quant_method = None"),
    ("fp8", put(rotation="hadamard"), "unknown field rotation = 'hadamard'"),
    ("fp8", put(fmt="e5m2"), "fmt = 'e5m2'"),
    ("fp8", put(expert_dtype="fp4"), "expert_dtype = 'fp4'"),
    ("fp8", put(weight_block_size=[128]), r"weight_block_size = \[128\]"),
    ("fp8", put(modules_to_not_convert="lm_head"), "modules_to_not_convert = 'lm_head'"),
    ("fp8", without("weight_scale"), r"lacks a\.weight_scale_inv"),
    ("fp8", other("weight_scale", lambda _: torch.ones(2)), r"a\.weight_scale is \[2\], expected \[\] or"),
    ("fp8", more("a.k_scale", torch.ones(1)), r"does not call for: a\.k_scale"),
    ("fp8", more("b.weight_scale", torch.ones(1)), r"does not call for: b\.weight_scale"),
    ("fp8", more("a.weight_scale_inv", torch.tensor(1.0)), r"does not call for: a\.weight_scale"),
    ("fp8", more("b.weight", torch.ones(2, 2, dtype=torch.int8)), r"does not call for: b\.weight"),
    ("fp8", lambda _, tensors: tensors.clear() or tensors.update(n=torch.ones(1)), "holds no packed weights"),
    ("fp8-block", put(activation_scheme="static"), "activation_scheme = 'static'"),
    ("fp8-block", put(weight_block_size=[8, 8]), r"a\.weight_scale_inv is \[3, 8\], expected \[5, 8\]"),
    ("fp8-block", other("weight_scale_inv", Tensor.int), "weight_scale_inv has dtype int32; accepted is float16"),
    ("awq", put(version="gemv"), "version = 'gemv' .* 'gemm'"),
    ("awq", put(bits=3), "bits = 3"),
    ("awq", put(v3=False), "unknown field v3 = False"),
    ("awq", put(group_size=48), "groups of 48 do not divide the 64 columns of a"),
    ("awq", put(group_size=0), "group_size = 0"),
    ("awq", without("qzeros"), r"lacks a\.qzeros"),
    ("awq", other("scales", lambda scales: scales[:1]), r"a\.scales is \[1, 40\], expected \[2, 40\]"),
    ("gptq", put(bits=3), "bits = 3"),
    ("gptq", put(checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
    ("gptq", put(pack_dtype="int16"), "pack_dtype = 'int16'"),
    ("gptq", put(use_marlin=True), "use_marlin = True"),
    ("gptq", put(v3=False), "unknown field v3 = False"),
    ("gptq", put(sym=False), "sym = False with .* GPTQModel's files alone"),
    ("gptq", put(dynamic={"-:a": {}}), "leaves a plain by '-:a'"),
    ("gptq", put(dynamic={"+:(": {}}), "no regular expression"),
    ("gptq", put(dynamic={"a": {"rank": 2}}), "'a': unknown field rank"),
    ("gptq-ordered", without("g_idx"), r"lacks a\.g_idx"),
    ("pack-4", put(quantization_status="initialized"), "quantization_status = 'initialized'"),
    ("pack-4", put(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    ("pack-4", put(transform_config={"config_groups": {"u": {}}}), "transform_config"),
    ("pack-4", put(config_groups={}), "config_groups is empty"),
    ("pack-4", put(format="marlin-24"), "format = 'marlin-24'"),
    ("pack-4", put(ignore=["a"]), "a is packed in .*, but config_groups and ignore leave it plain"),
    ("pack-4", put(ignore=["re:("]), r"'re:\(' is no regular expression"),
    ("pack-4", group(targets=["re:.*proj"]), "a is packed in"),
    ("pack-4", group(targets=["a", "b"]), "says that b is packed; its file holds floats"),
    ("pack-4", group(output_activations={"num_bits": 8}), "output_activations"),
    ("pack-4", group(rotation=1), "group_0: unknown field rotation"),
    ("pack-4", in_group("weights", num_bits=3), "int of 3 bits in 'pack-quantized'; supported is int of 4 bits or int"),
    ("pack-4", in_group("weights", precision=1), "weights: unknown field precision"),
    ("pack-4", in_group("weights", dynamic=True), "dynamic = True"),
    ("pack-4", in_group("weights", group_size=24), r"a\.weight_packed is \[40, 8\], which 48 columns"),
    ("pack-4", in_group("weights", strategy="tensor", group_size=None), "a scale for each tensor"),
    ("pack-4", in_group("weights", symmetric=False), r"lacks a\.weight_zero_point"),
    ("pack-4", without("weight_shape"), r"lacks a\.weight_shape"),
    ("pack-4-asymmetric", in_group("weights", symmetric=True), r"does not call for: a\.weight_zero_point"),
    ("float-channel", in_group("input_activations", strategy="group", group_size=32), "groups of 32 with weights in"),
    ("float-channel", in_group("weights", symmetric=False), "not symmetric"),
    ("int", in_group("input_activations", symmetric=False), "input_activations that are not symmetric"),
    ("nvfp4", in_group("weights", group_size=32), "groups of 32; its format has groups of 16"),
    ("nvfp4", without("weight_global_scale"), r"lacks a\.weight_global_scale"),
    ("mxfp4", other("weight_scale", lambda scales: scales[:, :1]), r"a\.weight_scale is \[40, 1\], expected \[40, 2\]"),
    ("gptq", put(rotation="hadamard"), "rotation = 'hadamard'"),
    ("modelopt-fp8", put(quant_algo=None, quant_method=None), "quant_method = None"),
    ("modelopt-fp8", put(quant_algo="W4A8_AWQ"), "quant_algo = 'W4A8_AWQ'"),
    ("modelopt-nvfp4", more("a.pre_quant_scale", torch.ones(64)), r"does not call for: a\.pre_quant_scale"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_refused_from_headers(name: str, change: Change, message: str, tmp_path: Path) -> None:
    config = json.loads(json.dumps(LAYOUTS[name].config))
    tensors = make(LAYOUTS[name], {"a": (40, 64)})[0] | {"b.weight": torch.ones(2, 2)}
    change(config, tensors)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, config, tensors)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8", other("weight_scale", lambda _: torch.tensor(float("nan"))), r"a\.weight_scale holds a scale that"),
        ("gptq", other("scales", lambda scales: scales * float("inf")), r"a\.scales holds a scale"),
        ("mxfp4", other("weight_scale", lambda scales: scales * 0 + 255), r"a\.weight_scale holds a scale"),
        ("nvfp4", other("weight_global_scale", torch.zeros_like), r"a\.weight_global_scale is 0"),
        ("nvfp4", other("weight_global_scale", lambda scale: scale * 0 + 1e-42), r"a\.weight_global_scale is 1e-42,"),
        ("gptq", other("qzeros", lambda zeros: zeros + 1), r"a\.qzeros holds zeros other than 8"),
        ("gptq-ordered", other("g_idx", torch.zeros_like), r"a\.g_idx does not give each group 32 columns"),
        ("pack-4", other("weight_shape", lambda shape: shape + 1), r"a\.weight_shape is not \[40, 64\]"),
    ],
)
def test_refused_from_values(name: str, change: Change, message: str, tmp_path: Path) -> None:
    tensors, _ = make(LAYOUTS[name], {"a": (40, 64)})
    change({}, tensors)
    format = read(tmp_path, LAYOUTS[name].config, tensors)
    assert format is not None
    with pytest.raises(ValueError, match=message):
        format.read("a.weight", (0, 40), (0, 64))


def test_plain_checkpoints_have_no_format(tmp_path: Path) -> None:
    assert read_format({}, {}, tmp_path) is None
    assert read_format({"quantization_config": None}, {}, tmp_path) is None
    with pytest.raises(ValueError, match="quantization_config is 'fp8'; supported is an object"):
        read_format({"quantization_config": "fp8"}, {}, tmp_path)


def test_modelopt_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    tensors, _ = make(LAYOUTS["modelopt-fp8"], {"a": (40, 64)})
    config = {key: value for key, value in LAYOUTS["modelopt-fp8"].config.items() if key != "quant_method"}
    file = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": config}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    format = read(tmp_path, None, tensors)
    assert format is not None
    assert format.scheme == "modelopt: e4m3 with a scale for each weight (1)"


def test_the_first_rule_of_gptq_decides(tmp_path: Path) -> None:
    four, _ = make(LAYOUTS["gptq"], {"a": (40, 64)})
    eight, _ = make(LAYOUTS["gptq-8"], {"layers.1.b": (40, 64)})
    rules = {"+:layers\\.1\\.": {"bits": 8, "group_size": -1}, "layers": {"bits": 2}}
    format = read(tmp_path, LAYOUTS["gptq"].config | {"dynamic": rules}, four | eight)
    assert format is not None
    assert format.scheme == "gptq: int4 in groups of 32 (1), int8 with a scale for each row (1)"


def test_names_come_before_patterns_before_classes() -> None:
    """As compressed-tensors 0.20.0 matches: patterns from the first letter on, of two the first in the alphabet."""
    packed = Numbers("int", 4, True, "channel", 1, 0)
    by_class, by_pattern, by_name, later = (
        Group(targets, packed, None, "pack-quantized")
        for targets in (("Linear",), ("re:.*q_proj$",), ("text.0.q_proj",), ("re:.*proj",))
    )
    rules = Rules((by_class, later, by_pattern, by_name), ("lm_head", "re:layers.9", "re:q_proj"))
    found = {
        "text.0.q_proj": by_name,  # which stands behind "re:" in the alphabet
        "layers.1.q_proj": later,  # "re:.*proj" stands before "re:.*q_proj$"
        "layers.1.mlp.gate": by_class,
        "lm_head": None,
        "layers.9.q_proj": None,
    }
    for module, wanted in found.items():
        assert rules.group_of(module, "Linear") is wanted
    assert rules.group_of("embed_tokens", "Embedding") is None
    assert Rules((by_class,), ("Linear",)).group_of("layers.0.q_proj", "Linear") is None
