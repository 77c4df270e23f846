"""The balancing loss against transformers', its division into shares, and the bias that balances without a loss."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from strata.models.balance import (
    add_selection_bias,
    balancing_loss,
    observe_routing,
    routers,
    update_selection_bias,
)

from .batches import packed, random_sequences
from .sparse_models import SPARSE_CONFIGS, pair


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-dense-layers-biases"])
def test_loss_and_gradient_equal_transformers(name: str) -> None:
    model, oracle = pair(name)
    (sequence,) = random_sequences(83, (37,))
    with observe_routing(model) as seen:
        model(packed([sequence]))
    routing = seen.routing()
    loss = balancing_loss(routing, routing.counts, routing.tokens)
    logits = oracle(torch.tensor([sequence]), output_router_logits=True).router_logits
    config = SPARSE_CONFIGS[name]
    count = config.get("num_experts", config.get("num_local_experts"))
    wanted = load_balancing_loss_func(logits, count, config["num_experts_per_tok"])
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    for key, parameter in oracle.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_shares_of_batches_add_up() -> None:
    model, _ = pair("mixtral")
    first, second = random_sequences(83, (20, 11))
    found = []
    for sequences in ([first, second], [first], [second]):
        with observe_routing(model) as seen, torch.no_grad():
            model(packed(sequences))
        found.append(seen.routing())
    whole, *parts = found
    assert torch.equal(sum(part.counts for part in parts), whole.counts)
    shares = sum(balancing_loss(part, whole.counts, whole.tokens) for part in parts)
    torch.testing.assert_close(shares, balancing_loss(whole, whole.counts, whole.tokens))


@torch.no_grad()
def test_the_bias_evens_out_what_experts_get() -> None:
    model, _ = pair("mixtral")
    batch = packed(random_sequences(83, (120,)))
    add_selection_bias(model)
    spread = []
    for _ in range(200):
        with observe_routing(model) as seen:
            model(batch)
        counts = seen.routing().counts
        assert counts.sum(1).tolist() == [240, 240]
        spread.append((counts.double().std(1) / counts.double().mean(1)).max().item())
        update_selection_bias(model, counts, 0.01)
    assert min(spread[-5:]) < 0.4 * spread[0]


@torch.no_grad()
def test_a_bias_goes_up_for_the_idle_and_down_for_the_busy() -> None:
    model, _ = pair("mixtral")
    add_selection_bias(model)
    update_selection_bias(model, torch.tensor([[4, 0, 2, 2, 2], [2, 2, 2, 2, 2]]), 0.5)
    first, second = (router.selection_bias for router in routers(model))
    assert first is not None
    assert second is not None
    assert first.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0]
    assert second.tolist() == [0.0] * 5
