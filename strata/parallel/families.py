"""Sharding as data: how ranks divide each parameter, by the names that all families share, for training and serving."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.comm.placement import Placement


@dataclass(frozen=True)
class Rule:
    """The placement of all parameters whose whole name matches the regular expression `pattern`."""

    pattern: str
    placement: Placement


Table = Sequence[Rule]

_RECURRENT = r"(mamba|mixer|linear_attn)"
_MLP = r"mlp\.(shared_experts?\.)?"
# Of what is in a layer, by its name there. Heads are divided, and with them states; `strata.parallel.stacked_rows` says
# how rows of stacked matrices stand. Every rank has the latents of all tokens.
_IN_LAYERS = (
    Rule(r"norm\.weight|(input|post_attention|(pre|post)_feedforward)_layernorm\.weight", Placement.PER_TOKEN),
    Rule(r"self_attn\.(([qkv]|q_b|kv_b)_proj\.(weight|bias)|sinks)", Placement.COLUMN),
    Rule(r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|(q_a|kv_a)_layernorm)\.(weight|bias)", Placement.PER_TOKEN),
    Rule(rf"{_MLP}(gate|up)_proj\.(weight|bias)", Placement.COLUMN),
    Rule(rf"(self_attn\.o_proj|{_RECURRENT}\.out_proj|{_MLP}down_proj)\.weight", Placement.ROW),
    # Added once, after the sum.
    Rule(rf"(self_attn\.o_proj|{_RECURRENT}\.out_proj|{_MLP}down_proj)\.bias", Placement.PER_TOKEN),
    Rule(r"mlp\.(gate|router|shared_expert_gate)\.(weight|bias|e_score_correction_bias)", Placement.PER_TOKEN),
    Rule(r"mlp\.experts\.(gate_up|down)_proj(_bias)?", Placement.EXPERT),
    Rule(r"(mamba|mixer)\.(in_proj|conv1d)\.(weight|bias)|linear_attn\.conv1d\.weight", Placement.STACKED),
    # Rows of the products of delta networks stand by heads.
    Rule(rf"{_RECURRENT}\.(dt_bias|A_log|D)|linear_attn\.in_proj_(qkvz|ba)\.weight", Placement.COLUMN),
    Rule(r"(mamba|mixer)\.norm\.weight", Placement.DIVIDED_NORM),
    Rule(r"linear_attn\.norm\.weight", Placement.PER_HEAD),
)
_HEAD_NORMS = r"self_attn\.[qk]_norm\.weight"
# Families whose norms of queries and keys are over all heads together.
_WHOLE_NORMS = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")


def sharding_table(architecture: str) -> Table:
    """The rules for the parameters of a family."""
    head_norms = Placement.DIVIDED_NORM if architecture in _WHOLE_NORMS else Placement.PER_HEAD
    in_layers = (*_IN_LAYERS, Rule(_HEAD_NORMS, head_norms))
    return (
        Rule(r"(model\.embed_tokens|lm_head)\.weight", Placement.VOCABULARY),
        Rule(r"model\.norm\.weight", Placement.PER_TOKEN),
        *(Rule(rf"model\.layers\.\d+\.({rule.pattern})", rule.placement) for rule in in_layers),
    )


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
