"""Attention of captured graphs becomes block-sparse where it sees all keys, and stays what it is elsewhere."""

from __future__ import annotations

import pytest
import torch

from strata.graph.capture import capture
from strata.graph.ranks.stages import stage
from strata.graph.sparsify_attention import select_pages, sparsify_attention
from strata.graph.walk import operation_counts
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.models.config import config_from_dict
from strata.models.families import build
from tests.models.checkpoints import FAMILY_CONFIGS

CHOICE = BlockChoice(0.9, 100)


@pytest.mark.parametrize("config", [config for _, config in FAMILY_CONFIGS], ids=[n for n, _ in FAMILY_CONFIGS])
def test_node_counts_of_every_family(config: dict[str, object]) -> None:
    read = config_from_dict(config)
    with torch.device("meta"):
        graph = capture(build(read))
    before = operation_counts(graph)
    assert sparsify_attention(graph, CHOICE) is graph
    counts, windows = operation_counts(graph), [w for w, own in zip(read.windows, read.attends, strict=True) if own]
    found = counts.pop("block_sparse_attention", 0)
    assert found == (0 if read.latent is not None else windows.count(None))
    assert counts.pop("attention", 0) == before.pop("attention", 0) - found
    assert counts == before
    graph.graph.lint()
    for node in graph.graph.nodes:
        if node.target is block_sparse_attention:
            assert node.args[4].window is None
            assert node.args[5] == CHOICE
            assert node.meta["layer"] == node.args[4].layer


@pytest.mark.parametrize(("first", "dense"), [(0, 2), (1, 1), (2, 0)])
def test_the_first_two_layers_are_those_of_the_model_not_of_its_stages(first: int, dense: int) -> None:
    with torch.device("meta"):
        model = build(config_from_dict(dict(FAMILY_CONFIGS)["llama-llama3"] | {"num_hidden_layers": 4}))
    counts = operation_counts(select_pages(stage(capture(model), first, 4, model), PageChoice(8)))
    assert counts["attention"] == dense
    assert counts["page_sparse_attention"] == 4 - first - dense
