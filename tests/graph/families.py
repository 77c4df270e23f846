"""Models of every family with random weights, their graphs by each way that the passes make them, and steps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_decode_attention, fuse_gated_products
from strata.graph.fuse_products import fuse_products
from strata.graph.merge import merge
from strata.graph.trace import trace, trace_head
from strata.graph.walk import meta_indices, meta_pages
from strata.hardware.roofline import Workload
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.models.layers import CausalLM
from tests.models.checkpoints import FAMILY_CONFIGS

CONFIGS = dict(FAMILY_CONFIGS)
families = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def model_of(config: dict[str, Any]) -> tuple[CausalLM, ModelConfig]:
    read = config_from_dict(config)
    model = build(read).requires_grad_(False)
    # The same in every run: two experts that are chosen alike but for a rounding would be a failure of the test alone.
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.2, generator=generator).add_(1.0 if "norm" in name else 0.0)
    return model, read


def meta_model_of(name: str) -> tuple[CausalLM, ModelConfig]:
    """Without weights."""
    read = config_from_dict(CONFIGS[name])
    with torch.device("meta"):
        return build(read), read


def whole(model: CausalLM) -> fx.GraphModule:
    """From Batch to logits."""
    return compose(trace(model), trace_head(model))


def fused(model: CausalLM) -> fx.GraphModule:
    return fuse(merge(whole(model)))


# What makes a graph of a model; each pass but the first two on top of what `fused` does.
WAYS: dict[str, Callable[[CausalLM], fx.GraphModule]] = {
    "captured": whole,
    "merged": lambda model: merge(whole(model)),
    "fused": fused,
    "decode attention": lambda model: fuse_decode_attention(fused(model)),
    "products": lambda model: fuse_products(fused(model)),
    "gated products": lambda model: fuse_gated_products(fused(model)),
}


def meta_step(config: ModelConfig, workload: Workload) -> Batch:
    sizes = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    pages = meta_pages(workload, layers=config.num_layers, dtype=torch.float32, **sizes)
    tokens = meta_indices(workload.tokens)
    return Batch(tokens, tokens, meta_indices(len(workload.new) + 1), max(workload.new), pages)
