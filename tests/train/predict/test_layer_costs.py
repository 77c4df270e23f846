"""What the captured graph says of layers is what the formula of MFU counts by hand, for every kind of layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.train.predict.flops import active_elements, visible_pairs
from strata.train.predict.layer_costs import layer_costs


@pytest.mark.parametrize(("shape", "window"), [("0.6B", None), ("1B", None), ("1B", 100), ("30B-A3B", None)])
def test_a_layer_counts_as_by_hand(shape: str, window: int | None) -> None:
    config = config_from_dict(SHAPES[shape], shape)
    if window is not None:
        config = replace(config, windows=(window, *config.windows[1:]))
    found = layer_costs(config, 1000)
    assert len(found) == config.num_layers
    for layer, cost in enumerate(found):
        assert cost.dense + cost.routed == 2 * active_elements(config, layer)
        assert (cost.routed > 0) == (config.experts is not None)
        pairs = visible_pairs([1000], config.windows[layer])
        assert cost.attention == 4 * config.num_heads * config.head_dim * pairs


def test_router_and_experts_are_told_from_what_every_token_meets() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts that are 768 wide."""
    cost = layer_costs(config_from_dict(SHAPES["30B-A3B"], "30B-A3B"), 10)[0]
    assert cost.routed == 2 * 2048 * (128 + 8 * 3 * 768)
    assert cost.dense == 2 * 2048 * 128 * (2 * 32 + 2 * 4)
