"""Recorded steps of a model whose layers have windows, or not, on a CPU: same ids as launched eagerly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.staging import Staging
from strata.engine.program.sizes import recorded_sizes
from strata.engine.runner import Runner
from tests.engine.program.test_recorded_steps import Replayed
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 48, "seed": 1, "num_pages": 90,
    "skip_tokenizer_init": True,
}  # fmt: skip


def ids(llm: LLM) -> list[list[int]]:
    shared = [(7 * place) % 80 for place in range(150)]
    prompts = [[*shared, 3, 4], shared[:100] + [5] * 9, [6] * 31]
    params = SamplingParams(n=2, temperature=0.8, seed=2, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.mark.parametrize("name", ["mistral-window", "qwen3-biases-window"])
def test_the_same_ids_as_eagerly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / name, dict(FAMILY_CONFIGS)[name] | {"max_position_embeddings": 448})
    wanted = ids(LLM(folder, **OPTIONS))
    graphs = Replayed()
    monkeypatch.setattr(Runner, "_recordings", lambda self: graphs)
    monkeypatch.setattr(Staging, "target", lambda self, size: torch.full((size,), -77, dtype=torch.int32))
    monkeypatch.setattr(Staging, "send", lambda self, target: target.copy_(self.host[: len(target)]))
    llm = LLM(folder, **OPTIONS)
    runner = llm.engine.loop._runner
    others = [tables for _, tables, _ in runner._windows._others]
    for tables in (runner._tables, *others):  # memory of their own, as on CUDA
        tables.on_device, tables._shared = torch.zeros(tables.rows.shape, dtype=torch.int32), False
    sizes = recorded_sizes(4, 48, 10**6, library=False)
    runner.record([replace(size, groups=1 + len(others)) for size in sizes])
    assert ids(llm) == wanted
    assert {key[1] for key in graphs.replayed} == {"run", "draw"}
    assert all(torch.equal(tables.on_device, torch.from_numpy(tables.rows)) for tables in others)
