"""What an absent field of config.json means in each family, and which fields are a family's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from strata.files.fields import Fields
from strata.models.expert_config import (
    ExpertsConfig,
    deepseek_v2_fields,
    deepseek_v3_fields,
    glm4_moe_fields,
    gpt_oss_fields,
    mixtral_fields,
    qwen3_moe_fields,
    qwen3_next_fields,
    read_deepseek_v2,
    read_deepseek_v3,
    read_glm4_moe,
    read_gpt_oss,
    read_mixtral,
    read_qwen3_moe,
    read_qwen3_next,
)
from strata.models.family.fixed_fields import HEAD_NORMS, Fixed
from strata.models.family.latent_config import latent_fields
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig, gated_delta_fields, read_gated_delta
from strata.models.recurrence.granite_config import (
    granite_experts_fields,
    granite_hybrid_fields,
    read_granite_experts,
    read_granite_hybrid,
)
from strata.models.recurrence.state_space_config import StateSpaceConfig, mamba2_fields, read_mamba2

if TYPE_CHECKING:
    from strata.models.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"

_ReadExperts = Callable[[Fields, int, int], ExpertsConfig | None]
_WriteExperts = Callable[[ExpertsConfig], dict[str, Any]]
RecurrenceConfig = StateSpaceConfig | GatedDeltaConfig
_ReadRecurrence = Callable[[Fields, int, int], RecurrenceConfig]
_WriteRecurrence = Callable[..., dict[str, Any]]  # from the ModelConfig


@dataclass(frozen=True)
class FamilyConfig:
    """The values that transformers takes for absent fields, and the fields that other families do not have."""

    model_type: str
    max_length: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    norm_eps: float = 1e-6
    norm_eps_key: str = "rms_norm_eps"
    rope_theta: float = 10000.0
    # The base of layers with a window in families where those have a rope of their own, and the field that tells it.
    window_theta: float | None = None
    window_theta_key: str | None = None
    # What `partial_rotary_factor` is; None: there is no such field.
    partial_rotary: float | None = None
    # What `original_max_position_embeddings` is beside the rope's own object; None: it need not be there.
    original_length: int | None = None
    # The types of rope that the family has; None: all.
    rope_types: tuple[str, ...] | None = None
    window: int | None = 4096
    # Every so many layers one has no window, where `layer_types` does not tell; and the field that tells the number.
    full_interval: int = 1
    full_interval_key: str | None = None
    tied: bool = False
    # What `query_pre_attn_scalar` is; None: there is no such field.
    query_scalar: int | None = None
    softcaps: bool = False
    has_head_norms_field: bool = False
    # Latent attention, which rotates neighbours, or what `rope_interleave` says; None: other attention.
    latent: Literal["paired", "paired or halves"] | None = None
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    # Fields of biases, and what they are where absent.
    biases: tuple[str, ...] = ()
    biased: bool = False
    # Whether attention has sinks, and whether its products hold a gate beside each query.
    has_sinks: bool = False
    has_query_gates: bool = False
    # The rope's own object where there is none; None: the plain one.
    rope: dict[str, Any] | None = None
    # A method of `quantization_config` that describes weights which are read as floats.
    packed: str | None = None
    # Which layers have a sliding window: none, all, all if `use_sliding_window` says so ("switched"), those that
    # `layer_types` or `max_window_layers` name ("some"), those that `no_rope_layers` leaves unrotated, or those that
    # `layer_types` or `full_interval` name ("interval").
    sliding: Literal["none", "all", "switched", "some", "unrotated", "interval"] = "none"
    # Reads the fields of experts from layers and intermediate_size, and writes them.
    experts: tuple[_ReadExperts, _WriteExperts] | None = None
    # Reads the fields of recurrent layers from hidden_size and layers, and writes them.
    recurrence: tuple[_ReadRecurrence, _WriteRecurrence] | None = None
    # Whether there are layers with attention, and so the fields of heads, rope and MLPs.
    attends: bool = True
    # The field for the width of the MLP.
    intermediate_key: str = "intermediate_size"
    has_multipliers: bool = False
    # Whether `position_embedding_type` says if positions rotate queries and keys.
    has_position_type: bool = False
    # Other names of the model type in configs that name the architecture.
    also_called: tuple[str, ...] = ()
    # Fields of which one value says what this family does anyway, where that is not what all do.
    fixed: Mapping[str, Fixed] = field(default_factory=dict)

    def family_fields(self, config: ModelConfig) -> dict[str, Any]:
        values: dict[str, Any] = {key: getattr(config, key) for key in self.biases}
        values[self.activation_key] = self.activations[0]
        window = next((window for window in config.windows if window is not None), None)
        if self.sliding != "none" and (window is not None or self.sliding != "interval"):
            values["sliding_window"] = window
        if self.sliding in ("switched", "some", "unrotated"):
            values["use_sliding_window"] = window is not None
        if self.sliding in ("some", "unrotated", "interval"):
            values["layer_types"] = [FULL if one is None else SLIDING for one in config.windows]
        if self.sliding == "unrotated":
            values["no_rope_layers"] = [int(rotated) for rotated in config.rotated]
        if self.query_scalar is not None:
            values["query_pre_attn_scalar"] = config.query_scalar
        if self.has_head_norms_field:
            values["use_qk_norm"] = config.head_norms
        if self.softcaps:
            values["final_logit_softcapping"] = config.logit_softcap
        if self.partial_rotary is not None:
            values["partial_rotary_factor"] = config.partial_rotary
        if self.original_length is not None:
            original = getattr(config.rope, "original_max_position_embeddings", self.original_length)
            values["original_max_position_embeddings"] = original
        if config.latent is not None:
            values |= latent_fields(config.latent, self.latent == "paired or halves")
        if self.rope is not None and config.rope.rope_type == "default":
            values["rope_parameters"] = {"rope_theta": config.rope.theta, **config.rope.to_dict()}
        if self.experts is not None and config.experts is not None:
            values |= self.experts[1](config.experts)
        if self.has_position_type:
            values["position_embedding_type"] = "rope" if all(config.rotated) else None
        if self.recurrence is not None and config.recurrence is not None:
            values |= self.recurrence[1](config)
        return values


_BEHIND_DENSE = Fixed(1, "all layers behind the dense ones have experts")

FAMILY_CONFIGS = {
    "LlamaForCausalLM": FamilyConfig("llama", 2048, bos_id=1, eos_id=2, biases=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": FamilyConfig("mistral", 131072, num_kv_heads=8, bos_id=1, eos_id=2, sliding="all"),
    "Qwen2ForCausalLM": FamilyConfig(
        "qwen2",
        32768,
        num_kv_heads=32,
        sliding="some",
        fixed={"qkv_bias": Fixed(True, "queries, keys and values have biases")},
    ),
    "Qwen3ForCausalLM": FamilyConfig(
        "qwen3",
        32768,
        num_kv_heads=32,
        head_dim=128,
        sliding="some",
        biases=("attention_bias",),
        fixed=HEAD_NORMS,
    ),
    "MixtralForCausalLM": FamilyConfig(
        "mixtral",
        131072,
        num_kv_heads=8,
        bos_id=1,
        eos_id=2,
        norm_eps=1e-5,
        rope_theta=1000000.0,
        window=None,
        sliding="all",
        experts=(read_mixtral, mixtral_fields),
        fixed={
            "norm_topk_prob": Fixed(True, "the weights of a token's experts are divided by their sum"),
            "router_jitter_noise": Fixed(0.0, "routing has no noise"),
        },
    ),
    "Qwen3MoeForCausalLM": FamilyConfig(
        "qwen3_moe",
        32768,
        num_kv_heads=4,
        sliding="switched",
        biases=("attention_bias",),
        experts=(read_qwen3_moe, qwen3_moe_fields),
        fixed=HEAD_NORMS,
    ),
    "SmolLM3ForCausalLM": FamilyConfig(
        "smollm3",
        32768,
        num_kv_heads=4,
        bos_id=128000,
        eos_id=128001,
        pad_id=128004,
        rope_theta=2000000.0,
        window=None,
        tied=True,
        biases=("attention_bias", "mlp_bias"),
        sliding="unrotated",
    ),
    "Olmo2ForCausalLM": FamilyConfig(
        "olmo2", 2048, eos_id=50279, pad_id=1, norm_eps=1e-5, biases=("attention_bias",), fixed=HEAD_NORMS
    ),
    "Phi3ForCausalLM": FamilyConfig(
        "phi3",
        4096,
        bos_id=1,
        eos_id=32000,
        pad_id=32000,
        norm_eps=1e-5,
        window=None,
        partial_rotary=1.0,
        original_length=4096,
        rope_types=("default", "longrope", "su"),
        sliding="all",
    ),
    "Olmo3ForCausalLM": FamilyConfig(
        "olmo3",
        2048,
        eos_id=50279,
        pad_id=1,
        norm_eps=1e-5,
        rope_theta=500000.0,
        window_theta=500000.0,
        full_interval=4,
        biases=("attention_bias",),
        sliding="interval",
        fixed=HEAD_NORMS,
    ),
    "Gemma3ForCausalLM": FamilyConfig(
        "gemma3_text",
        131072,
        num_kv_heads=4,
        head_dim=256,
        bos_id=2,
        eos_id=1,
        pad_id=0,
        rope_theta=1000000.0,
        window_theta=10000.0,
        window_theta_key="rope_local_base_freq",
        full_interval=6,
        full_interval_key="sliding_window_pattern",
        tied=True,
        query_scalar=256,
        softcaps=True,
        activation_key="hidden_activation",
        activations=("gelu_pytorch_tanh",),
        biases=("attention_bias",),
        sliding="interval",
        fixed=HEAD_NORMS,
    ),
    "Glm4MoeForCausalLM": FamilyConfig(
        "glm4_moe",
        131072,
        num_kv_heads=8,
        norm_eps=1e-5,
        partial_rotary=0.5,
        has_head_norms_field=True,
        biases=("attention_bias",),
        experts=(read_glm4_moe, glm4_moe_fields),
    ),
    # Nothing bounds its sequences; without `max_position_embeddings` they may have a million tokens.
    "Mamba2ForCausalLM": FamilyConfig(
        "mamba2",
        2**20,
        bos_id=0,
        eos_id=2,
        pad_id=1,
        norm_eps=1e-5,
        norm_eps_key="layer_norm_epsilon",
        recurrence=(read_mamba2, mamba2_fields),
        attends=False,
        fixed={"rms_norm": Fixed(True, "its gated norm is always there")},
    ),
    "DeepseekV2ForCausalLM": FamilyConfig(
        "deepseek_v2",
        2048,
        bos_id=1,
        eos_id=2,
        rope_types=("default", "linear", "yarn"),
        latent="paired",
        biases=("attention_bias", "mlp_bias"),
        experts=(read_deepseek_v2, deepseek_v2_fields),
        fixed={"scoring_func": Fixed("softmax", "this family scores experts so"), "moe_layer_freq": _BEHIND_DENSE},
    ),
    "DeepseekV3ForCausalLM": FamilyConfig(
        "deepseek_v3",
        4096,
        bos_id=0,
        eos_id=1,
        rope_types=("default", "linear", "yarn"),
        latent="paired or halves",
        biases=("attention_bias",),
        experts=(read_deepseek_v3, deepseek_v3_fields),
        also_called=("kimi_k2",),
        fixed={
            "moe_layer_freq": _BEHIND_DENSE,
            "scoring_func": Fixed("sigmoid", "this family scores experts so"),
            "topk_method": Fixed("noaux_tc", "experts are chosen by biased scores"),
        },
    ),
    "GraniteMoeHybridForCausalLM": FamilyConfig(
        "granitemoehybrid",
        2048,
        bos_id=1,
        eos_id=2,
        biases=("attention_bias",),
        experts=(read_granite_experts, granite_experts_fields),
        recurrence=(read_granite_hybrid, granite_hybrid_fields),
        intermediate_key="shared_intermediate_size",
        has_multipliers=True,
        has_position_type=True,
        fixed={"normalization_function": Fixed("rmsnorm", "its norms are RMS norms")},
    ),
    "Qwen3NextForCausalLM": FamilyConfig(
        "qwen3_next",
        32768,
        num_kv_heads=2,
        head_dim=256,
        partial_rotary=0.25,
        biases=("attention_bias",),
        has_query_gates=True,
        experts=(read_qwen3_next, qwen3_next_fields),
        recurrence=(read_gated_delta, gated_delta_fields),
        fixed=HEAD_NORMS,
    ),
    "GptOssForCausalLM": FamilyConfig(
        "gpt_oss",
        131072,
        num_kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        rope_theta=150000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        window=128,
        full_interval=2,
        biases=("attention_bias",),
        biased=True,
        has_sinks=True,
        packed="mxfp4",
        sliding="interval",
        experts=(read_gpt_oss, gpt_oss_fields),
    ),
}
