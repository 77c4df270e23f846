"""What config.json says of Granite 4's hybrids: which layers attend, their state spaces, and numbers that multiply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from strata.files.fields import Fields
from strata.models.expert_config import ExpertsConfig, mixtral_fields, read_balance_weight
from strata.models.recurrence.state_space_config import SpaceKeys, StateSpaceConfig, read_space, space_fields

if TYPE_CHECKING:
    from strata.models.config import ModelConfig

# As transformers 5 calls layers, and as checkpoints do.
_KINDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}
_MAMBA = SpaceKeys(
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_proj_bias", "mamba_conv_bias"
)


@dataclass(frozen=True)
class Multipliers:
    """Numbers that embeddings, what each branch adds, attention scores (instead of the root of head_dim), and hidden
    states in front of the head are multiplied by."""

    embedding: float
    residual: float
    attention: float
    head: float


def read_multipliers(fields: Fields) -> Multipliers:
    return Multipliers(
        fields.number("embedding_multiplier", 1.0),
        fields.number("residual_multiplier", 1.0),
        fields.number("attention_multiplier", 1.0),
        1.0 / fields.number("logits_scaling", 1.0),
    )


def read_granite_hybrid(fields: Fields, hidden_size: int, num_layers: int) -> StateSpaceConfig:
    """The fields of transformers' GraniteMoeHybridConfig but those of experts."""
    kinds = [fields.take(key, None) for key in ("layer_types", "layers_block_type")]
    types = next((kind for kind in kinds if kind is not None), ["linear_attention"] * num_layers)
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(_KINDS) for kind in types):
        raise fields.wrong("layer_types", types, f"a list of {num_layers} of " + ", ".join(map(repr, _KINDS)))
    fields.take("mamba_chunk_size", None)  # how transformers computes
    fields.take("init_method", None)  # what training began with
    heads, inner = fields.count("mamba_n_heads", 128), fields.count("mamba_expand", 2) * hidden_size
    if inner % heads:
        raise fields.wrong("mamba_n_heads", heads, f"a divisor of mamba_expand * hidden_size = {inner}")
    if (given := fields.take("mamba_d_head", "auto")) not in ("auto", None, inner // heads):
        raise fields.wrong("mamba_d_head", given, f"{inner // heads} or 'auto' with {heads} heads")
    layers = tuple(_KINDS[kind] for kind in types)
    space = read_space(fields, _MAMBA, layers, heads, inner // heads, groups=1, state_size=256)
    return replace(space, has_mlps=True)


def read_granite_experts(fields: Fields, num_layers: int, shared_size: int) -> ExpertsConfig | None:
    """None where there are none. shared_size: of the MLP, which every token goes to; experts are as wide as
    `intermediate_size`."""
    count, width = fields.count("num_local_experts", 8, least=0), fields.count("intermediate_size", 11008)
    per_token, balance = fields.count("num_experts_per_tok", 2, least=0), read_balance_weight(fields)
    if not count:
        return None
    if not 0 < per_token <= count:
        raise fields.wrong("num_experts_per_tok", per_token, f"1 to num_local_experts = {count}")
    # The softmax of the best logits is that of all, divided by the sum of the best.
    return ExpertsConfig(count, per_token, width, True, (True,) * num_layers, balance, shared_size=shared_size)


def granite_experts_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_granite_experts` reads of a model with some."""
    return mixtral_fields(experts) | {"intermediate_size": experts.intermediate_size}


def granite_hybrid_fields(config: ModelConfig) -> dict[str, Any]:
    """What `read_granite_hybrid` reads, and `read_multipliers`."""
    space, by = config.recurrence, config.multipliers
    assert isinstance(space, StateSpaceConfig)
    assert by is not None
    return {
        "layer_types": ["linear_attention" if recurrent else "full_attention" for recurrent in space.layers],
        **({"num_local_experts": 0} if config.experts is None else {}),
        "mamba_expand": space.inner_size // config.hidden_size,
        "mamba_d_head": space.head_dim,
        **space_fields(space, _MAMBA),
        "embedding_multiplier": by.embedding,
        "residual_multiplier": by.residual,
        "attention_multiplier": by.attention,
        "logits_scaling": 1.0 / by.head,
    }
