"""What config.json says of experts: how many there are, how many a token goes to, and which layers have them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from strata.files.fields import Fields
from strata.kernels.activation.silu_mul import Clamp
from strata.kernels.moe.route import SOFTMAX, ExpertChoice


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of one model, alike in all layers that have some.

    count: experts of a layer. per_token: how many of them a token goes to. intermediate_size: width of an expert.
    normalized: whether the weights of a token's experts are divided by their sum.
    layers: for each layer whether it has experts instead of a plain MLP.
    balance_weight: router_aux_loss_coef, the weight of the balancing loss in training.
    choice: how experts are scored and chosen. biased: whether the choice adds a bias of the checkpoint.
    wide_scores: whether logits are computed in float32.
    shared_size: width of the experts that every token goes to, together; 0: there are none.
    clamp: of gated products within bounds; router and experts have biases then. None: gpt-oss alone has them.
    local: of a part of a model, the numbers of the experts that it holds, of which the router knows all; None: all.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    layers: tuple[bool, ...]
    balance_weight: float
    choice: ExpertChoice = SOFTMAX
    biased: bool = False
    wide_scores: bool = False
    shared_size: int = 0
    clamp: Clamp | None = None
    local: tuple[int, ...] | None = None

    @property
    def local_count(self) -> int:
        return self.count if self.local is None else len(self.local)


def read_mixtral(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """Mixtral: experts in every layer, as wide as `intermediate_size`; weights are always normalized."""
    count, per_token = _read_counts(fields, "num_local_experts", 8, 2)
    return ExpertsConfig(count, per_token, intermediate_size, True, (True,) * num_layers, read_balance_weight(fields))


def read_qwen3_moe(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """Qwen3-MoE: experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    return _read_qwen3(fields, num_layers, (128, 8, 768, False))


def read_qwen3_next(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """Qwen3-Next: as Qwen3-MoE, with an expert that every token goes to and other numbers for absent fields."""
    shared = fields.count("shared_expert_intermediate_size", 512)
    return replace(_read_qwen3(fields, num_layers, (512, 10, 512, True)), shared_size=shared)


def _read_qwen3(fields: Fields, num_layers: int, absent: tuple[int, int, int, bool]) -> ExpertsConfig:
    """absent: experts, those of a token, their width, and whether weights are normalized, where no field tells."""
    key = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    count, per_token = _read_counts(fields, key, *absent[:2])
    step = fields.count("decoder_sparse_step", 1)
    dense = _read_dense_layers(fields, num_layers)
    return ExpertsConfig(
        count,
        per_token,
        fields.count("moe_intermediate_size", absent[2]),
        fields.flag("norm_topk_prob", absent[3]),
        tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)),
        read_balance_weight(fields),
    )


def read_glm4_moe(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """GLM-4 MoE: experts in all layers but the first `first_k_dense_replace`, scored by sigmoids within groups."""
    absent = _BehindDense("num_local_experts", 128, 8, width=1408, shared=1, dense=1)
    return _read_sigmoids(fields, num_layers, absent, read_balance_weight(fields))


def read_deepseek_v3(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """DeepSeek-V3: as GLM-4 MoE, with other numbers for absent fields."""
    _take_deepseek_bookkeeping(fields)
    absent = _BehindDense("num_local_experts", 256, 8, width=2048, shared=1, dense=3, groups=8, kept=4, scale=2.5)
    return _read_sigmoids(fields, num_layers, absent, 0.0)


def read_deepseek_v2(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """DeepSeek-V2: experts scored by a softmax, whose weights are never normalized; chosen from all, or from the best
    groups, as `topk_method` says."""
    absent = _BehindDense("num_experts", 64, None, width=1407, shared=2, dense=0)
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    fields.only("norm_topk_prob", False, "this family multiplies the weights of experts by routed_scaling_factor alone")
    _take_deepseek_bookkeeping(fields)
    if method == "greedy":
        for name in ("n_group", "topk_group"):
            fields.count(name, 1)
    return _read_behind_dense(
        fields, num_layers, absent, 0.0, ExpertChoice("softmax", group_score="max"), normalized=False
    )


class _BehindDense(NamedTuple):
    """Experts behind a few dense layers: another name of the field that counts them, and what absent fields mean."""

    also: str
    experts: int
    per_token: int | None
    width: int
    shared: int
    dense: int
    groups: int = 1
    kept: int = 1
    scale: float = 1.0


def _read_sigmoids(fields: Fields, num_layers: int, absent: _BehindDense, balance: float) -> ExpertsConfig:
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):  # layers that predict further tokens, which are not read
        fields.count(key, 1, least=0)
    normalized = fields.flag("norm_topk_prob", True)
    choice = ExpertChoice("sigmoid", group_score="top2")
    return replace(_read_behind_dense(fields, num_layers, absent, balance, choice, normalized), biased=True)


def _read_behind_dense(
    fields: Fields, num_layers: int, absent: _BehindDense, balance: float, choice: ExpertChoice, normalized: bool
) -> ExpertsConfig:
    """choice: groups and scale follow here."""
    key = absent.also if fields.has(absent.also) else "n_routed_experts"
    count, per_token = _read_counts(fields, key, absent.experts, absent.per_token)
    smallest = 2 if choice.group_score == "top2" else 1  # a group that is scored by its best two has two
    groups, kept = _read_groups(fields, key, count, per_token, absent, smallest)
    dense = fields.count("first_k_dense_replace", absent.dense, least=0)
    width = fields.count("moe_intermediate_size", absent.width)
    scale = fields.number("routed_scaling_factor", absent.scale)
    return ExpertsConfig(
        count,
        per_token,
        width,
        normalized,
        tuple(layer >= dense for layer in range(num_layers)),
        balance,
        choice._replace(groups=groups, kept=kept, scale=scale),
        wide_scores=True,
        shared_size=width * fields.count("n_shared_experts", absent.shared),
    )


def deepseek_v2_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_deepseek_v2` reads."""
    method = "greedy" if experts.choice.groups == 1 else "group_limited_greedy"
    return deepseek_v3_fields(experts) | {"topk_method": method}


def deepseek_v3_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_deepseek_v3` reads."""
    values = glm4_moe_fields(experts)
    del values["router_aux_loss_coef"]
    return values


def _take_deepseek_bookkeeping(fields: Fields) -> None:
    """What the published configs hold besides, of training."""
    for key in ("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits"):
        fields.take(key, None)


def _read_groups(
    fields: Fields, key: str, count: int, per_token: int, absent: _BehindDense, smallest: int
) -> tuple[int, int]:
    """How many groups experts stand in and how many are chosen from; smallest: experts of a group, if there are
    several."""
    groups, kept = fields.count("n_group", absent.groups), fields.count("topk_group", absent.kept)
    if count % groups or (groups > 1 and count // groups < smallest):
        raise fields.wrong("n_group", groups, f"a divisor of {key} = {count} that leaves groups of at least {smallest}")
    if kept > groups or kept * (count // groups) < per_token:
        raise fields.wrong("topk_group", kept, f"at most n_group = {groups}, with {per_token} experts or more")
    return groups, kept


def glm4_moe_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_glm4_moe` reads."""
    return _common_fields(experts, "n_routed_experts") | {
        "moe_intermediate_size": experts.intermediate_size,
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "norm_topk_prob": experts.normalized,
        "first_k_dense_replace": experts.layers.count(False),
        "n_group": experts.choice.groups,
        "topk_group": experts.choice.kept,
        "routed_scaling_factor": experts.choice.scale,
    }


def read_gpt_oss(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """gpt-oss: experts in every layer, as wide as `intermediate_size`. Its softmax over the logits of a token's experts
    is that over all experts, divided by their sum.
    """
    count, per_token = _read_counts(fields, "num_local_experts", 128, 4)
    fields.only("experts_per_token", per_token, f"num_experts_per_tok is {per_token}")
    fields.count("initial_context_length", 4096)  # what rope_scaling says again
    clamp = Clamp(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    balance = read_balance_weight(fields)
    return ExpertsConfig(count, per_token, intermediate_size, True, (True,) * num_layers, balance, clamp=clamp)


def gpt_oss_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_gpt_oss` reads."""
    assert experts.clamp is not None
    own = {"swiglu_alpha": experts.clamp.alpha, "swiglu_limit": experts.clamp.limit}
    return mixtral_fields(experts) | own


def mixtral_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_mixtral` reads."""
    return _common_fields(experts, "num_local_experts")


def qwen3_moe_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_qwen3_moe` reads."""
    return _common_fields(experts, "num_experts") | {
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(experts.layers) if not sparse],
    }


def _common_fields(experts: ExpertsConfig, key: str) -> dict[str, Any]:
    """key: the field for the number of experts."""
    return {
        key: experts.count,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": experts.balance_weight,
    }


def qwen3_next_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_qwen3_next` reads."""
    return qwen3_moe_fields(experts) | {"shared_expert_intermediate_size": experts.shared_size}


def _read_counts(fields: Fields, key: str, default: int, default_per_token: int | None) -> tuple[int, int]:
    """default_per_token: None: it has to be there."""
    count, absent = fields.count(key, default), {} if default_per_token is None else {"default": default_per_token}
    per_token = fields.count("num_experts_per_tok", **absent)
    if per_token > count:
        raise fields.wrong("num_experts_per_tok", per_token, f"at most {key} = {count}")
    return count, per_token


def _read_dense_layers(fields: Fields, num_layers: int) -> list[int]:
    layers = fields.take("mlp_only_layers", None) or []
    known = range(num_layers)
    if not isinstance(layers, list) or any(type(layer) is not int or layer not in known for layer in layers):
        raise fields.wrong("mlp_only_layers", layers, f"a list of layers from 0 to {num_layers - 1}")
    return layers


def read_balance_weight(fields: Fields) -> float:
    fields.flag("output_router_logits", False)  # adds the balancing loss to the loss; the logits stay
    return fields.number("router_aux_loss_coef", 0.001, positive=False)
