"""A model and its head as one graph: the same logits, the same parameters, and nothing fetched twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata.graph.bind import bind
from strata.graph.capture import capture, capture_head
from strata.graph.compose import compose
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.walk import operation_counts
from strata.models.config import config_from_dict
from strata.models.families import build
from tests.models.batches import packed, random_sequences
from tests.models.checkpoints import FAMILY_CONFIGS

families = pytest.mark.parametrize(
    "config", [config for _, config in FAMILY_CONFIGS], ids=[n for n, _ in FAMILY_CONFIGS]
)


@families
def test_logits_are_those_of_the_head_of_the_model(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    read = config_from_dict(config)
    model = build(read).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)
    graph, head = capture(model), capture_head(model)
    counts = operation_counts(graph) + operation_counts(head)
    nodes = [len(part.graph.nodes) for part in (graph, head)]
    whole = compose(graph, head)
    whole.graph.lint()
    assert operation_counts(whole) == counts
    assert [len(part.graph.nodes) for part in (graph, head)] == nodes
    batch = packed(random_sequences(read.vocab_size, (5, 1, 9)))
    assert torch.equal(whole(batch), head(graph(batch)))
    shared = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        assert parameter is shared[name]
    fetched = [node.target for node in whole.graph.nodes if node.op == "get_attr"]
    assert len(fetched) == len(set(fetched))
    expected = whole(batch)
    bound = bind(fuse(merge(whole)), "cpu")
    torch.testing.assert_close(bound(batch), expected, rtol=1e-5, atol=1e-5)


def test_nodes_keep_their_modules_and_parameters() -> None:
    config = config_from_dict(dict(FAMILY_CONFIGS)["qwen3-linear"])
    with torch.device("meta"):
        model = build(config)
    parts = [capture(model), capture_head(model)]
    before = [node.meta for part in parts for node in part.graph.nodes if node.op not in ("placeholder", "output")]
    after = [node.meta for node in compose(*parts).graph.nodes if node.op not in ("placeholder", "output")]
    for key in ("module", "layer", "parameters"):
        assert [meta.get(key) for meta in after] == [meta.get(key) for meta in before]
