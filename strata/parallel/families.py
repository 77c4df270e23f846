"""Sharding as data: for every family, how ranks divide each parameter. Training and serving read one table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from strata.comm.placement import Placement


@dataclass(frozen=True)
class Rule:
    """The placement of all parameters whose whole name matches the regular expression `pattern`."""

    pattern: str
    placement: Placement


Table = Sequence[Rule]

_ATTENTION_AND_ENDS = (
    Rule(r"(model\.embed_tokens|lm_head)\.weight", Placement.VOCABULARY),
    Rule(r"model\.layers\.\d+\.self_attn\.[qkv]_proj\.(weight|bias)", Placement.COLUMN),
    Rule(r"model\.layers\.\d+\.self_attn\.o_proj\.weight", Placement.ROW),
    # Added once, after the sum.
    Rule(r"model\.layers\.\d+\.self_attn\.o_proj\.bias", Placement.PER_TOKEN),
    Rule(r"(model\.norm|model\.layers\.\d+\.(input|post_attention)_layernorm)\.weight", Placement.PER_TOKEN),
)
_HEAD_NORMS = (Rule(r"model\.layers\.\d+\.self_attn\.[qk]_norm\.weight", Placement.PER_HEAD),)
_WHOLE_NORMS = (Rule(r"model\.layers\.\d+\.self_attn\.[qk]_norm\.weight", Placement.DIVIDED_NORM),)
_BRANCH_NORMS = (Rule(r"model\.layers\.\d+\.(pre|post)_feedforward_layernorm\.weight", Placement.PER_TOKEN),)
_MLP = (
    Rule(r"model\.layers\.\d+\.mlp\.(gate|up)_proj\.(weight|bias)", Placement.COLUMN),
    Rule(r"model\.layers\.\d+\.mlp\.down_proj\.weight", Placement.ROW),
    Rule(r"model\.layers\.\d+\.mlp\.down_proj\.bias", Placement.PER_TOKEN),
)
_EXPERTS = (
    Rule(r"model\.layers\.\d+\.mlp\.gate\.weight", Placement.PER_TOKEN),
    Rule(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj", Placement.EXPERT),
)
_SHARED_EXPERTS = (
    Rule(r"model\.layers\.\d+\.mlp\.gate\.e_score_correction_bias", Placement.PER_TOKEN),
    Rule(r"model\.layers\.\d+\.mlp\.shared_experts\.(gate|up)_proj\.weight", Placement.COLUMN),
    Rule(r"model\.layers\.\d+\.mlp\.shared_experts\.down_proj\.weight", Placement.ROW),
)
# Heads are divided, and with them their states; `strata.parallel.stacked_rows` says how rows stand.
_STATE_SPACES = (
    Rule(r"model\.layers\.\d+\.(mamba|mixer)\.(in_proj|conv1d)\.(weight|bias)", Placement.STACKED),
    Rule(r"model\.layers\.\d+\.(mamba|mixer)\.(dt_bias|A_log|D)", Placement.COLUMN),
    Rule(r"model\.layers\.\d+\.(mamba|mixer)\.norm\.weight", Placement.DIVIDED_NORM),
    Rule(r"model\.layers\.\d+\.(mamba|mixer)\.out_proj\.weight", Placement.ROW),
    Rule(r"model\.layers\.\d+\.(mamba|mixer)\.out_proj\.bias", Placement.PER_TOKEN),
)
_MAMBA2 = (
    Rule(r"(model\.embed_tokens|lm_head)\.weight", Placement.VOCABULARY),
    Rule(r"model\.(norm|layers\.\d+\.norm)\.weight", Placement.PER_TOKEN),
)
_DELTA_NETS = (
    # Rows of the products stand by heads.
    Rule(r"model\.layers\.\d+\.linear_attn\.(in_proj_qkvz\.weight|in_proj_ba\.weight|dt_bias|A_log)", Placement.COLUMN),
    Rule(r"model\.layers\.\d+\.linear_attn\.conv1d\.weight", Placement.STACKED),
    Rule(r"model\.layers\.\d+\.linear_attn\.norm\.weight", Placement.PER_HEAD),
    Rule(r"model\.layers\.\d+\.linear_attn\.out_proj\.weight", Placement.ROW),
    Rule(r"model\.layers\.\d+\.mlp\.shared_expert\.(gate|up)_proj\.weight", Placement.COLUMN),
    Rule(r"model\.layers\.\d+\.mlp\.shared_expert\.down_proj\.weight", Placement.ROW),
    Rule(r"model\.layers\.\d+\.mlp\.shared_expert_gate\.weight", Placement.PER_TOKEN),
)

# Heads are divided; every rank has the latents of all tokens.
_LATENT_ATTENTION = (
    Rule(r"model\.layers\.\d+\.self_attn\.(q_b|kv_b)_proj\.weight", Placement.COLUMN),
    Rule(r"model\.layers\.\d+\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.(weight|bias)", Placement.PER_TOKEN),
    Rule(r"model\.layers\.\d+\.self_attn\.(q_a|kv_a)_layernorm\.weight", Placement.PER_TOKEN),
    Rule(r"model\.layers\.\d+\.mlp\.shared_experts\.(gate|up)_proj\.bias", Placement.COLUMN),
    Rule(r"model\.layers\.\d+\.mlp\.shared_experts\.down_proj\.bias", Placement.PER_TOKEN),
)
_DEEPSEEK = _ATTENTION_AND_ENDS + _LATENT_ATTENTION + _MLP + _EXPERTS + _SHARED_EXPERTS
_SINKS = (Rule(r"model\.layers\.\d+\.self_attn\.sinks", Placement.COLUMN),)
_BIASED_EXPERTS = (
    Rule(r"model\.layers\.\d+\.mlp\.router\.(weight|bias)", Placement.PER_TOKEN),
    Rule(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj(_bias)?", Placement.EXPERT),
)

TABLES: Mapping[str, Table] = {
    "LlamaForCausalLM": _ATTENTION_AND_ENDS + _MLP,
    "MistralForCausalLM": _ATTENTION_AND_ENDS + _MLP,
    "Qwen2ForCausalLM": _ATTENTION_AND_ENDS + _MLP,
    "Qwen3ForCausalLM": _ATTENTION_AND_ENDS + _HEAD_NORMS + _MLP,
    "MixtralForCausalLM": _ATTENTION_AND_ENDS + _EXPERTS,
    "Qwen3MoeForCausalLM": _ATTENTION_AND_ENDS + _HEAD_NORMS + _MLP + _EXPERTS,
    "SmolLM3ForCausalLM": _ATTENTION_AND_ENDS + _MLP,
    "Olmo2ForCausalLM": _ATTENTION_AND_ENDS + _WHOLE_NORMS + _BRANCH_NORMS + _MLP,
    "Phi3ForCausalLM": _ATTENTION_AND_ENDS + _MLP,
    "Olmo3ForCausalLM": _ATTENTION_AND_ENDS + _WHOLE_NORMS + _BRANCH_NORMS + _MLP,
    "Gemma3ForCausalLM": _ATTENTION_AND_ENDS + _HEAD_NORMS + _BRANCH_NORMS + _MLP,
    "Glm4MoeForCausalLM": _ATTENTION_AND_ENDS + _HEAD_NORMS + _MLP + _EXPERTS + _SHARED_EXPERTS,
    "Mamba2ForCausalLM": _MAMBA2 + _STATE_SPACES,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "GraniteMoeHybridForCausalLM": _ATTENTION_AND_ENDS + _STATE_SPACES + _MLP + _EXPERTS + _SHARED_EXPERTS,
    "Qwen3NextForCausalLM": _ATTENTION_AND_ENDS + _HEAD_NORMS + _DELTA_NETS + _MLP + _EXPERTS,
    "GptOssForCausalLM": _ATTENTION_AND_ENDS + _SINKS + _BIASED_EXPERTS,
}


def placements(names: Iterable[str], table: Table) -> dict[str, Placement]:
    """The placement of every parameter. Raises ValueError for a name that not exactly one rule of the table matches."""
    found = {}
    for name in names:
        matching = [rule for rule in table if re.fullmatch(rule.pattern, name)]
        if len(matching) != 1:
            which = "no rule" if not matching else f"{len(matching)} rules"
            raise ValueError(
                f"{which} of the sharding table for parameter {name!r}; give it one in parallel/families.py"
            )
        found[name] = matching[0].placement
    return found


def span(size: int, parts: int, index: int) -> tuple[int, int]:
    """First and end of part `index` when `size` rows are divided into `parts` that differ by at most one row."""
    return size * index // parts, size * (index + 1) // parts
