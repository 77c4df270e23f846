"""Published configs: fields that say what is done anyway are taken, others refused; what names a model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.models.config import config_from_dict
from strata.models.folder import BUILTIN, BUILTIN_FOLDER, folder_or_shape, model_folder
from strata.models.weights import resolve
from strata.text.tokenizer import Tokenizer

from .later_checkpoints import sizes
from .test_config import Config, assert_agrees, least

_LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
_PHI = {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096}
_PHI_CODE = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
_PHI_4 = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "attention_bias": False}
_MOE = {"num_experts": 160, "moe_intermediate_size": 2560, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _sizes(*counts: int) -> Config:
    return sizes(*counts[:-1]) | {"max_position_embeddings": counts[-1]}


# Sizes and fields of configs on the hub, and those of their fields that say what is done anyway.
PUBLISHED: dict[str, tuple[str, Config, Config]] = {
    "Phi-3-mini-4k": (
        "Phi3ForCausalLM",
        _sizes(32064, 3072, 8192, 32, 32, 32, 4096) | _PHI | {"sliding_window": 2047},
        {"auto_map": {kind: f"microsoft/Phi-3-mini--{name}" for kind, name in _PHI_CODE.items()}},
    ),
    "Phi-3.5-mini": (
        "Phi3ForCausalLM",
        _sizes(32064, 3072, 8192, 32, 32, 32, 131072) | _PHI | {"sliding_window": 262144, "rope_scaling": _LONG},
        {"auto_map": _PHI_CODE},
    ),
    "Phi-4-mini": (
        "Phi3ForCausalLM",
        _sizes(200064, 3072, 8192, 32, 24, 8, 131072)
        | _PHI
        | {"partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True, "rope_scaling": _LONG},
        _PHI_4 | {"mlp_bias": False, "auto_map": _PHI_CODE | {"AutoTokenizer": ["Xenova/gpt-4o", None]}},
    ),
    "Qwen3-Coder-480B": (
        "Qwen3MoeForCausalLM",
        _sizes(151936, 6144, 8192, 62, 96, 8, 262144) | _MOE | {"head_dim": 128, "rope_theta": 10000000},
        {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    ),
    "Kimi-K2": (
        "DeepseekV3ForCausalLM",
        _sizes(163840, 7168, 18432, 61, 64, 64, 131072)
        | {"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
        {"auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"}, "model_type": "kimi_k2", "moe_layer_freq": 1}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1, "seq_aux": True},
    ),
    "SmolLM3-3B": (
        "SmolLM3ForCausalLM",
        _sizes(128256, 2048, 11008, 36, 16, 4, 65536)
        | {"no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False},
        {"max_window_layers": 28, "no_rope_layer_interval": 4, "pretraining_tp": 2},
    ),
    "CodeLlama": (
        "LlamaForCausalLM",
        _sizes(32016, 4096, 11008, 32, 32, 32, 16384) | {"rope_theta": 1000000},
        {"context_window_size": 2048, "prefill_chunk_size": 2048, "bos_token": "<s>", "eos_token": "</s>"}
        | {"pretraining_tp": 1},
    ),
    # modelopt 0.31 names no method.
    "Qwen3-FP8-static": (
        "Qwen3ForCausalLM",
        _sizes(151936, 5120, 25600, 64, 64, 8, 40960) | {"head_dim": 128},
        {"quantization_config": {"quant_algo": "FP8", "ignore": ["lm_head"]}, "use_qk_norm": True},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fields_that_say_what_is_done_anyway_change_nothing(name: str) -> None:
    architecture, values, said = PUBLISHED[name]
    plain = {"architectures": [architecture]} | values
    assert config_from_dict(plain | said) == config_from_dict(plain)
    if architecture != "DeepseekV3ForCausalLM":  # transformers has names of its own for a head's sizes there
        assert_agrees(plain)


AGREED: list[tuple[str, Config]] = [
    ("LlamaForCausalLM", {"pad_token": None, "use_sliding_window": False, "bias": False, "use_qk_norm": False}),
    ("LlamaForCausalLM", {"is_decoder": False, "pruned_heads": {}, "add_cross_attention": False, "is_causal": True}),
    ("Qwen2ForCausalLM", {"qkv_bias": True, "lm_head_bias": False, "use_mrope": False}),
    ("Olmo2ForCausalLM", {"use_qk_norm": True}),
    ("MixtralForCausalLM", {"router_jitter_noise": 0.0, "norm_topk_prob": True}),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": None, "use_bidirectional_attention": False}),
]


@pytest.mark.parametrize(("architecture", "said"), AGREED)
def test_fields_that_say_what_a_family_does_change_nothing(architecture: str, said: Config) -> None:
    assert config_from_dict(least(architecture) | said) == config_from_dict(least(architecture))


OTHERWISE: list[tuple[str, str, Any]] = [
    ("LlamaForCausalLM", "lm_head_bias", True),
    ("LlamaForCausalLM", "qkv_bias", True),
    ("LlamaForCausalLM", "use_qk_norm", True),
    ("LlamaForCausalLM", "use_sliding_window", True),
    ("LlamaForCausalLM", "pruned_heads", {"0": [1]}),
    ("LlamaForCausalLM", "auto_map", {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}),
    ("LlamaForCausalLM", "auto_map", {"AutoModelForCausalLM": ["modeling_llama.LlamaForCausalLM"]}),
    ("LlamaForCausalLM", "auto_map", "modeling_llama.LlamaForCausalLM"),
    ("MistralForCausalLM", "attention_bias", True),
    ("MistralForCausalLM", "max_window_layers", 1),
    ("MixtralForCausalLM", "router_jitter_noise", 0.1),
    ("Qwen2ForCausalLM", "qkv_bias", False),
    ("Qwen3ForCausalLM", "use_qk_norm", False),
    ("Qwen3MoeForCausalLM", "shared_expert_intermediate_size", 512),
    ("Qwen3MoeForCausalLM", "qkv_bias", True),
    ("Phi3ForCausalLM", "full_attn_mod", 2),
    ("Phi3ForCausalLM", "interpolate_factor", 4),
    ("DeepseekV2ForCausalLM", "scoring_func", "sigmoid"),
    ("DeepseekV2ForCausalLM", "norm_topk_prob", True),
    # transformers takes the null of a flag as false, and that of a part of a head as all of it.
    ("DeepseekV3ForCausalLM", "norm_topk_prob", None),
    ("DeepseekV3ForCausalLM", "rope_interleave", None),
    ("Glm4MoeForCausalLM", "norm_topk_prob", None),
    ("Glm4MoeForCausalLM", "partial_rotary_factor", None),
    ("LlamaForCausalLM", "rope_scaling", {"type": "yarn", "rope_type": "linear", "factor": 2.0}),
    ("DeepseekV3ForCausalLM", "topk_method", "greedy"),
    ("DeepseekV3ForCausalLM", "model_type", "kimi_k3"),
    ("Gemma3ForCausalLM", "attn_logit_softcapping", 50.0),
    ("LlamaForCausalLM", "quantization_config", {"quant_algorithm": "FP8"}),
]


@pytest.mark.parametrize(("architecture", "field", "value"), OTHERWISE)
def test_another_value_is_refused_by_name(architecture: str, field: str, value: Any) -> None:
    plain = least(architecture)
    config_from_dict(plain)
    with pytest.raises(ValueError, match=field):
        config_from_dict(plain | {field: value})


@pytest.mark.parametrize("name", [None, BUILTIN])
def test_the_built_in_model_has_a_name(name: str | None) -> None:
    assert model_folder(name) == BUILTIN_FOLDER
    assert folder_or_shape(name) == str(BUILTIN_FOLDER)
    assert (BUILTIN_FOLDER / "config.json").is_file()


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path
    assert folder_or_shape(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("find", [model_folder, folder_or_shape])
def test_what_is_wrong_with_a_folder_is_told(find: Callable[[str], object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model folder '/nowhere/model' does not exist; give .*'builtin'"):
        find("/nowhere/model")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file' is a file; give a model folder"):
        find(str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find(str(tmp_path))


def test_a_shape_is_no_folder() -> None:
    assert folder_or_shape("8B") == "8B"
    with pytest.raises(ValueError, match="'8B' is a shape, which has no weights and no tokenizer"):
        model_folder("8B")


def test_the_loaders_name_the_folder_and_not_a_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for load in (resolve, Tokenizer.load):
        with pytest.raises(ValueError, match="model folder '/nowhere/model' does not exist; give"):
            load("/nowhere/model")
        with pytest.raises(ValueError, match="file' is a file; give"):
            load(tmp_path / "file")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: save"):
        Tokenizer.load(tmp_path)
