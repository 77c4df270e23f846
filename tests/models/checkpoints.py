"""Small random checkpoints of every family, written by transformers, for tests of any floor.

`FAMILY_CONFIGS` are contents of config.json, in both of its forms, with odd sizes: vocabularies that are no multiple of
8, heads that do not fill the hidden size, seven query heads to a KV head, every rope type.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .deepseek_checkpoints import DEEPSEEK_CONFIGS
from .gpt_oss_checkpoints import GPT_OSS_CONFIGS
from .later_checkpoints import LATER_CONFIGS, Config, family, sizes

_llama, _mistral, _qwen2, _qwen3 = (
    partial(family, name, name.lower()) for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
)


# Families in which every layer has the same operations in the same order.
# fmt: off
ALIKE_CONFIGS: list[tuple[str, Config]] = [
    ("llama-llama3", _llama(
        **sizes(131, 56, 93, 2, 7, 1), head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}, torch_dtype="float32",
    )),
    ("llama-biases-linear-tied", _llama(
        **sizes(97, 40, 75, 2, 4, 2), max_position_embeddings=128, attention_bias=True, mlp_bias=True,
        rope_scaling={"type": "linear", "factor": 3.0}, tie_word_embeddings=True, pretraining_tp=1,
    )),
    ("llama-dynamic", _llama(
        **sizes(101, 36, 50, 3, 3, None), max_position_embeddings=96, rope_parameters={"rope_type": "dynamic",
        "factor": 2.5, "rope_theta": 20000.0}, dtype="float32",
    )),
    ("llama-yarn", _llama(
        **sizes(77, 48, 64, 2, 6, 3), max_position_embeddings=256, rope_parameters={"rope_type": "yarn",
        "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    )),
    ("mistral-window", _mistral(
        **sizes(131, 44, 61, 2, 6, 2), head_dim=24, max_position_embeddings=512, sliding_window=5, rope_theta=1000000.0,
        tie_word_embeddings=False,
    )),
    ("mistral-yarn", _mistral(
        **sizes(99, 56, 80, 2, 7, 1), head_dim=None, max_position_embeddings=256, sliding_window=None,
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 5000.0,
        "original_max_position_embeddings": 128, "attention_factor": 1.1},
    )),
    ("mistral-window-linear-tied", _mistral(
        **sizes(83, 32, 40, 3, 4, 4), max_position_embeddings=64, sliding_window=9, rope_scaling={"rope_type": "linear",
        "factor": 2.0, "type": "linear"}, tie_word_embeddings=True,
    )),
    ("qwen2-tied", _qwen2(
        **sizes(139, 56, 70, 2, 14, 2), max_position_embeddings=128, rope_theta=1000000.0, use_sliding_window=False,
        sliding_window=128, max_window_layers=1, tie_word_embeddings=True, torch_dtype="float32",
    )),
    ("qwen2-window", _qwen2(
        **sizes(89, 36, 52, 3, 6, 2), max_position_embeddings=128, use_sliding_window=True, sliding_window=6,
        max_window_layers=1, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    )),
    ("qwen2-layer-types-dynamic", _qwen2(
        **sizes(107, 48, 66, 3, 4, 1), max_position_embeddings=128, use_sliding_window=True, sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, dtype="float32",
    )),
    ("qwen3-tied", _qwen3(
        **sizes(151, 40, 56, 2, 4, 2), head_dim=32, max_position_embeddings=128, rope_theta=1000000.0,
        rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=2, tie_word_embeddings=True,
    )),
    ("qwen3-biases-window", _qwen3(
        **sizes(103, 42, 60, 2, 7, 1), head_dim=12, max_position_embeddings=128, attention_bias=True,
        use_sliding_window=True, sliding_window=4, layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 2.0, "original_max_position_embeddings": 32},
    )),
    ("qwen3-linear", _qwen3(
        **sizes(91, 48, 72, 2, 6, 3), head_dim=20, max_position_embeddings=128, rope_parameters={"rope_type": "linear",
        "rope_theta": 10000.0, "factor": 1.5},
    )),
]
# fmt: on
FAMILY_CONFIGS = ALIKE_CONFIGS + LATER_CONFIGS + DEEPSEEK_CONFIGS + GPT_OSS_CONFIGS


def make_checkpoint(folder: Path, config: Config, seed: int = 0) -> Path:
    """Save random weights with this config.json (kept word for word) as transformers saves them; returns the folder.

    Biases and norms are random too, so that a test notices when one is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    oracle = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            around = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(0, 0.2 if parameter.dim() == 1 else 0.15, generator=generator).add_(around)
        for name, buffer in oracle.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2, generator=generator)
    oracle.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as transformers loads it, with the plainest attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def oracle_logits(oracle: PreTrainedModel, sequences: list[list[int]]) -> Tensor:
    """[tokens, vocab], each sequence on its own."""
    return torch.cat([oracle(torch.tensor([sequence]), use_cache=False).logits[0] for sequence in sequences])
