"""Families with recurrent layers, Qwen3-Next among them, agree with transformers, and with themselves in pieces."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from strata.cache.state_pool import StateShape
from strata.cost.nodes import node_costs
from strata.graph.bind import bind
from strata.graph.gather import gather_after_attention
from strata.graph.trace import trace
from strata.graph.walk import meta_indices
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch
from strata.models.config import config_from_dict
from strata.models.experts import stored_views
from strata.models.families import FAMILIES, build
from strata.models.initialize import initialize
from strata.models.joined import join_parameters
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig
from strata.models.recurrence.state_space_config import StateSpaceConfig
from strata.models.save import save
from strata.models.shapes import SHAPES
from strata.models.weights import load
from strata.parallel.layout import Layout
from strata.plan.meta_model import meta_model
from strata.train.adapters.lora import LoraConfig, add_lora
from strata.train.predict.flops import document_flops

from .batches import packed, random_sequences
from .checkpoints import load_oracle, make_checkpoint, oracle_logits
from .conftest import Checkpoint
from .recurrent_checkpoints import RECURRENT_CONFIGS, HandStates

LONG = 2000
TOLERANCE = 1e-4


@pytest.fixture(params=RECURRENT_CONFIGS)
def opened(request: pytest.FixtureRequest, open_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return open_checkpoint(request.param)


@torch.no_grad()
def test_logits_equal_transformers_over_two_thousand_tokens(opened: Checkpoint) -> None:
    sequences = random_sequences(opened.config.vocab_size, (1, LONG, 23))
    logits, wanted = opened.model.head(opened.model(packed(sequences))), oracle_logits(opened.oracle, sequences)
    assert wanted.std() > 0.05
    assert (logits - wanted).abs().max() < TOLERANCE


@torch.no_grad()
def test_pieces_over_states_equal_whole_sequences(opened: Checkpoint) -> None:
    first, second = random_sequences(opened.config.vocab_size, (131, 17), seed=1)
    whole = opened.model(packed([first, second]))
    graph = bind(gather_after_attention(trace(opened.model)), "cpu", deterministic=True)
    alone = graph(packed([second]), torch.arange(17, dtype=torch.int32))
    steps = [{0: first[:79]}, {0: first[79:120], 1: second[:6]}, {1: second[6:15], 0: first[120:121]}]
    steps += [{0: first[121 + i : 122 + i], 1: second[15 + i : 16 + i]} for i in range(2)] + [{0: first[123:]}]
    for exact in (False, True):
        states, parts = HandStates(opened.config, 2), {0: [], 1: []}  # type: ignore[var-annotated]
        for step in steps:
            batch = states.next_batch(step)
            every = torch.arange(len(batch.tokens), dtype=torch.int32)
            hidden = graph(batch, every) if exact else opened.model(batch)
            for row, own in zip(step, hidden.split([len(tokens) for tokens in step.values()]), strict=True):
                parts[row].append(own)
        assert (torch.cat(parts[0] + parts[1]) - whole).abs().max() < TOLERANCE
    # The second time in deterministic mode: no company and no division changes a bit.
    assert torch.equal(torch.cat(parts[1]), alone)


def in_files(name: str) -> str:
    """What checkpoints call a parameter of transformers'."""
    for here, there in (
        ("experts.gate_up_proj", "input_linear.weight"),
        ("experts.down_proj", "output_linear.weight"),
        ("router.weight", "router.layer.weight"),
    ):
        name = name.replace(f"block_sparse_moe.{here}", f"block_sparse_moe.{there}")
    return name


def test_gradients_equal_transformers(opened: Checkpoint) -> None:
    sequences = random_sequences(opened.config.vocab_size, (5, 70), seed=2)
    weights = torch.randn(75, opened.config.vocab_size, generator=torch.Generator().manual_seed(3))
    ours = dict(opened.model.named_parameters())
    theirs = {in_files(name): one for name, one in opened.oracle.named_parameters()}
    loss = (opened.model.head(opened.model(packed(sequences))) * weights).sum()
    found = torch.autograd.grad(loss, list(ours.values()))
    wanted = torch.autograd.grad((oracle_logits(opened.oracle, sequences) * weights).sum(), list(theirs.values()))
    stored, others = (
        dict(one for name, grad in zip(names, grads, strict=True) for one in stored_views(opened.model, name, grad))
        for names, grads in ((ours, found), (theirs, wanted))
    )
    grads = join_parameters(opened.model, stored)
    assert grads.keys() == others.keys()
    for name, other in others.items():
        assert (grads[name] - other).abs().max() <= TOLERANCE * max(1.0, other.abs().max().item()), name


@torch.no_grad()
def test_transformers_loads_what_strata_saved(opened: Checkpoint, tmp_path: Path) -> None:
    save(opened.model, opened.config, tmp_path / "saved", max_shard_bytes=20_000)
    saved, (again, config) = load_oracle(tmp_path / "saved"), load(tmp_path / "saved")
    for one, other in ((saved, opened.oracle), (again, opened.model)):
        tensors, wanted = one.state_dict(), other.state_dict()
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], value) for name, value in wanted.items())
    assert config == opened.config
    sequences = random_sequences(config.vocab_size, (30,), seed=4)
    assert (oracle_logits(saved, sequences) - oracle_logits(opened.oracle, sequences)).abs().max() < 1e-6


@pytest.mark.parametrize("values", RECURRENT_CONFIGS.values(), ids=RECURRENT_CONFIGS)
def test_both_forms_and_our_own_read_alike(values: dict) -> None:
    config = config_from_dict(values)
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config
    written = json.loads(AutoConfig.for_model(**values).to_json_string()) | {"architectures": values["architectures"]}
    assert config_from_dict(written) == config
    if isinstance(config.recurrence, StateSpaceConfig):
        infinite = config_from_dict(written | {"time_step_limit": [0.5, math.inf]}).recurrence
        assert isinstance(infinite, StateSpaceConfig)
        assert infinite.max_step == math.inf


def test_fields_of_published_granites_without_effect_are_read() -> None:
    values = RECURRENT_CONFIGS["granite-hybrid"]
    more = {"init_method": "mup", "initializer_range": 0.1, "normalization_function": "rmsnorm", "rope_scaling": None}
    assert config_from_dict(values | more) == config_from_dict(values)


def test_the_shape_of_a_published_granite() -> None:
    """7B in all, as https://huggingface.co/ibm-granite/granite-4.0-h-tiny says (2025-10)."""
    experts, shared, router = 64 * 3 * 1536 * 512, 3 * 1536 * 1024, 64 * 1536
    space = 1536 * (2 * 3072 + 2 * 128 + 48) + 3072 * 1536 + (3072 + 2 * 128) * (4 + 1) + 3 * 48 + 3072
    attention = 1536 * (2 * 12 + 2 * 4) * 128
    by_hand = 40 * (experts + shared + router + 2 * 1536) + 36 * space + 4 * attention + 100352 * 1536 + 1536
    with torch.device("meta"):
        model = build(config_from_dict(SHAPES["granite-4.0-h-tiny"]), 64)
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES["granite-4.0-h-tiny"]))
    assert by_hand == sum(p.numel() for p in model.parameters()) == oracle.num_parameters()
    assert by_hand == pytest.approx(6.94e9, rel=1e-3)


def test_adapters_need_projections_that_are_there() -> None:
    with pytest.raises(ValueError, match="Mamba2 has none of q_proj"):
        add_lora(build(config_from_dict(RECURRENT_CONFIGS["mamba2"])), LoraConfig(rank=2, alpha=4.0), seed=0)


def test_training_begins_with_time_steps_of_all_sizes() -> None:
    model = build(config_from_dict(RECURRENT_CONFIGS["mamba2"]))
    initialize(model, 0)
    mixer = model.model.layers[1].mixer
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 7.0))
    assert torch.equal(mixer.D, torch.ones(6))
    steps = torch.nn.functional.softplus(mixer.dt_bias).sort().values
    assert (steps >= 0.001).all()
    assert (steps <= 0.1).all()
    assert (steps[1:] / steps[:-1] < 100 ** (2 / 6)).all()
    assert mixer.conv1d.weight.std().item() == pytest.approx(12**-0.5, rel=0.15)
    assert mixer.out_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.15)


@pytest.mark.parametrize("name", ["granite-hybrid", "granite-hybrid-experts", "qwen3-next"])
def test_training_counts_the_products_of_every_layer(name: str) -> None:
    config = config_from_dict(RECURRENT_CONFIGS[name])
    with torch.device("meta"):
        model = build(config)
    batch = Batch(meta_indices(7), meta_indices(7), meta_indices(2), 7)
    nodes = node_costs(trace(model), batch, Workload((7,), (7,)))
    products = sum(node.cost.flops for node in nodes if node.operation in ("linear", "experts"))
    # The operation of experts also gates and adds up, which are no products.
    assert document_flops(config, [7], 0).products == pytest.approx(3 * products, rel=0.02)


def test_graphs_cost_what_layers_do() -> None:
    """A step of two tokens: states are read and written, weights read once; and training's products are counted."""
    config = config_from_dict(RECURRENT_CONFIGS["mamba2"])
    with torch.device("meta"):
        model = build(config)
        states = HandStates(config, 2)
    kept = RecurrentStates(states.tensors, meta_indices(2))
    batch = Batch(meta_indices(2), meta_indices(2), meta_indices(3), 1, states=kept)
    nodes = node_costs(trace(model), batch, Workload((1, 1), (8, 9)))
    state = [node.cost.cached for node in nodes if node.operation == "state_space"]
    tail = [node.cost.cached for node in nodes if node.operation == "short_convolution"]
    assert state == [2 * 2 * 6 * 8 * 12 * 4] * 2
    assert tail == [2 * 2 * (48 + 2 * 36) * 3 * 4] * 2
    products = sum(node.cost.flops for node in nodes if node.operation == "linear")
    assert products == 2 * 2 * 2 * (24 * (48 + 120 + 6) + 48 * 24)
    flops = document_flops(config, [7], 0)
    assert flops.products == 3 * 7 * products / 2
    assert flops.attention == 0


def test_steps_are_priced_with_the_states_that_they_move(opened: Checkpoint) -> None:
    """Three sequences, of which one begins and two read theirs; keys are counted where layers attend."""
    model = meta_model(opened.config, device("h200"))
    workload = Workload((1, 1, 9), (5, 8, 9))
    recurrent = ("state_space", "gated_delta", "short_convolution")
    nodes = [node for node in model.step(workload).model if node.operation in recurrent]
    states = StateShape.of(FAMILIES[opened.config.architecture].states(opened.config), torch.float32)
    assert states is not None
    assert sum(node.cost.cached for node in nodes) == (3 + 2) * states.row_bytes
    keys = replace(model.step_costs, recurrences=()).step(workload, 3)
    assert model.step_costs.step(workload, 3).cached - keys.cached == (3 + 2) * states.row_bytes


def test_training_says_what_its_ranks_cannot_do(opened: Checkpoint) -> None:
    for name in ("tp", "cp", "pp"):
        with pytest.raises(ValueError, match=f"{name} = 2 would divide the recurrent layers"):
            Layout(**{name: 2}).check(opened.config, 2)


VALUES = RECURRENT_CONFIGS["qwen3-next"]
# Qwen/Qwen3-Next-80B-A3B-Instruct, as transformers 4.57 wrote it.
# fmt: off
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}
# fmt: on


def test_the_published_shape_has_the_parameters_counted_by_hand() -> None:
    config = config_from_dict(PUBLISHED)
    assert config_from_dict(SHAPES["80B-A3B"]) == config
    assert config_from_dict(config.to_dict()) == config
    assert config.attends == (False, False, False, True) * 12
    assert (config.rotary_dim, config.longest, config.dtype) == (64, 262144, torch.bfloat16)
    with torch.device("meta"):
        held = sum(parameter.numel() for parameter in build(config).parameters())
    hidden, keys, values = 2048, 16 * 128, 32 * 128
    # Queries, keys, values and gates; strengths and decays; four taps of each channel; the norm; the end.
    net = hidden * (2 * keys + 2 * values) + hidden * 64 + 4 * (2 * keys + values) + 2 * 32 + 128 + values * hidden
    # Queries with their gates, keys and values, the end, two norms of heads.
    attention = hidden * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * hidden + 2 * 256
    # 512 experts and the shared one, the router's rows, the row of the shared one's gate; two norms of the layer.
    block = 513 * 3 * hidden * 512 + 512 * hidden + hidden + 2 * hidden
    assert held == 36 * net + 12 * attention + 48 * block + hidden + 2 * 151936 * hidden == 79_674_391_296


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", VALUES)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.fc.weight": torch.ones(2), "mtp.layers.0.mlp.gate.weight": torch.ones(3)}, file)
    model, _ = load(folder)
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])
    save_file(tensors | {"model.mtp.fc.weight": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=r"does not call for: model\.mtp\.fc\.weight"):
        load(folder)


def test_layers_follow_from_the_interval_or_their_types() -> None:
    config = config_from_dict(VALUES | {"num_hidden_layers": 7, "full_attention_interval": 3})
    assert [layer for layer, attends in enumerate(config.attends) if attends] == [2, 5]
    part = config.with_layers([1, 2])
    assert isinstance(part.recurrence, GatedDeltaConfig)
    assert part.recurrence == dataclasses.replace(config.recurrence, layers=(True, False))


def test_training_begins_with_decays_of_all_sizes() -> None:
    model = build(config_from_dict(VALUES))
    initialize(model, 0)
    net = model.model.layers[0].linear_attn
    assert torch.allclose(net.A_log.exp(), torch.tensor([4.0, 8.0, 12.0, 16.0]))
    assert torch.equal(net.dt_bias, torch.ones(4))
    assert torch.equal(net.norm.weight, torch.ones(8))
    assert torch.equal(model.model.norm.weight, torch.zeros(24))
