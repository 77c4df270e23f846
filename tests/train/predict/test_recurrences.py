"""What recurrent layers keep, against autograd."""

from __future__ import annotations

import pytest
import torch

from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.initialize import initialize
from strata.train.predict.estimate import memory, recurrent_bytes
from strata.train.predict.step_shape import TrainShape
from tests.models.batches import packed, random_sequences
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS

from .saved_bytes import saved_bytes

SIZES = {
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 32},
    "qwen3-next": {"hidden_size": 48, "linear_key_head_dim": 32, "linear_value_head_dim": 64},
}


@pytest.mark.parametrize("lengths", [(512,), (512, 512)])
@pytest.mark.parametrize("name", SIZES)
def test_between_the_products_of_a_layer(name: str, lengths: tuple[int, ...]) -> None:
    config = config_from_dict(RECURRENT_CONFIGS[name] | SIZES[name])
    assert config.recurrence is not None
    model = build(config)
    initialize(model, 0)
    layer = model.model.layers[0]
    mixer = (layer.mixer if name == "mamba2" else layer.linear_attn).to(torch.bfloat16)
    batch, tokens = packed(random_sequences(config.vocab_size, lengths)), sum(lengths)
    x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16).requires_grad_()
    found = saved_bytes(lambda: mixer(x.add(0), batch), mixer) / tokens
    wanted = recurrent_bytes(config.recurrence, len(lengths) > 1) + 2 * config.hidden_size
    assert found == pytest.approx(wanted, rel=0.02)


def test_a_model_without_mlps_keeps_none() -> None:
    """What enters and what is normed, between the products, and nothing behind them."""
    config = config_from_dict(RECURRENT_CONFIGS["mamba2"] | SIZES["mamba2"])
    assert config.recurrence is not None
    found = {one: memory(TrainShape(config, 1 << 16, 512), one).activations for one in ("none", "operations", "layers")}
    each = {one: kept / (2 << 16) for one, kept in found.items()}
    assert each["none"] == 4 * 64 + 2 * 64 + recurrent_bytes(config.recurrence, True)
    assert each["operations"] == 4 * 64 + 2 * (128 + 128 + 2 * 2 * 32 + 8 + 64)
    assert each["layers"] == 2 * 64
