"""Memory runs out while steps are captured: before a CUDA graph or within it, the sizes after it come out whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine import runner
from strata.graph.cudagraph import CudaGraphs
from strata.models.shapes import SHAPES

pytestmark = pytest.mark.gpu

MORE_THAN_ANY_GPU_HAS = 1 << 45


def short_of_memory(graphs: str, least: int, within: bool) -> type[CudaGraphs]:
    """Runs out of memory in graphs ("run" or "draw") of steps of at least so many tokens, while they are captured or in
    the run before."""

    class Short(CudaGraphs):
        def capture_graph(self, key: Hashable, run: Callable[[], None], *rest: Any, **options: Any) -> None:
            def short() -> None:
                run()
                is_due = torch.cuda.is_current_stream_capturing() == within
                if is_due and key[1] == graphs and key[0].tokens >= least:  # type: ignore[index]
                    torch.empty(MORE_THAN_ANY_GPU_HAS, dtype=torch.uint8, device="cuda")

            super().capture_graph(key, short, *rest, **options)

    return Short


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPES["0.6B"] | {"num_hidden_layers": 4}))
    return folder


def engine(folder: Path) -> LLM:
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048}
    return LLM(folder, num_pages=1000, max_num_seqs=40, max_num_batched_tokens=1000, deterministic=True, **options)


def ids(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": list(range(length))} for length in (5, 90, 700, 1500, 40, 40)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    return ids(engine(folder))


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("graphs", "least"), [("run", 500), ("draw", 500), ("run", 1)])
def test_the_start_goes_on_without_those_sizes(
    folder: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, graphs: str, least: int, within: bool
) -> None:
    stream = torch.cuda.current_stream()
    monkeypatch.setattr(runner, "CudaGraphs", short_of_memory(graphs, least, within))
    llm = engine(folder)
    assert torch.cuda.current_stream() == stream
    found = llm.engine.captured
    assert found is not None
    assert found.lacking
    # Where a run before is broken off, smaller sizes that need none are captured.
    assert all(size.tokens < least for size in found.sizes) or not within
    assert ids(llm) == wanted
    assert found.uncaptured["out_of_memory"] > 0
    torch.cuda.synchronize()
    torch.empty(1000, device="cuda")  # nothing thinks that a CUDA graph is under way
