"""What the captured graph says of layers is what the formula of MFU counts by hand, for every kind of layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from strata.models.batch import Batch
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.shapes import SHAPES
from strata.train.predict.flops import active_elements, visible_pairs
from strata.train.predict.layer_costs import layer_costs
from tests.models.gpt_oss_checkpoints import GPT_OSS_CONFIGS


@pytest.mark.parametrize(("shape", "window"), [("0.6B", None), ("1B", None), ("1B", 100), ("30B-A3B", None)])
def test_a_layer_counts_as_by_hand(shape: str, window: int | None) -> None:
    config = config_from_dict(SHAPES[shape], shape)
    if window is not None:
        config = replace(config, windows=(window, *config.windows[1:]))
    found = layer_costs(config, 1000)
    assert len(found) == config.num_layers
    for layer, cost in enumerate(found):
        ahead, back = cost.forward, cost.backward
        assert ahead.dense + ahead.routed == 2 * active_elements(config, layer)
        assert back.dense + back.routed == 4 * active_elements(config, layer)
        assert (ahead.routed > 0) == (config.experts is not None)
        pairs = visible_pairs([1000], config.windows[layer])
        assert ahead.attention == 4 * config.num_heads * config.head_dim * pairs
        assert back.attention == 2 * ahead.attention


def test_router_and_experts_are_told_from_what_every_token_meets() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts that are 768 wide."""
    cost = layer_costs(config_from_dict(SHAPES["30B-A3B"], "30B-A3B"), 10)[0].forward
    assert cost.routed == 2 * 2048 * (128 + 8 * 3 * 768)
    assert cost.dense == 2 * 2048 * 128 * (2 * 32 + 2 * 4)


def test_experts_with_biases_count_their_products() -> None:
    """gpt-oss without biases of attention; the router's is added up."""
    config = config_from_dict(dict(GPT_OSS_CONFIGS)["gpt-oss-no-biases-tied"])
    cost = layer_costs(config, 10)[0]
    assert cost.forward.dense + cost.forward.routed == 2 * active_elements(config, 0) + config.num_experts
    assert cost.backward.dense + cost.backward.routed == pytest.approx(4 * active_elements(config, 0), rel=1e-3)


def test_traffic_of_a_layer_by_hand() -> None:
    """Llama-3.1-8B, bytes of a token in bfloat16: hidden 4096, 32 and 8 heads of 128, 14336 between gate and down."""
    config = config_from_dict(SHAPES["8B"], "8B")
    graph, modules = (layer_costs(config, 100, fused=fused)[0] for fused in (True, False))
    # Two sums with their norms read two and write two; their gradients read the sum and two gradients, write one.
    assert graph.forward.between == 2 * 2 * (2 + 2) * 4096
    assert graph.backward.between == 2 * 2 * (3 + 1) * 4096
    # A module's norm and sum stand alone: 1 + 1 and 2 + 1; the sum's gradient is nobody's work.
    assert modules.forward.between == 2 * 2 * (2 + 3) * 4096
    assert modules.backward.between == 2 * 2 * 3 * 4096
    # Rotation of queries and keys with float32 angles, half of which repeat; gate and up read, their product written.
    rotated, angles = 2 * (32 + 8) * 128, 4 * 128
    assert graph.forward.inside == pytest.approx(2 * rotated + 2 * angles + 2 * 3 * 14336, rel=0.02)
    assert graph.backward.inside == pytest.approx(2 * 2 * (32 + 16) * 128 + 2 * 5 * 14336, rel=0.02)


def test_the_backward_pass_multiplies_as_often_as_autograd_does() -> None:
    """Counted by torch where it runs, of a small model's layers."""
    config = replace(
        config_from_dict(SHAPES["0.6B"], "0.6B"), hidden_size=64, intermediate_size=96, num_layers=1, vocab_size=50,
        num_heads=4, num_kv_heads=2, head_dim=16, windows=(None,),
    )  # fmt: skip
    torch.manual_seed(0)
    model = build(config)
    tokens = 12
    ids = torch.arange(tokens, dtype=torch.int32)
    batch = Batch(ids, ids, torch.tensor([0, tokens], dtype=torch.int32), tokens, None)
    with FlopCounterMode(display=False) as forward:
        hidden = model(batch)
    with FlopCounterMode(display=False) as backward:
        hidden.sum().backward()
    cost = layer_costs(config, tokens, fused=False)[0]
    for counted, pass_cost in ((forward, cost.forward), (backward, cost.backward)):
        products = sum(flops for name, flops in counted.get_flop_counts()["Global"].items() if "mm" in str(name))
        assert pass_cost.dense * tokens == products
