"""A small model in 16 bits, and how its packed checkpoints are read here: bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.save import save
from tests.dummies import randomize

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_llama(folder: Path, **own: Any) -> Path:
    config = config_from_dict(LLAMA | own, "test")
    model = build(config).to(torch.bfloat16)
    randomize(model, 0)
    save(model, config, folder)
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            found |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118, which is no dict
    return found


def unpacked(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The matrix `name` in float32, from the tensors that stand for it."""
    base = name.removesuffix(".weight")
    if f"{base}.weight_packed" in tensors:
        words = tensors[f"{base}.weight_packed"]
        _, columns = tensors[f"{base}.weight_shape"].tolist()
        bits = 4 if columns > 4 * words.shape[1] else 8
        codes = [(words >> (bits * place)) & (2**bits - 1) for place in range(32 // bits)]
        values = torch.stack(codes, -1).flatten(1)[:, :columns].float() - 2 ** (bits - 1)
    else:
        values = tensors[name].float()
    scale = tensors[f"{base}.weight_scale"].float()
    (rows, columns), is_block = values.shape, scale.shape[0] < values.shape[0]
    down = torch.arange(rows) // (128 if is_block else 1)
    across = torch.arange(columns) // (128 if is_block else columns // scale.shape[1])
    return values * scale[down][:, across]
