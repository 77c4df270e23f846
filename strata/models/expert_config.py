"""What config.json says of experts: how many there are, how many a token goes to, and which layers have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.files.fields import Fields
from strata.kernels.moe.route import SOFTMAX, Choice


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of one model, alike in all layers that have some.

    count: experts of a layer. per_token: how many of them a token goes to. intermediate_size: width of an expert.
    normalized: whether the weights of a token's experts are divided by their sum.
    layers: for each layer whether it has experts instead of a plain MLP.
    balance_weight: router_aux_loss_coef, the weight of the balancing loss in training.
    choice: how experts are scored and chosen. biased: whether the choice adds a bias of the checkpoint.
    shared_size: width of the experts that every token goes to, together; 0: there are none.
    held: of a part of a model, the numbers of the experts that it holds, of which the router knows all; None: all.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    layers: tuple[bool, ...]
    balance_weight: float
    choice: Choice = SOFTMAX
    biased: bool = False
    shared_size: int = 0
    held: tuple[int, ...] | None = None

    @property
    def held_count(self) -> int:
        return self.count if self.held is None else len(self.held)


def read_mixtral(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """Mixtral: experts in every layer, as wide as `intermediate_size`; weights are always normalized."""
    count, per_token = _read_counts(fields, "num_local_experts", 8, 2)
    fields.only("router_jitter_noise", 0.0, "routing has no noise")
    return ExpertsConfig(count, per_token, intermediate_size, True, (True,) * num_layers, _read_balance_weight(fields))


def read_qwen3_moe(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """Qwen3-MoE: experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    key = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    count, per_token = _read_counts(fields, key, 128, 8)
    step = fields.count("decoder_sparse_step", 1)
    dense = _read_dense_layers(fields, num_layers)
    return ExpertsConfig(
        count,
        per_token,
        fields.count("moe_intermediate_size", 768),
        fields.flag("norm_topk_prob", False),
        tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)),
        _read_balance_weight(fields),
    )


def read_glm4_moe(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """GLM-4 MoE: experts in all layers but the first `first_k_dense_replace`, scored by sigmoids within groups."""
    key = "num_local_experts" if fields.has("num_local_experts") else "n_routed_experts"
    count, per_token = _read_counts(fields, key, 128, 8)
    groups, kept = fields.count("n_group", 1), fields.count("topk_group", 1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise fields.wrong("n_group", groups, f"a divisor of {key} = {count} that leaves groups of at least 2")
    if kept > groups or kept * (count // groups) < per_token:
        raise fields.wrong("topk_group", kept, f"at most n_group = {groups}, with {per_token} experts or more")
    fields.count("num_nextn_predict_layers", 1, least=0)  # further layers, which are not read
    fields.count("num_mtp_layers", 1, least=0)
    dense = fields.count("first_k_dense_replace", 1, least=0)
    width = fields.count("moe_intermediate_size", 1408)
    return ExpertsConfig(
        count,
        per_token,
        width,
        fields.flag("norm_topk_prob", True),
        tuple(layer >= dense for layer in range(num_layers)),
        _read_balance_weight(fields),
        Choice("sigmoid", groups, kept, "top2", fields.number("routed_scaling_factor", 1.0)),
        biased=True,
        shared_size=width * fields.count("n_shared_experts", 1),
    )


def glm4_moe_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_glm4_moe` reads."""
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "norm_topk_prob": experts.normalized,
        "first_k_dense_replace": experts.layers.count(False),
        "n_group": experts.choice.groups,
        "topk_group": experts.choice.kept,
        "routed_scaling_factor": experts.choice.scale,
        "router_aux_loss_coef": experts.balance_weight,
    }


def mixtral_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_mixtral` reads."""
    return {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": experts.balance_weight,
    }


def qwen3_moe_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """What `read_qwen3_moe` reads."""
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(experts.layers) if not sparse],
        "router_aux_loss_coef": experts.balance_weight,
    }


def _read_counts(fields: Fields, key: str, default: int, default_per_token: int) -> tuple[int, int]:
    count = fields.count(key, default)
    per_token = fields.count("num_experts_per_tok", default_per_token)
    if per_token > count:
        raise fields.wrong("num_experts_per_tok", per_token, f"at most {key} = {count}")
    return count, per_token


def _read_dense_layers(fields: Fields, num_layers: int) -> list[int]:
    layers = fields.take("mlp_only_layers", None) or []
    known = range(num_layers)
    if not isinstance(layers, list) or any(type(layer) is not int or layer not in known for layer in layers):
        raise fields.wrong("mlp_only_layers", layers, f"a list of layers from 0 to {num_layers - 1}")
    return layers


def _read_balance_weight(fields: Fields) -> float:
    fields.flag("output_router_logits", False)  # adds the balancing loss to the loss; the logits stay
    return fields.number("router_aux_loss_coef", 0.001, positive=False)
