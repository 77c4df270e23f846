"""The balancing loss and its gradient against transformers', layer by layer, and what routers count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from strata.models.balance import Balance, balancing_loss, balancing_slopes, fractions, routers
from strata.models.layers import CausalLM

from .batches import packed, random_sequences
from .sparse_models import SPARSE_CONFIGS, pair

WEIGHT = 0.3


def balanced(model: CausalLM, sequences: list[list[int]], slopes: Tensor | None) -> Tensor:
    """[layers, 2, experts], what the routers add up in a backward pass whose own gradient is zero."""
    found = routers(model).values()
    totals = torch.zeros(len(found), 2, next(iter(found)).weight.shape[0], dtype=torch.float64)
    for place, router in enumerate(found):
        router.balance = Balance(totals[place], None if slopes is None else slopes[place])
    (model(packed(sequences)).sum() * 0).backward()
    return totals


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-dense-layers-biases"])
def test_loss_and_gradient_equal_transformers_layer_by_layer(name: str) -> None:
    model, oracle = pair(name)
    (sequence,) = random_sequences(83, (37,))
    config = SPARSE_CONFIGS[name]
    count, per_token = config.get("num_experts", config.get("num_local_experts")), config["num_experts_per_tok"]
    logits = oracle(torch.tensor([sequence]), output_router_logits=True).router_logits
    wanted = sum(load_balancing_loss_func((one,), count, per_token) for one in logits) / len(logits)
    totals = balanced(model, [sequence], None)
    assert totals[:, 0].sum(1).tolist() == [37 * per_token] * len(logits)
    shares = fractions(totals[:, 0], per_token)
    torch.testing.assert_close(balancing_loss(shares, totals[:, 1] / 37).float(), wanted)
    model.zero_grad()
    balanced(model, [sequence], balancing_slopes(shares, torch.tensor(37), WEIGHT))
    (WEIGHT * wanted).backward()
    for key, parameter in oracle.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_totals_of_batches_add_up() -> None:
    model, _ = pair("mixtral")
    first, second = random_sequences(83, (20, 11))
    whole, *parts = (balanced(model, sequences, None) for sequences in ([first, second], [first], [second]))
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_fractions_without_tokens_are_zero() -> None:
    assert fractions(torch.zeros(2, 3), 2).tolist() == [[0.0] * 3] * 2
