"""The bytes that products and attention of a run move, forward and backward, from the graph that is captured of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.graph.capture import capture
from strata.graph.cost import meta_indices, node_costs
from strata.hardware.roofline import Workload
from strata.models.batch import Batch
from strata.models.families import build
from strata.plan.training_explain.recorded_run import RecordedRun
from strata.train.predict.layer_costs import ATTENTIONS, MIXTURES


@dataclass(frozen=True)
class MovedBytes:
    """Of all steps, on one rank: operands read once, results written once. products: with the head."""

    products: int
    attention: int


def moved_bytes(run: RecordedRun) -> MovedBytes:
    """Packs are taken to be alike, their sequences equally long, and ranks to share the work."""
    what, packs = run.what, max(1, run.packs)
    dtype = torch.bfloat16 if what.kind == "cuda" else torch.float32
    sequences = max(1, run.sequences // packs)
    length = max(1, run.tokens // packs // sequences)
    ids = meta_indices(sequences * length)
    lengths = (length,) * sequences
    with torch.device("meta"):
        graph = capture(build(what.model).to(dtype))
    batch = Batch(ids, ids, meta_indices(sequences + 1), length, None)
    found = {"products": 0, "attention": 0}
    for node in node_costs(graph, batch, Workload(lengths, lengths), gradients=True):
        if node.operation in ATTENTIONS:
            found["attention"] += node.cost.bytes + node.backward.bytes
        elif node.weight is not None or node.operation in MIXTURES:
            found["products"] += node.cost.bytes + node.backward.bytes
    vocabulary, hidden = what.model.vocab_size, what.model.hidden_size
    rows = run.flops.head // (6 * vocabulary * hidden)
    head = 3 * dtype.itemsize * (packs * vocabulary * hidden + rows * (hidden + vocabulary))
    ranks = what.layout.ranks
    return MovedBytes((found["products"] * packs + head) // ranks, found["attention"] * packs // ranks)
