"""config.json: what transformers makes of it, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, GenerationConfig, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from strata.models.config import config_from_dict, read_config
from strata.models.rotary import rope_table
from strata.models.shapes import SHAPES

from .checkpoints import FAMILY_CONFIGS, Config
from .recurrent_checkpoints import RECURRENT_CONFIGS
from .sparse_models import SPARSE_CONFIGS

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Olmo3ForCausalLM": "olmo3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Qwen3NextForCausalLM": "qwen3_next",
}
CONFIGS = dict(FAMILY_CONFIGS) | SPARSE_CONFIGS
# What transformers has no usable default for: of V3 it says 128 KV heads, whatever the number of heads.
NEEDED: Config = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "DeepseekV3ForCausalLM": {"num_attention_heads": 128},
}


def least(architecture: str, **own: Any) -> Config:
    """No more fields than must be there."""
    sizes = {"vocab_size": 50, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}
    return {"architectures": [architecture], **sizes, "num_attention_heads": 32} | NEEDED.get(architecture, {}) | own


def oracle(values: Config) -> PreTrainedConfig:
    values = {"model_type": MODEL_TYPES[values["architectures"][0]]} | json.loads(json.dumps(values))
    return AutoConfig.for_model(**values)


def assert_agrees(values: Config) -> None:
    """Every field that the mathematics depends on is what transformers makes of it."""
    ours, theirs = config_from_dict(values), oracle(values)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rotary_dim == int(head_dim * ours.partial_rotary)
    assert ours.head_dim == getattr(theirs, "qk_head_dim", head_dim)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_length == theirs.max_position_embeddings
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.dtype == theirs.dtype
    ropes = {"full_attention": ours.rope, "sliding_attention": ours.window_rope}
    for kind, rope in ropes.items():
        if rope is not None:
            parameters = theirs.rope_parameters.get(kind, theirs.rope_parameters)
            assert (rope.theta, rope.rope_type) == (parameters["rope_theta"], parameters["rope_type"])
    assert ours.query_scalar == getattr(theirs, "query_pre_attn_scalar", None)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.pad_id == theirs.pad_token_id
    eos = theirs.eos_token_id
    assert ours.eos_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    assert ours.windows == tuple(window if kind == "sliding_attention" else None for kind in types)
    if ours.experts is not None:
        counts = (getattr(theirs, key, None) for key in ("num_local_experts", "n_routed_experts", "num_experts"))
        assert ours.experts.count == next(filter(None, counts))
        assert ours.experts.per_token == theirs.num_experts_per_tok
        assert ours.experts.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.experts.normalized == getattr(theirs, "norm_topk_prob", True)
        if hasattr(theirs, "router_aux_loss_coef"):
            assert ours.experts.balance_weight == theirs.router_aux_loss_coef


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_absent_fields_have_the_defaults_of_transformers(architecture: str) -> None:
    assert_agrees(least(architecture))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_null_means_as_many_kv_heads_as_heads(architecture: str) -> None:
    assert_agrees(least(architecture, num_key_value_heads=None, num_attention_heads=16))


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS)
def test_fields_mean_what_they_mean_in_transformers(values: Config) -> None:
    assert_agrees(values)


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS)
def test_both_forms_and_our_own_read_alike(values: Config) -> None:
    config = config_from_dict(values)
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config
    as_transformers_writes_it = json.loads(oracle(values).to_json_string()) | {"architectures": values["architectures"]}
    assert config_from_dict(as_transformers_writes_it) == config
    assert_agrees(config.to_dict())


@pytest.mark.parametrize("first", [0, 1, 2, 5])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_max_window_layers(architecture: str, first: int) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 16}
    assert_agrees(least(architecture, max_window_layers=first, **sliding))
    assert_agrees(least(architecture, max_window_layers=first, sliding_window=16))


def test_rope_parameters_keyed_by_layer_type() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    flat = least("Qwen3ForCausalLM", rope_parameters=rope)
    nested = least("Qwen3ForCausalLM", rope_parameters={"full_attention": rope, "sliding_attention": rope})
    assert config_from_dict(nested) == config_from_dict(flat)
    nested["rope_parameters"]["sliding_attention"] = rope | {"rope_theta": 1.5}
    with pytest.raises(ValueError, match=r"rope_parameters.*same parameters for every layer type"):
        config_from_dict(nested)


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name]["architectures"][0] in MODEL_TYPES])
def test_named_shapes_are_what_transformers_reads(name: str) -> None:
    assert_agrees(SHAPES[name])


def test_layers_that_are_not_rotated() -> None:
    """In `no_rope_layers` 1 means that a layer is rotated; without it every fourth layer is not."""
    config = config_from_dict(least("SmolLM3ForCausalLM", num_hidden_layers=5))
    assert config.rotated == (True, True, True, False, True)
    assert config.with_layers([3, 0]).rotated == (False, True)
    named = config_from_dict(least("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1]))
    assert named.rotated == (False, True)
    for wrong in ([1], [1, 2], [True, False], "all"):
        with pytest.raises(ValueError, match=r"no_rope_layers = .* is not supported; accepted is a list with 0 or 1"):
            config_from_dict(least("SmolLM3ForCausalLM", no_rope_layers=wrong))
    with pytest.raises(ValueError, match="unknown field no_rope_layers"):
        config_from_dict(least("LlamaForCausalLM", no_rope_layers=[1, 1]))


numbers = st.floats(1.0, 64.0)
lengths = st.integers(16, 8192)
ropes = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("default")}),
    st.fixed_dictionaries({"rope_type": st.sampled_from(["linear", "dynamic"]), "factor": numbers}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": numbers,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
        },
        optional={"original_max_position_embeddings": lengths},
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": st.one_of(st.none(), numbers)},
        optional={
            "original_max_position_embeddings": lengths,
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.sampled_from([None, 0.0, 0.5, 1.0]),
            "mscale_all_dim": st.sampled_from([None, 0.0, 0.8, 1.0]),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "truncate": st.booleans(),
        },
    ),
)


SUDDEN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 8.0, "truncate": False}


@settings(max_examples=150, deadline=None)
@example(rope=SUDDEN, theta=10000.0, head_dim=64, trained=4096)
@given(rope=ropes, theta=st.floats(100.0, 1e7), head_dim=st.sampled_from([8, 20, 64, 128]), trained=lengths)
def test_rotary_table_equals_transformers(rope: dict[str, Any], theta: float, head_dim: int, trained: int) -> None:
    values = least("LlamaForCausalLM", head_dim=head_dim, max_position_embeddings=trained, rope_theta=theta)
    config = config_from_dict(values | {"rope_scaling": dict(rope)})
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=head_dim, max_position_embeddings=trained, rope_theta=theta, rope_scaling=dict(rope))
    )
    length = min(trained, 100)
    cos, sin = rotary(torch.ones(1), torch.arange(length)[None])
    table = rope_table(config.rope, head_dim, trained, length)
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=5e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=5e-6)


GENERATION = GenerationConfig._get_default_generation_params()


def test_generation_parameters_are_ignored_as_transformers_ignores_them() -> None:
    plain = least("LlamaForCausalLM")
    assert config_from_dict(GENERATION | plain) == config_from_dict(plain)


@settings(max_examples=60, deadline=None)
@given(key=st.text().map("x{}".format), architecture=st.sampled_from(list(MODEL_TYPES)))
def test_an_unknown_field_is_named(key: str, architecture: str) -> None:
    """No family has a field that begins with an x."""
    with pytest.raises(ValueError, match="unknown field") as error:
        config_from_dict(least(architecture) | {key: 1})
    assert key in str(error.value)


def test_a_misspelt_field_is_told_the_right_name() -> None:
    fields = least("LlamaForCausalLM", num_hidden_layerz=3)
    with pytest.raises(ValueError, match=r"unknown field num_hidden_layerz; .*; is num_hidden_layers meant\?"):
        config_from_dict(fields)


BAD: list[tuple[str, Config, str]] = [
    (
        "architecture",
        {"architectures": ["GPT2LMHeadModel"]},
        r"architectures = \['GPT2LMHeadModel'\].*LlamaForCausalLM",
    ),
    ("two architectures", {"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "architectures"),
    ("null architecture", {"architectures": None}, "architectures = None"),
    ("unhashable architecture", {"architectures": [["LlamaForCausalLM"]]}, "architectures"),
    ("model type", {"model_type": "mistral"}, "model_type = 'mistral'.*'llama'"),
    ("activation", {"hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu'"),
    ("rope type", {"rope_scaling": {"rope_type": "proportional"}}, "rope_type = 'proportional'.*'yarn'"),
    ("rope type unhashable", {"rope_scaling": {"rope_type": []}}, "rope_type"),
    ("rope not an object", {"rope_scaling": "linear"}, "rope_scaling = 'linear'.*object"),
    ("rope without factor", {"rope_scaling": {"type": "linear"}}, "rope_scaling: the field 'factor' is missing"),
    ("rope factor", {"rope_scaling": {"type": "linear", "factor": -2}}, "factor = -2"),
    ("rope unknown key", {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
    (
        "rope twice",
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters",
    ),
    (
        "llama3 factors",
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
        "high_freq_factor = 1.0",
    ),
    ("rope theta", {"rope_theta": 0.5}, "rope_theta = 0.5"),
    ("partial rotary", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("partial rotary in rope", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "0.25"),
    ("quantized", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*quant_method.*hqq"),
    ("window of llama", {"sliding_window": 4096}, "sliding_window = 4096"),
    ("layer types of llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("layer types too few", {"layer_types": ["full_attention"]}, "layer_types.*2 layers"),
    ("layer types unknown", {"layer_types": ["full_attention", "mamba"]}, "layer_types.*mamba"),
    ("layer types unhashable", {"layer_types": ["full_attention", []]}, "layer_types"),
    ("kv heads", {"num_key_value_heads": 5}, "num_key_value_heads = 5.*divisor of num_attention_heads = 32"),
    ("heads", {"num_attention_heads": 5}, "num_attention_heads = 5.*divisor of hidden_size = 128"),
    ("odd head", {"head_dim": 7}, "head_dim = 7.*even"),
    ("dynamic head", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "head_dim = 2"),
    ("negative", {"hidden_size": -64}, "hidden_size = -64.*at least 1"),
    ("zero", {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ("fraction", {"vocab_size": 50.5}, "vocab_size = 50.5"),
    ("text", {"vocab_size": "50"}, "vocab_size = '50'"),
    ("boolean as count", {"intermediate_size": True}, "intermediate_size = True"),
    ("null size", {"hidden_size": None}, "'hidden_size' is null"),
    ("eps", {"rms_norm_eps": 0}, "rms_norm_eps = 0"),
    ("eps not finite", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
    ("flag", {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'.*true or false"),
    ("dtype", {"torch_dtype": "int8"}, "dtype = 'int8'.*'bfloat16'"),
    ("dtype unhashable", {"dtype": {}}, "dtype"),
    ("eos", {"eos_token_id": "end"}, "eos_token_id = 'end'"),
    ("remote code", {"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
    ("encoder", {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
]


@pytest.mark.parametrize(("own", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_values_are_named(own: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        config_from_dict(least("LlamaForCausalLM", **own))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", list(least("LlamaForCausalLM")))
def test_missing_fields_are_named(key: str) -> None:
    values = least("LlamaForCausalLM")
    del values[key]
    with pytest.raises(ValueError, match=f"'{key}' is missing"):
        config_from_dict(values)


@pytest.mark.parametrize(
    ("architecture", "own", "message"),
    [
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window = 0"),
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias = True"),
        ("MistralForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("Qwen2ForCausalLM", {"mlp_bias": True}, "mlp_bias = True"),
        ("Qwen3ForCausalLM", {"head_dim": None}, "head_dim = None"),
        ("Qwen3ForCausalLM", {"max_window_layers": -1}, "max_window_layers = -1"),
        ("Qwen3ForCausalLM", {"use_sliding_window": 1}, "use_sliding_window = 1"),
    ],
)
def test_bad_values_of_a_family_are_named(architecture: str, own: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_dict(least(architecture, **own))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0 is not supported"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok = 6 is not supported; accepted is at most"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ("qwen3-moe", {"mlp_only_layers": [2]}, "a list of layers from 0 to 1"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 is not supported"),
        ("qwen3-moe", {"moe_intermediate_size": "wide"}, "moe_intermediate_size = 'wide' is not supported"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = "),
        (
            "glm4-moe-groups",
            {"n_group": 5},
            "n_group = 5 .* accepted is a divisor of n_routed_experts = 12",
        ),
        ("glm4-moe-groups", {"topk_group": 5}, "topk_group = 5 is not supported; accepted is at most n_group = 4"),
        ("glm4-moe-groups", {"num_experts_per_tok": 7}, "topk_group = 2 is not supported; .* with 7 experts or more"),
        ("glm4-moe-groups", {"routed_scaling_factor": 0}, "routed_scaling_factor = 0 is not supported"),
        ("glm4-moe-groups", {"scoring_func": "softmax"}, "unknown field scoring_func"),
        ("deepseek-v2-lite-yarn", {"num_key_value_heads": 1}, "num_key_value_heads = 1 .* each of the num_att"),
        ("deepseek-v2-lite-yarn", {"qk_rope_head_dim": 5}, "qk_rope_head_dim = 5 .* an even number"),
        ("deepseek-v2-lite-yarn", {"head_dim": 16}, "head_dim = 16 .* accepted is 6"),
        ("deepseek-v2-lite-yarn", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' .* one of 'greedy'"),
        ("deepseek-v2-lite-yarn", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek-v2-lite-yarn", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek-v2-lite-yarn", {"rope_interleave": False}, "unknown field rope_interleave"),
        ("deepseek-v2-groups-biases-wide-values", {"n_group": 5}, "n_group = 5 .* a divisor of n_routed_experts = 12"),
        ("deepseek-v3-groups-yarn", {"topk_group": 5}, "topk_group = 5 .* at most n_group = 4"),
        ("deepseek-v3-groups-yarn", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*hqq"),
        ("deepseek-v3-groups-yarn", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'default' or"),
        ("mamba2", {"num_heads": 5}, "num_heads = 5"),
        ("mamba2", {"n_groups": 4}, "n_groups = 4"),
        ("mamba2", {"conv_kernel": 5}, "conv_kernel = 5"),
        ("mamba2", {"time_step_limit": [0.5]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
        ("mamba2", {"rope_theta": 1e6}, "rope_theta"),
        ("mamba2", {"rms_norm": False}, "rms_norm"),
        ("granite-hybrid", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
        ("granite-hybrid", {"layer_types": ["mamba", "window", "mamba"]}, "layer_types"),
        ("granite-hybrid", {"layer_types": ["mamba"]}, "a list of 3 of"),
        ("granite-hybrid", {"mamba_n_heads": 5}, "mamba_n_heads = 5"),
        ("granite-hybrid", {"mamba_d_head": 16}, "mamba_d_head = 16"),
        ("granite-hybrid", {"mamba_n_groups": 4}, "mamba_n_groups = 4"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        (
            "qwen3-next",
            {"linear_num_key_heads": 3},
            "linear_num_key_heads = 3 .* divisor of linear_num_value_heads = 4",
        ),
        ("qwen3-next", {"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim = 5"),
        ("qwen3-next", {"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3-next", {"layer_types": ["linear_attention"]}, "a list of 2 of"),
        ("qwen3-next", {"full_attention_interval": 0}, "full_attention_interval = 0"),
        ("qwen3-next", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3-next", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("qwen3-next", {"num_experts": 0}, "num_experts = 0"),
        ("qwen3-next", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7"),
        ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3-next", {"linear_key_head_dims": 8}, "is linear_key_head_dim meant"),
        ("gpt-oss-yarn", {"quantization_config": {"quant_method": "bitsandbytes"}}, "'mxfp4', 'awq'"),
        ("gpt-oss-yarn", {"quantization_config": {"quant_method": "mxfp4", "bits": 2}}, "bits"),
        ("gpt-oss-yarn", {"experts_per_token": 3}, "experts_per_token"),
        ("gpt-oss-yarn", {"sliding_window": None}, "sliding_window"),
        ("gpt-oss-yarn", {"num_experts_per_tok": 6, "experts_per_token": 6}, "num_experts_per_tok"),
    ],
)
def test_what_a_family_does_not_do_is_refused(name: str, changes: Config, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_from_dict((CONFIGS | RECURRENT_CONFIGS)[name] | changes)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"architectures": ', "\x00\xff"])
def test_a_file_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist; a model folder needs"):
        read_config(tmp_path)


values_of_any_kind = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(
    architecture=st.sampled_from(list(MODEL_TYPES)),
    key=st.sampled_from(sorted(set().union(*(values for _, values in FAMILY_CONFIGS)))),
    value=values_of_any_kind,
)
def test_nonsense_is_a_value_error(architecture: str, key: str, value: Any) -> None:
    with suppress(ValueError):
        config_from_dict(least(architecture, **{key: value}))


def test_rotary_tables_do_not_follow_the_default_device() -> None:
    with torch.device("meta"):
        assert rope_table(config_from_dict(SHAPES["8B"], "8B").rope, 64, 128, 16).device.type == "cpu"
