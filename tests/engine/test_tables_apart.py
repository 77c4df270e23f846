"""Block tables on the device that receive what changed: same ids, and the same bytes however long sequences may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.staging import Staging

OPTIONS: dict[str, Any] = {"device": "cpu", "deterministic": True, "max_num_seqs": 16, "max_num_batched_tokens": 40}


def made(folder: Path, **options: Any) -> LLM:
    """An engine whose tables on the device are other memory than the host's, as on CUDA."""
    llm = LLM(folder, **OPTIONS, **options)
    tables = llm.engine.loop._runner._tables
    tables.on_device, tables._shared = torch.zeros(tables.rows.shape, dtype=torch.int32), False
    return llm


def ids(llm: LLM) -> list[list[int]]:
    shared = [(11 * place) % 300 for place in range(37)]
    prompts = [shared[: 5 + number * 3] + [number] * (number % 5 * 9) for number in range(10)]
    params = [
        SamplingParams(n=3 if number % 3 == 0 else 1, temperature=0.8, seed=number, max_tokens=25, ignore_eos=True)
        for number in range(len(prompts))
    ]
    found = []
    for _ in range(2):  # the second time with cached prefixes
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        found += [sample.token_ids for output in outputs for sample in output.outputs]
    return found


def test_forks_preemptions_and_cached_prefixes_find_their_pages(folder: Path) -> None:
    wanted = ids(LLM(folder, num_pages=300, **OPTIONS))
    assert ids(made(folder, num_pages=300)) == wanted
    tight = made(folder, num_pages=18)
    assert ids(tight) == wanted
    assert tight.engine.loop.scheduler.statistics.preemptions > 0
    tables = tight.engine.loop._runner._tables
    assert torch.equal(tables.on_device, torch.from_numpy(tables.rows))


def test_bytes_of_a_decode_step_do_not_grow_with_the_longest_sequence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(Staging, "send", lambda self, target: sent.append(4 * len(target)))
    steps = []
    for length in (64, 256):
        llm = made(folder, max_model_len=length, num_pages=300)
        prompts = [{"prompt_token_ids": [number] * 8} for number in range(4)]
        sent.clear()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
        steps.append(list(sent))
    assert steps[0] == steps[1]
    decodes = steps[0][2:]
    fields = (18 * 4 + 3) * 4  # eighteen numbers for each of four sequences, one more offset and two bounds
    changes = 4 * 3 * 4  # a page each, with its place
    assert sum(decodes) == 29 * fields + 2 * changes
