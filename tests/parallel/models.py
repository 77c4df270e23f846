"""Small models of every family whose heads two and four ranks divide, with batches and the loss of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from strata.comm.mesh import Mesh
from strata.kernels.loss.loss import linear_cross_entropy
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.parallel.data_parallel import gradient_axes
from strata.parallel.layout import Layout
from strata.parallel.parallelize import Parallel
from strata.train.checkpoints.state import fill, state_shards

# Odd sizes: no number of ranks divides the vocabulary, the width of the MLP or the number of tokens.
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-biases-tied": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3-biases-tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "mlp_only_layers": [0],
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 1, 0, 1, 0]},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 5, "sliding_window_pattern": 2},
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
}

# With biases of routers, which no gradient moves.
BIASED_CONFIGS: dict[str, dict[str, Any]] = {
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "use_qk_norm": True,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 10,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}

_V3 = BIASED_CONFIGS["deepseek-v3"]
# Which are trained with whole matrices on every rank.
WHOLE_CONFIGS = {
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 6,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 10,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "shared_expert_intermediate_size": 9,
    },
    "deepseek-v2": {
        **{key: value for key, value in _V3.items() if key not in ("n_group", "topk_group")},
        "architectures": ["DeepseekV2ForCausalLM"],
    },
}


def config_of(name: str, **changes: Any) -> ModelConfig:
    return config_from_dict(SIZES | (CONFIGS | BIASED_CONFIGS | WHOLE_CONFIGS)[name] | changes)


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> CausalLM:
    """All parameters random, norms and biases too, so that a gradient that is missing shows."""
    model = build(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.3
            parameter.copy_(drawn + (parameter.dim() == 1))
    return model


def fill_masters(parallel: Parallel, layout: Layout, mesh: Mesh, values: Iterable[tuple[str, Tensor]]) -> None:
    """Whole parameters into the masters of a rank, as a trainer begins."""
    axes = gradient_axes(mesh, parallel.sharding, layout.zero)
    fill(state_shards(parallel.gradients.shards, {}, parallel.sharding, axes), values)


def random_batch(config: ModelConfig, lengths: list[int], seed: int = 0) -> tuple[Batch, Tensor]:
    """A packed batch, and the targets of its tokens, [tokens] int64: the next token, or -100 for the last of each
    sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (sum(lengths),), generator=generator, dtype=torch.int32)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths]).int()
    targets = tokens.roll(-1).long()
    targets[offsets[1:].long() - 1] = -100
    return Batch(tokens, positions, offsets, max(lengths)), targets


def moved(batch: Batch, targets: Tensor, device: torch.device) -> tuple[Batch, Tensor]:
    """The same on a device."""
    tensors = (one.to(device) for one in (batch.tokens, batch.positions, batch.offsets))
    return Batch(*tensors, batch.longest), targets.to(device)


def head_weight(model: CausalLM) -> Tensor:
    return model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight


def loss_of(model: CausalLM, batch: Batch, targets: Tensor) -> Tensor:
    """The sum of the losses of all tokens."""
    loss: Tensor = linear_cross_entropy(model(batch), head_weight(model), targets).sum()
    return loss


def gradients_of(model: CausalLM) -> dict[str, Tensor]:
    """By name; an error for a parameter that has none."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found
