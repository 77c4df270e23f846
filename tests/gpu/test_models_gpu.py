"""Logits of the benchmark shapes in bf16: their error against float32 beside that of transformers in bf16."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strata.cache.pool import KVPool, PoolShape
from strata.graph.bind import bind
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.trace import trace, trace_head
from strata.kernels.state.paged import PagedKV
from strata.models import weights
from strata.models.batch import Batch
from strata.models.shapes import SHAPES

PAGE, LENGTH, PREFILLED = 16, 600, 560

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", ["0.6B", "8B"])
def test_error_of_bf16_logits(shape: str, deterministic: bool, tmp_path: Path) -> None:
    model, config = weights.load(shape, "cuda", "bfloat16", "dummy")
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    ids = torch.randint(0, config.vocab_size, (LENGTH,), device="cuda", dtype=torch.int32)
    with torch.device("cuda"):
        peer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16).eval()
    peer.load_state_dict(model.state_dict(), strict=False)
    with torch.inference_mode():
        theirs = peer(ids[None]).logits[0].float()
        truth = peer.float()(ids[None]).logits[0]
    del peer
    gc.collect()
    torch.cuda.empty_cache()
    graph = bind(fuse(merge(trace(model))), "cuda", deterministic)
    head = bind(trace_head(model), "cuda", deterministic)
    pool_shape = PoolShape(config.num_layers, PAGE, config.num_kv_heads, config.head_dim, torch.bfloat16)
    pool = KVPool(pool_shape, LENGTH // PAGE + 2, torch.device("cuda"))
    with torch.inference_mode():
        hidden = [step(graph, pool, ids, 0, PREFILLED)]
        hidden += [step(graph, pool, ids, at, 1) for at in range(PREFILLED, LENGTH)]
        ours = head(torch.cat(hidden)).float()

    def error(logits: torch.Tensor, rows: slice) -> float:
        return float((logits[rows] - truth[rows]).norm() / truth[rows].norm())

    prefill, decode = slice(0, PREFILLED), slice(PREFILLED, LENGTH)
    result = {
        "shape": shape,
        "deterministic": deterministic,
        "prefill": (error(ours, prefill), error(theirs, prefill)),
        "decode": (error(ours, decode), error(theirs, decode)),
    }
    print(json.dumps(result))
    for mine, peers in (result["prefill"], result["decode"]):
        assert mine <= 1.2 * peers


def step(graph: torch.fx.GraphModule, pool: KVPool, ids: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Run `count` tokens from `start` on through pages in reverse order."""
    pages = torch.arange(pool.pages - 1, -1, -1, device="cuda", dtype=torch.int32)
    position = torch.arange(start, start + count, device="cuda", dtype=torch.int32)
    slots = pages[position // PAGE] * PAGE + position % PAGE
    lengths = torch.tensor([start + count], device="cuda", dtype=torch.int32)
    paged = PagedKV(pool.keys, pool.values, pages[None], lengths, slots)
    offsets = torch.tensor([0, count], device="cuda", dtype=torch.int32)
    hidden: torch.Tensor = graph(Batch(ids[start : start + count], position, offsets, count, paged))
    return hidden
