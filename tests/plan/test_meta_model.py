"""What steps of a mixture of experts cost, against a count on paper."""

from __future__ import annotations

from math import comb

import pytest
import torch

from strata.comm.symmetric import imagined
from strata.cost.linear import linear_floor
from strata.cost.nodes import total
from strata.cost.step_costs import StepCosts
from strata.cost.step_model import StepModel
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.models.config import ModelConfig, config_from_dict
from strata.parallel.serving_shard import RankShard
from strata.plan.meta_model import find_config, meta_model
from tests.models.gpt_oss_checkpoints import GPT_OSS_CONFIGS
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS

HIDDEN, LAYERS, EXPERTS, PER_TOKEN = 2048, 48, 128, 8
EXPERT_BYTES = 2 * 3 * 768 * HIDDEN
RECURRENT_NODES, ATTENTIONS = ("state_space", "short_convolution"), ("attention", "decode_attention")


@pytest.fixture(scope="module")
def costs() -> StepCosts:
    return meta_model(find_config("30B-A3B"), device("h200")).step_costs


@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_products_of_few_tokens_read_their_packed_bytes(ranks: int) -> None:
    """int4 with a float32 scale for 128 columns; embedding, norms and head stay in bfloat16."""
    config = find_config("0.6B")
    shard = None if ranks == 1 else RankShard.of(config, ranks, 0)
    model = meta_model(config, device("h200"), shard=shard, quantization="int4")
    nodes = model.step(Workload((1,) * 4, (20,) * 4)).model
    hidden, inner, layers = 1024, 3072, 28
    products = layers * (hidden * (16 + 8 + 8 + 16) * 128 + 3 * inner * hidden) // ranks
    read = sum(node.cost.weights for node in nodes if node.weight_kind == "int4")
    assert read == pytest.approx(products * (0.5 + 4 / 128), rel=1e-3)  # some of them with a norm
    plain = sum(node.cost.weights for node in nodes if not node.weight_kind)
    assert plain == pytest.approx(2 * 151936 * hidden // ranks, rel=2e-3)


@pytest.mark.parametrize("sequences", [1, 2, 16, 256])
def test_a_step_reads_the_experts_that_its_tokens_go_to(sequences: int, costs: StepCosts) -> None:
    step = costs.step(Workload((1,) * sequences, (1,) * sequences), rows=sequences)
    attention = HIDDEN * 128 * (32 + 4 + 4 + 32)
    norms = 2 * HIDDEN + 2 * 128
    router = EXPERTS * HIDDEN
    embedding, final, head = sequences * HIDDEN, HIDDEN, 151936 * HIDDEN
    dense = 2 * (LAYERS * (attention + norms + router) + embedding + final + head)
    missed = (1 - PER_TOKEN / EXPERTS) ** sequences
    sparse = LAYERS * EXPERTS * (1 - missed) * EXPERT_BYTES
    assert step.weights == pytest.approx(dense + sparse, rel=1e-9)


def test_256_decodes_read_all_of_the_model_and_not_a_tenth(costs: StepCosts) -> None:
    step = costs.step(Workload((1,) * 256, (1000,) * 256), rows=256)
    assert step.weights == pytest.approx(60.4e9, rel=0.01)
    keys_and_values = 256 * 1000 * LAYERS * 2 * 4 * 128 * 2
    assert step.read == step.weights + keys_and_values


def test_nodes_and_steps_count_the_same_flops_and_experts(costs: StepCosts) -> None:
    workload = Workload((1,) * 16, (20,) * 16)
    nodes = meta_model(find_config("30B-A3B"), device("h200")).step(workload).model
    experts = [node for node in nodes if node.operation == "experts"]
    assert len(experts) == LAYERS
    step, alone = (costs.step(Workload((1,) * n, (20,) * n), rows=n) for n in (16, 1))
    grown = total(experts).weights - LAYERS * PER_TOKEN * EXPERT_BYTES + 15 * 2 * HIDDEN  # and rows of the embedding
    assert step.weights - alone.weights == grown


def test_a_recorded_step_is_timed_at_the_size_to_which_it_is_padded() -> None:
    model = meta_model(find_config("0.6B"), device("h200"))
    step = model.step(Workload((1,) * 20, (640,) * 20))  # captured for 24
    assert step.captured
    own, padded = ({node.name: node for node in nodes} for nodes in (step.model, step.timed))
    # The product of a step of so many rows, which reads the same weight for all.
    product = next(node for node in step.model if "linear" in node.operation)
    assert padded[product.name].cost.flops * 20 == own[product.name].cost.flops * 24
    assert padded[product.name].cost.weights == own[product.name].cost.weights
    attention = next(node for node in step.model if node.cost.cached)
    assert padded[attention.name].cost == own[attention.name].cost
    whole = model.step(Workload((1,) * 24, (640,) * 24))
    assert [node.cost for node in whole.timed] == [node.cost for node in (*whole.inputs, *whole.model, *whole.draw)]
    # 600 tokens of a prompt run as 640 do.
    prompt = model.step(Workload((600,), (600,)))
    rows = {node.cost.flops // (2 * node.weight[0] * node.weight[1]) for node in prompt.timed if node.weight}
    assert 640 in rows
    assert 600 not in rows


def test_decodes_read_and_write_their_fixed_states_however_long_they_are() -> None:
    config = config_from_dict(RECURRENT_CONFIGS["mamba2"])
    model = meta_model(config, device("h200"), torch.bfloat16)
    row = 2 * (120 * 3 * 2 + 6 * 8 * 12 * 4)  # layers; tail of the convolution, state
    for length in (8, 800):
        step = model.step(Workload((1,) * 5, (length,) * 5))
        assert sum(node.cost.cached for node in step.model) == 5 * 2 * row
    one, more = (
        linear_floor(model.step_costs, device("h200"), "bfloat16")(count, count, keys, keys)
        for count, keys in ((1, 9), (8, 9000))
    )
    bandwidth = device("h200").ceiling("bandwidth").value
    assert more.memory - one.memory == pytest.approx(7 * (2 * row + model.step_costs.token_weights) / bandwidth)


def test_prompts_of_a_hybrid_cost_what_their_tokens_and_states_do() -> None:
    """A prompt that begins, a part of one, a decode: 13 tokens; two of the three states are read, all are written."""
    config = config_from_dict(RECURRENT_CONFIGS["granite-hybrid"])
    model = meta_model(config, device("h200"), torch.bfloat16)
    heads, head_dim, state_size, channels = 6, 8, 10, 48 + 2 * 2 * 10
    workload = Workload((1, 7, 5), (9, 7, 12))
    nodes = model.step(workload).model
    spaces, convolutions = ([one for one in nodes if one.operation == name] for name in RECURRENT_NODES)
    assert (len(spaces), len(convolutions)) == (2, 2)
    state, tail = heads * head_dim * state_size * 4, channels * 3 * 2
    assert {one.cost.cached for one in spaces} == {(2 + 3) * state}
    assert {one.cost.cached for one in convolutions} == {(2 + 3) * tail}
    assert {one.cost.flops for one in spaces} == {13 * heads * (5 * head_dim * state_size + 3 * head_dim + 6)}
    assert {one.cost.flops for one in convolutions} == {13 * channels * (2 * 4 + 4)}
    costs = model.step_costs
    assert [layers for _, layers in costs.recurrences] == [2, 2]
    found = sorted((cost(workload) for cost, _ in costs.recurrences), key=lambda one: one.flops)
    assert found == [convolutions[0].cost, spaces[0].cost]
    step, alone = costs.step(workload, 3), costs.step(Workload((1, 1, 1), (9, 9, 9)), 3)
    rest = sum(one.cost.flops for one in nodes if one.operation not in (*RECURRENT_NODES, *ATTENTIONS))
    assert step.flops > alone.flops
    attended = sum(layers * cost(workload).flops for cost, layers in costs.attentions)
    assert step.flops == rest + attended + 2 * sum(one.flops for one in found)
    times = StepModel(model, device("h200"))
    assert times.seconds(workload) == pytest.approx(times.predict(workload).seconds, rel=1e-9)
    assert times.copy_seconds(2 * (state + tail)) == pytest.approx(
        4 * (state + tail) / device("h200").ceiling("bandwidth").value
    )


@pytest.mark.parametrize(
    "config",
    [
        find_config("V2-Lite").with_layers([0, 1]),
        config_from_dict(dict(GPT_OSS_CONFIGS)["gpt-oss-yarn"]),
        config_from_dict(RECURRENT_CONFIGS["mamba2"]),
    ],
    ids=lambda config: config.architecture,
)
def test_parameters_that_attentions_and_recurrences_read_count_once(config: ModelConfig) -> None:
    model = meta_model(config, device("h200"), torch.bfloat16)
    workload = Workload((1, 1), (30, 40))
    assert total(model.step(workload).model).weights == model.step_costs.step(workload, 2).weights


def test_a_step_that_ranks_divide_is_recorded_and_takes_little_more_than_its_part() -> None:
    config, h200 = find_config("8B"), device("h200")
    divided = meta_model(config, h200, context=imagined("cp", 2))
    alone, two = StepModel(meta_model(config, h200), h200), StepModel(divided, h200)
    for tokens in (640, 1024, 8192):
        workload = Workload((1,) * 9 + (tokens - 9,), (500,) * 9 + (tokens - 9,))
        step = divided.step(workload)
        assert (step.graph, step.captured) == ("divided", True)
        assert 0.5 < two.predict(workload).seconds / alone.predict(workload).seconds < 0.6
        messages = [node.operation for node in step.model if node.cost.messages]
        assert messages == ["gather_keys_values"] * config.num_layers + ["gather_tokens"] * 2
    # 1,100 rows of a rank are padded to 1,280, and ten draws to as many as sequences.
    padded = divided.step(Workload((1,) * 9 + (2191,), (500,) * 9 + (2191,)))
    products = [node for node in padded.timed if node.operation == "linear" and node.weight == (6144, 4096)]
    assert products[0].shape[0] == 1280
    assert divided.step(Workload((511,), (511,))).graph == "logits"


def test_rows_of_large_steps_of_sixteen_ranks_go_to_the_ranks_of_their_experts_alone() -> None:
    config, h200 = find_config("30B-A3B"), device("h200")
    shard = RankShard.of(config, 16, 0, imagined("tp", 16), expert_parallel=True, attention_dp=True)
    model = meta_model(config, h200, shard=shard)
    large, small = (model.step(Workload((tokens,), (tokens,))) for tokens in (4096, 512))
    assert (large.graph, large.captured) == ("exchanged_logits", False)
    assert (small.graph, small.captured) == ("logits", True)
    sent = {node.operation: node.cost.sent for node in large.model if node.cost.messages and node.layer == 0}
    # Another rank has one of a token's eight among its eight of 128 experts; with the row go eight numbers and weights.
    rows = 15 * round(4096 * (1 - comb(120, 8) / comb(128, 8)))
    counts = 15 * 16
    assert sent == {"send_rows": rows * (HIDDEN * 2 + 8 * 8) + counts, "return_rows": rows * HIDDEN * 2}
    by_all = {node.operation: node.cost.sent for node in small.model if node.cost.messages and node.layer == 0}
    assert by_all == {"dispatch_rows": 15 * 512 * HIDDEN * 2, "combine_rows": 15 * 512 * HIDDEN * 2}
