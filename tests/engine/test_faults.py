"""Running out of memory: what is said, and what an engine is good for afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from strata.cache.pool import PoolShape
from strata.engine.faults import EngineFault, memory_explained
from strata.engine.ledger import Ledger, plan_memory
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES

MORE_THAN_ANY_MACHINE_HAS = 1 << 60


@pytest.fixture
def ledger() -> Ledger:
    config = config_from_dict(SHAPES["0.6B"], "0.6B")
    return plan_memory(
        config,
        PoolShape(config.num_layers, 16, config.num_kv_heads, config.head_dim, torch.bfloat16),
        torch.device("cpu"),
        weight_bytes=10**6,
        max_tokens=64,
        max_sequences=4,
        max_length=128,
        utilization=0.9,
        num_pages=None,
        dtype=torch.bfloat16,
        recorded=[],
        scratch=0,
    )


def test_it_says_what_was_being_done_what_is_held_and_the_remedy(ledger: Ledger) -> None:
    with pytest.raises(EngineFault) as caught, memory_explained("counting sheep", ledger):
        torch.empty(MORE_THAN_ANY_MACHINE_HAS, dtype=torch.uint8)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("out of memory on cpu while counting sheep: lower ")
    for remedy in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert remedy in first
    assert rest == ledger.lines()


def test_an_error_that_hides_it_is_seen_through(ledger: Ledger) -> None:
    def record() -> None:
        try:
            torch.empty(MORE_THAN_ANY_MACHINE_HAS, dtype=torch.uint8)
        finally:
            raise RuntimeError("the recording was broken off")

    with pytest.raises(EngineFault), memory_explained("recording", ledger):
        record()


def test_other_errors_are_left_as_they_are(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match="shape"), memory_explained("reshaping", ledger):
        torch.zeros(3).view(2)


SCRIPT = """
import resource, sys
import torch
from strata import LLM, SamplingParams
from strata.engine.faults import EngineFault

torch.set_num_threads(1)
llm = LLM(sys.argv[1], device="cpu", dtype="float32", num_pages=3000, max_num_seqs=150, max_num_batched_tokens=40000)
params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
llm.generate([[1, 2, 3]], params, use_tqdm=False)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (8 << 20), resource.RLIM_INFINITY))
messages = []
for prompts in ([[i % 300] * 250 for i in range(140)], [[1, 2, 3]]):
    try:
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    except EngineFault as fault:
        messages.append(str(fault))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert len(messages) == 2, messages
assert messages[0] == messages[1]
assert "while running a step of 35,000 tokens from 140 sequences" in messages[0], messages[0]
assert "KV pages" in messages[0]
assert llm.engine.loop.idle
llm.engine.loop.scheduler.check()
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")
def test_an_engine_that_ran_out_of_memory_in_a_step_refuses_work(folder: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
