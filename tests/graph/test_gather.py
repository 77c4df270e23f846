"""What is left out behind the last attention, and the choices of experts that are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.fuse import fuse
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.mixtures import count_experts
from strata.graph.trace import operation_of, trace, trace_head
from strata.kernels.attention.attention import attention
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.experts import ExpertRouter
from strata.models.layers import CausalLM
from tests.models.batches import HandPaged
from tests.parallel.models import config_of, random_model

from .tiny import Tiny


def test_the_gather_stands_at_the_last_attention() -> None:
    graph = gather_after_attention(merge(trace(Tiny())))
    order = list(graph.graph.nodes)
    gathers = [node for node in order if node.target is torch.index_select]
    last = [node for node in order if operation_of(node) is attention][-1]
    assert len(gathers) == 2  # what attention gives, and the residual beside it
    assert gathers[0].args[0] is last or gathers[1].args[0] is last
    assert all(order.index(node) > order.index(last) for node in gathers)


def test_what_mixes_tokens_after_attention_is_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tiny()

        def forward(self, batch: Any) -> Tensor:
            return self.inner(batch).cumsum(0)

    with pytest.raises(ValueError, match="cumsum"):
        gather_after_attention(trace(Mixing()))


def test_a_graph_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention"):
        gather_after_attention(trace(Tiny(), "head"))


def a_model() -> tuple[CausalLM, ModelConfig]:
    """Of two layers, the last with eight experts, three a token."""
    config = config_of("qwen3-moe")
    return random_model(config, torch.float32).requires_grad_(False), config


def a_batch(config: ModelConfig) -> Batch:
    return HandPaged(config, 2, 16).next_batch({0: [3, 5, 9, 60], 1: [7, 1]})


def choices(model: CausalLM, batch: Batch) -> Tensor:
    """What the model's own router chooses, [tokens, per_token]."""
    found = []
    routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
    hooks = [router.register_forward_hook(lambda _, __, result: found.append(result[1])) for router in routers]
    model(batch)
    for hook in hooks:
        hook.remove()
    (chosen,) = found
    return chosen


def test_tokens_are_counted_and_results_stay() -> None:
    model, config = a_model()
    totals = torch.zeros(2, 8, dtype=torch.int64)
    plain = bind(fuse(merge(compose(trace(model), trace_head(model)))), "cpu")
    wanted, chosen = plain(a_batch(config)), choices(model, a_batch(config))
    graph = bind(fuse(merge(count_experts(compose(trace(model), trace_head(model)), totals))), "cpu")
    assert torch.equal(graph(a_batch(config)), wanted)
    assert totals.tolist() == [[0] * 8, chosen.flatten().bincount(minlength=8).tolist()]
    # Padding writes no keys and values; it is as little counted.
    batch = a_batch(config)
    assert batch.pages is not None
    places = batch.pages.slot_mapping.clone()
    places[2:] = -1
    graph(replace(batch, pages=replace(batch.pages, slot_mapping=places, index=None)))
    more = chosen[:2].flatten().bincount(minlength=8)
    assert torch.equal(totals[1], chosen.flatten().bincount(minlength=8) + more)


def test_of_rows_that_are_left_out_nothing_is_counted() -> None:
    model, config = a_model()
    totals = torch.zeros(2, 8, dtype=torch.int64)
    chosen = choices(model, a_batch(config))
    counting = count_experts(compose(trace(model), trace_head(model)), totals)
    rows = torch.tensor([3, 5], dtype=torch.int32)
    bind(gather_after_attention(fuse(merge(counting))), "cpu")(a_batch(config), rows)
    assert torch.equal(totals[1], chosen[rows.long()].flatten().bincount(minlength=8))


def test_a_graph_without_mixtures_stays() -> None:
    config = config_of("llama")
    graph = trace(random_model(config, torch.float32))
    before = [node.name for node in graph.graph.nodes]
    assert [node.name for node in count_experts(graph, torch.zeros(2, 8, dtype=torch.int64)).graph.nodes] == before
