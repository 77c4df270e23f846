"""Worked problems of "How to Scale Your Model" (Austin et al. 2025, https://jax-ml.github.io/scaling-book), within 3 %.

Every answer is asked of the cost model: graphs, rooflines, collectives, the trainer's estimates. What the book leaves
out of an answer is left out of the question here, and each test says what that is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from strata.comm.cost import Network
from strata.cost.efficiency import product_cost
from strata.cost.nodes import NodeCost, node_costs
from strata.cost.step_costs import StepCosts, step_costs
from strata.graph.compose import compose
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.trace import trace, trace_head
from strata.graph.walk import meta_indices, meta_pages
from strata.hardware.links import Link
from strata.hardware.roofline import Cost, Workload, floor
from strata.hardware.specs import device
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.plan.meta_model import find_config
from strata.train.predict.estimate import memory
from strata.train.predict.flops import document_flops
from strata.train.predict.layer_costs import layer_costs
from strata.train.predict.min_time import min_time
from strata.train.predict.step_shape import TrainShape

V5E, V5P = device("tpu-v5e"), device("tpu-v5p")
CLOSE = 0.03
LLAMA_70B = find_config("70B")


def llama_2_13b() -> ModelConfig:
    """Section 5, "Some Problems to Work": the table of hyperparameters."""
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 5120,
        "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
        "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return config_from_dict(values, "Llama-2-13B")


LLAMA_13B = llama_2_13b()


@pytest.fixture(scope="module")
def costs_70b() -> StepCosts:
    return costs_of(LLAMA_70B)


def costs_of(config: ModelConfig) -> StepCosts:
    """Of the whole model's graph in bfloat16; TPUs share it out equally."""
    with torch.device("meta"):
        model = build(config).to(torch.bfloat16)
    graph = gather_after_attention(merge(compose(trace(model), trace_head(model))))

    def argument(sequences: int, rows: int) -> tuple[Batch, torch.Tensor]:
        work = Workload((1,) * sequences, (1,) * sequences)
        pages = meta_pages(
            work, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=torch.bfloat16
        )
        tokens = meta_indices(sequences)
        return Batch(tokens, tokens, meta_indices(sequences + 1), 1, pages), meta_indices(rows)

    return step_costs(graph, argument)


def decodes(count: int, context: int) -> Workload:
    return Workload((1,) * count, (context,) * count)


def in_int8(cost: Cost) -> Cost:
    """A byte for each weight, key and value that has two in bfloat16."""
    return Cost(cost.flops, cost.read // 2, weights=cost.weights // 2, cached=cost.cached // 2)


def test_section_8_keys_and_values_of_a_token_take_160_kb_in_int8(costs_70b: StepCosts) -> None:
    longer, shorter = (costs_70b.step(decodes(1, context), 1).cached for context in (1001, 1000))
    assert (longer - shorter) / 2 == pytest.approx(160e3, rel=CLOSE)


def test_section_8_memory_of_70b_in_int8_with_32_sequences(costs_70b: StepCosts) -> None:
    """112 GB, 42 of them keys and values, so seven chips of 16 GB: a 4x2."""
    cost = in_int8(costs_70b.step(decodes(32, 8192), 32))
    assert cost.cached == pytest.approx(41.9e9, rel=CLOSE)
    assert cost.bytes == pytest.approx(112e9, rel=CLOSE)
    assert 6 < cost.bytes / V5E.ceiling("memory").value <= 7.1


@pytest.mark.parametrize(("chips", "seconds"), [(8, 17e-3), (16, 8.5e-3)])
def test_section_8_a_decode_step_of_70b_in_int8_on_v5e(costs_70b: StepCosts, chips: int, seconds: float) -> None:
    """Fully sharded, FLOPs in bfloat16, messages left out: 17 ms on a 4x2, memory-bound, and half on a 4x4; either way
    235 tokens/s and chip.
    """
    least = floor(in_int8(costs_70b.step(decodes(32, 8192), 32)), V5E, "bfloat16")
    assert least.bound == "memory"
    assert least.seconds / chips == pytest.approx(seconds, rel=CLOSE)
    assert 32 / (least.seconds / chips) / chips == pytest.approx(235, rel=CLOSE)


def test_section_8_prefill_of_8192_tokens_on_16_v5e(costs_70b: StepCosts) -> None:
    """0.91 s at 40 % of the peak; all rows reach the head, and attention's own FLOPs are left out."""
    prompt = Workload((8192,), (8192,))
    whole = costs_70b.step(prompt, 8192)
    attention = sum(layers * cost(prompt).flops for cost, layers in costs_70b.attentions)
    least = floor(Cost(flops=whole.flops - attention), V5E, "bfloat16")
    assert least.bound == "compute"
    assert least.seconds / 16 / 0.4 == pytest.approx(0.91, rel=CLOSE)


@pytest.mark.parametrize(
    ("sequences", "milliseconds"), [(1, 4.98), (8, 12.13), (16, 20.30), (32, 36.65), (64, 69.33), (240, 249.09)]
)
def test_section_7_decode_steps_of_13b_on_eight_v5e(costs_13b: StepCosts, sequences: int, milliseconds: float) -> None:
    """bfloat16, 8192 tokens each, memory alone."""
    cost = costs_13b.step(decodes(sequences, 8192), sequences)
    least = floor(Cost(read=cost.bytes), V5E, "bfloat16")
    assert least.seconds / 8 * 1e3 == pytest.approx(milliseconds, rel=CLOSE)


@pytest.fixture(scope="module")
def costs_13b() -> StepCosts:
    return costs_of(LLAMA_13B)


def test_section_6_parameters_and_flops_of_70b() -> None:
    """70.4e9 parameters; 6 for each of them and token, 4.2e11 of 70e9; 6.3e24 of 15 trillion tokens."""
    shape = TrainShape(LLAMA_70B, 8192, 8192)
    assert shape.local_parameters[0].total == pytest.approx(70.4e9, rel=CLOSE)
    flops = document_flops(LLAMA_70B, [8192], 8192)
    of_token = (flops.products + flops.head) / 8192
    assert of_token == pytest.approx(4.2e11, rel=CLOSE)
    assert of_token * 15e12 == pytest.approx(6.3e24, rel=CLOSE)


def test_section_6_a_token_takes_a_millisecond_of_one_v5p() -> None:
    """4.2e11 / 4.59e14: 0.915 ms; 435 years for 15 trillion of them, 44 days on 8960 at 40 %."""
    of_token = min_time(TrainShape(LLAMA_70B, 8192, 8192), "none", V5P).products / 8192
    assert of_token == pytest.approx(4.2e11 / 4.59e14, rel=CLOSE)
    years = of_token * 15e12 / (365 * 24 * 3600)
    assert years == pytest.approx(435, rel=CLOSE)
    assert years * 365 / 8960 / 0.4 == pytest.approx(44, rel=CLOSE)


def test_section_6_memory_of_training_with_batches_of_four_million_tokens() -> None:
    """140 GB of weights and 560 GB of moments: Strata keeps float32 masters too, which the book does not. 15.8 TB of
    checkpoints, three a layer, where Strata has one. 16.5 TB: 171 chips of 96 GB, and 1.8 GB on each of 8960."""
    shape = TrainShape(LLAMA_70B, 4_000_000, 8192)
    found = memory(shape, "layers")
    state, checkpoints = found.state - 4 * shape.local_parameters[0].total, 3 * found.activations
    assert state == pytest.approx(140e9 + 560e9, rel=CLOSE)
    assert checkpoints == pytest.approx(15.8e12, rel=CLOSE)
    assert (state + checkpoints) / 96e9 == pytest.approx(171, rel=CLOSE)
    assert (state + checkpoints) / 8960 == pytest.approx(1.8e9, rel=CLOSE)


# An axis of the torus, both ways; three of them go side by side.
ONE_AXIS = Network(Link(0.0, 0.0, 2 * 9e10, "section 5", "2025"), 1 << 20)
MANY = 8960


def seconds_of(collective: str, nbytes: int) -> float:
    return ONE_AXIS.seconds(ONE_AXIS.cost(collective, nbytes, MANY))


@pytest.mark.parametrize(("axes", "tokens"), [(1, 2550), (3, 850)])
def test_section_5_fsdp_needs_as_many_tokens_a_chip(axes: int, tokens: int) -> None:
    """v5p: fewer, and gathering a layer's weights takes longer than the forward pass. 468 tokens a chip, what 4M are on
    a pod (section 6), are too few on all three axes."""
    layer = layer_costs(LLAMA_70B, 8192)[0].forward
    gathered = seconds_of("all_gather", 2 * layer.dense // 2) / axes
    of_token = floor(Cost(flops=layer.dense), V5P, "bfloat16").compute
    assert gathered / of_token == pytest.approx(tokens, rel=CLOSE)
    assert gathered > 4 * 1024 * 1024 / 8960 * of_token


@pytest.mark.parametrize(("width", "most"), [(28672, 11), (50_000, 19)])
def test_section_5_most_ranks_that_divide_a_matrix(width: int, most: int) -> None:
    """F / 2550, of an MLP of two matrices, as the book has it: 11 of 70B (section 6), 19 of Gemma 7B."""
    tokens, hidden = 4096, 8192
    messages = seconds_of("all_gather", 2 * tokens * hidden) + seconds_of("reduce_scatter", 2 * tokens * hidden)
    up, down = product_cost("bfloat16", (tokens, width, hidden)), product_cost("bfloat16", (tokens, hidden, width))
    whole = floor(Cost(flops=up.flops + down.flops), V5P, "bfloat16").compute
    assert whole / messages == pytest.approx(most, abs=1)
    assert whole / messages == pytest.approx(width / 2550, rel=CLOSE)


def test_section_5_gradients_of_a_layer_are_summed_twice_as_long_as_weights_are_gathered() -> None:
    """All-reduce is reduce-scatter and all-gather (section 3), so data parallelism and FSDP send as much."""
    parts = seconds_of("all_gather", 10**9) + seconds_of("reduce_scatter", 10**9)
    assert seconds_of("all_reduce", 10**9) == pytest.approx(parts)
    assert parts == pytest.approx(2 * 10**9 / 1.8e11, rel=CLOSE)


def test_section_5_questions_1_and_2_parameters_and_memory_of_13b() -> None:
    """13.1e9 parameters, 130 GB with two moments; 42 TB of results of the three products of MLPs, for 16M tokens."""
    held = TrainShape(LLAMA_13B, 8192, 8192).local_parameters[0]
    assert held.total == pytest.approx(13.1e9, rel=CLOSE)
    state = memory(TrainShape(LLAMA_13B, 8192, 8192), "layers").state
    assert state - 4 * held.total == pytest.approx(130e9, rel=CLOSE)
    of_token = 40 * sum(node.cost.written for node in mlp_products(LLAMA_13B)) / 1000
    assert of_token * 16e6 == pytest.approx(4.2e13, rel=CLOSE)
    # Question 3: 3M tokens on 4096 v5p, 8 TB with weights and moments.
    assert of_token * 3e6 == pytest.approx(7.86e12, rel=CLOSE)
    assert of_token * 3e6 + state - 4 * held.total == pytest.approx(8e12, rel=CLOSE)


def mlp_products(config: ModelConfig) -> list[NodeCost]:
    """Of one layer, for 1000 tokens in bfloat16."""
    with torch.device("meta"):
        graph = trace(build(config.with_layers([0])).to(torch.bfloat16))
    ids = meta_indices(1000)
    batch = Batch(ids, ids, meta_indices(2), 1000, None)
    nodes = node_costs(graph, batch, Workload((1000,), (1000,)))
    return [node for node in nodes if node.weight is not None and ".mlp." in node.module]


def test_section_4_question_1_parameters_and_cache_of_a_16b_model() -> None:
    """D 4096, F 4 D, 64 layers, 32,000 ids: 16B, a quarter of the layers' in attention, 512 kB a token in int8."""
    config = replace(
        LLAMA_13B, hidden_size=4096, intermediate_size=16384, num_layers=64, windows=(None,) * 64, num_heads=32,
        num_kv_heads=32,
    )  # fmt: skip
    held = TrainShape(config, 8192, 8192).local_parameters[0]
    assert held.total == pytest.approx(16e9 + 1.4e9, rel=CLOSE)  # 17.4e9: the book rounds D to 4e3 and F to 16e3
    mlp = sum(node.cost.weights for node in mlp_products(config)) // 2
    assert 1 - mlp * 64 / held.in_layers == pytest.approx(1 / 4, rel=CLOSE)
    costs = costs_of(config.with_layers([0]))
    of_token = 64 * (costs.step(decodes(1, 1001), 1).cached - costs.step(decodes(1, 1000), 1).cached)
    assert of_token / 2 == pytest.approx(512 * 1024, rel=CLOSE)


def test_section_2_question_4_a_product_in_int8_on_v5e() -> None:
    """int8[16384, 4096] by int8[B, 4096]: 1.3e8 B / 3.94e14 s of compute against (6.7e7 + 2e4 B) / 8.1e11 s of memory,
    with results of a byte, where Strata's have four."""
    rows = 240
    cost = product_cost("int8", (rows, 16384, 4096))
    least = floor(Cost(cost.flops, read=cost.read, written=cost.written // 4), V5E, "int8")
    assert least.compute == pytest.approx(1.342e8 * rows / 3.94e14, rel=CLOSE)
    assert least.memory == pytest.approx((6.7e7 + 2e4 * rows) / 8.1e11, rel=CLOSE)
