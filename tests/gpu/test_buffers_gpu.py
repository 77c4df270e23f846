"""The planned buffers of steps are those that the allocator of a GPU gives, scratch of kernels among them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from strata.engine.build import Engine, build_engine
from strata.engine.engine_config import EngineConfig
from strata.graph.buffers import CUDA_BLOCK, buffer_plan
from strata.kernels.device_limits import DeviceLimits
from strata.models.shapes import SHAPES
from tests.engine.program.programs import decode
from tests.models.batches import HandPaged

pytestmark = pytest.mark.gpu

# Rotary tables end where the longest sequence does.
LAYERS, PAGE, LONGEST = 3, 16, 8192
# An allocator cuts a block only where more than so much would be left of it.
UNCUT = 2 << 20


@pytest.fixture(scope="module", params=[("0.6B", None), ("8B", None), ("8B", "fp8"), ("8B", "int4")], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    shape, quantization = request.param
    folder = tmp_path_factory.mktemp(shape)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": LAYERS}))
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": LONGEST,
        "num_pages": LONGEST // PAGE,
    }
    options |= {"device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 64, "quantization": quantization}
    return build_engine(EngineConfig.from_options(folder, options), log=lambda _: None)


def max_allocated(graph: fx.GraphModule, arguments: tuple[Any, ...]) -> int:
    """Beyond what is held before; the first run makes what is kept, such as the library's workspace."""
    with torch.inference_mode():
        graph.forward(*arguments)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        graph.forward(*arguments)
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def moved(value: Any, device: str) -> Any:
    return pytree.tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, value)


@pytest.mark.parametrize(("sequences", "tokens"), [(32, 1), (200, 1), (1, 2048), (1, LONGEST), (3, 700)])
def test_the_allocator_gives_what_was_planned(engine: Engine, sequences: int, tokens: int) -> None:
    cached = 200 if tokens == 1 else 0
    paged = HandPaged(engine.config, sequences, cached + tokens, PAGE, torch.bfloat16)
    if cached:
        paged.next_batch({row: [1] * cached for row in range(sequences)})
    batch = moved(paged.next_batch({row: [5] * tokens for row in range(sequences)}), "cuda")
    graph, arguments = engine.program.logits, (batch, torch.arange(sequences, dtype=torch.int32, device="cuda"))
    if tokens == 1:
        graph, arguments = decode(engine.program, sequences), (batch,)
    plan = buffer_plan(graph, moved(arguments, "meta"), DeviceLimits.of(engine.device), CUDA_BLOCK)
    found = max_allocated(graph, arguments)
    assert plan.peak == pytest.approx(found, rel=0.05, abs=UNCUT), (plan.peak_node, plan.peak, found)
