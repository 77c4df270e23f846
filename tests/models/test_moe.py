"""Families with experts against transformers: config, logits, gradients; and through pages and the graph."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, fx
from transformers import AutoConfig

from strata.models.config import config_from_dict
from strata.models.experts import SparseMLP
from strata.models.layers import MLP

from .batches import HandPaged, packed, random_sequences
from .sparse_models import SPARSE_CONFIGS, pair

TOLERANCE = 2e-5
NAMES = list(SPARSE_CONFIGS)


def worst(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    model, oracle = pair(name)
    sequences = random_sequences(83, (1, 23, 9))
    logits = model.head(model(packed(sequences)))
    wanted = torch.cat([oracle(torch.tensor([sequence])).logits[0] for sequence in sequences])
    assert worst(logits, wanted) < TOLERANCE
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    (wanted * weights).sum().backward()
    for key, parameter in oracle.named_parameters():
        assert parameter.grad is not None
        found = model.get_parameter(key).grad
        assert found is not None
        assert worst(found, parameter.grad) <= TOLERANCE * max(1.0, parameter.grad.abs().max().item()), key


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_chunks_over_pages_and_the_graph_equal_whole_sequences(name: str) -> None:
    model, _ = pair(name)
    config = config_from_dict(SPARSE_CONFIGS[name])
    (sequence,) = random_sequences(83, (21,))
    graph = fx.symbolic_trace(model)
    for run in (model, graph):
        paged = HandPaged(config, sequences=1, longest=21)
        chunks = (sequence[:9], sequence[9:10], sequence[10:])
        parts = [run(paged.next_batch({0: chunk})) for chunk in chunks]
        assert worst(torch.cat(parts), model(packed([sequence]))) < TOLERANCE


def test_layers_with_experts_are_those_that_config_json_names() -> None:
    model, _ = pair("qwen3-moe-dense-layers-biases")
    assert [type(layer.mlp) for layer in model.model.layers] == [MLP, MLP, MLP, SparseMLP]


@pytest.mark.parametrize("name", NAMES)
def test_config_is_written_as_transformers_reads_it(name: str) -> None:
    config = config_from_dict(SPARSE_CONFIGS[name])
    written = json.loads(json.dumps(config.to_dict()))
    assert config_from_dict(written) == config
    theirs = AutoConfig.for_model(**written)
    assert config.experts is not None
    assert theirs.num_experts_per_tok == config.experts.per_token
    assert theirs.num_local_experts == config.num_experts
    assert theirs.router_aux_loss_coef == config.experts.balance_weight
    assert theirs.sliding_window == config.windows[0]


@pytest.mark.parametrize(("family", "architecture"), [("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe")])
def test_absent_fields_mean_what_they_mean_to_transformers(family: str, architecture: str) -> None:
    theirs = AutoConfig.for_model(family)
    config = config_from_dict(
        {
            "architectures": [f"{architecture}ForCausalLM"],
            "vocab_size": 50,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
        }
    )
    assert config.experts is not None
    assert config.num_experts == theirs.num_local_experts
    assert config.experts.per_token == theirs.num_experts_per_tok
    assert config.experts.intermediate_size == getattr(theirs, "moe_intermediate_size", 96)
    assert config.experts.normalized == getattr(theirs, "norm_topk_prob", True)
    assert config.experts.balance_weight == theirs.router_aux_loss_coef
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.max_length == theirs.max_position_embeddings
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.windows == (None, None)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0 is not supported"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok = 6 is not supported; accepted is at most"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        ("mixtral", {"norm_topk_prob": True}, "unknown field norm_topk_prob"),
        ("qwen3-moe", {"mlp_only_layers": [2]}, "a list of layers from 0 to 1"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 is not supported"),
        ("qwen3-moe", {"moe_intermediate_size": "wide"}, "moe_intermediate_size = 'wide' is not supported"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 8}, "unknown field shared_expert_intermediate_size"),
    ],
)
def test_what_cannot_be_honoured_is_refused(name: str, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_dict(SPARSE_CONFIGS[name] | change)
