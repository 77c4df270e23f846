"""What goes wrong under an engine: memory that ends, and logits that are NaN, which end one request alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata import LLM, SamplingParams
from strata.cache.pool import PoolShape
from strata.engine.faults import EngineFault, memory_explained
from strata.engine.ledger import Ledger, plan_memory
from strata.engine.outputs import RequestOutput
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from tests.engine.program.programs import plain_sizes

MORE_THAN_ANY_MACHINE_HAS = 1 << 60


@pytest.fixture
def ledger() -> Ledger:
    config = config_from_dict(SHAPES["0.6B"], "0.6B")
    pool = PoolShape(config.num_layers, 16, config.num_kv_heads, config.head_dim, torch.bfloat16)
    asked: dict[str, Any] = {"weight_bytes": 10**6, "utilization": 0.9, "num_pages": None, "scratch": 0}
    return plan_memory(config, plain_sizes(pool, 4, 64, 128), torch.device("cpu"), **asked)


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


NAN_TOKEN = 91
PREFIX = [(7 * i) % 83 for i in range(40)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={NAN_TOKEN: -100.0})
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.6, seed=3, max_tokens=12, ignore_eos=True),
    "filtered": SamplingParams(
        temperature=0.6, seed=3, top_k=20, top_p=0.9, min_p=0.01, max_tokens=12, ignore_eos=True
    ),
    "special": SamplingParams(
        temperature=0.6, seed=3, logprobs=2, repetition_penalty=1.2, bad_words=["fox"], max_tokens=12, ignore_eos=True
    ),
}


def break_embedding(folder: Path, path: Path) -> Path:
    """A copy of the checkpoint, in `path`, with one embedding that is NaN."""
    for file in folder.iterdir():
        path.joinpath(file.name).write_bytes(file.read_bytes())
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def broken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return break_embedding(folder, tmp_path_factory.mktemp("broken"))


def engine(folder: Path, *, run_ahead: bool = False, **options: Any) -> LLM:
    llm = LLM(folder, **{"device": "cpu", "dtype": "float32", "num_pages": 100, **options})
    llm.engine.loop._run_ahead = run_ahead
    return llm


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert llm.engine.loop.idle
    llm.engine.loop.scheduler.check()
    return outputs


def assert_failed(output: RequestOutput) -> None:
    assert output.finished
    assert output.error is not None
    assert "NaN" in output.error
    assert "\n" not in output.error
    for sample in output.outputs:
        assert sample.finish_reason == "error"


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("chunk", [16, 512])
def test_the_others_get_the_same_bits(broken: Path, params: SamplingParams, run_ahead: bool, chunk: int) -> None:
    options: dict[str, Any] = {"run_ahead": run_ahead, "max_num_batched_tokens": chunk, "deterministic": True}
    healthy = [[*PREFIX, 1, 2, 3], [5, 6], list(range(30))]
    alone = run(engine(broken, **options), healthy, params)
    llm = engine(broken, **options)
    outputs = run(llm, [healthy[0], [*PREFIX, NAN_TOKEN, 4], healthy[1], [NAN_TOKEN], healthy[2]], params)
    assert_failed(outputs[1])
    assert_failed(outputs[3])
    assert outputs[1].outputs[0].token_ids == []
    for output, want in zip((outputs[0], outputs[2], outputs[4]), alone, strict=True):
        assert output.error is None
        assert NAN_TOKEN not in output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        assert output.outputs[0].logprobs == want.outputs[0].logprobs


def test_its_pages_do_not_enter_the_prefix_cache(broken: Path) -> None:
    llm = engine(broken)
    lost = [*PREFIX[:20], NAN_TOKEN, *PREFIX[20:], *range(30)]
    for _ in range(2):
        (output,) = run(llm, [lost])
        assert_failed(output)
        assert output.num_cached_tokens == 0
    run(llm, [[*PREFIX, 1]])
    (output,) = run(llm, [lost])
    assert_failed(output)
    assert output.num_cached_tokens == 16  # a page that a healthy request had filled before
    (again,) = run(llm, [[*PREFIX, 2]])
    assert again.num_cached_tokens == 32


def test_all_samples_of_the_request_end(broken: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)
    lost, healthy = run(engine(broken, max_num_seqs=2), [[1, 2, NAN_TOKEN], [1, 2, 3]], params)
    assert_failed(lost)
    assert [len(sample.token_ids) for sample in healthy.outputs] == [5, 5, 5]


def test_a_stream_ends_with_the_error(broken: Path) -> None:
    llm = engine(broken)
    shown = list(llm.stream({"prompt_token_ids": [1, NAN_TOKEN]}, GREEDY))
    assert len(shown) == 1
    assert_failed(shown[0])
    llm.engine.loop.scheduler.check()
    assert run(llm, [[1, 2]])[0].error is None


def poison(llm: LLM, page: int) -> None:
    pool = llm.engine.loop._runner.pool
    pool.values[1][page, 3] = torch.nan


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_page_that_breaks_while_a_sequence_runs(folder: Path, run_ahead: bool) -> None:
    llm = engine(folder, run_ahead=run_ahead)
    whole = run(llm, [[*PREFIX, 1]])[0].outputs[0]
    stream = llm.stream({"prompt_token_ids": [*PREFIX, 1]}, GREEDY)
    shown = [next(stream) for _ in range(4)]
    poison(llm, llm.engine.loop.scheduler._queues.running[0].pages[0])
    shown += list(stream)
    assert_failed(shown[-1])
    told = shown[-1].outputs[0]
    assert 4 <= len(told.token_ids) <= 5  # one more if a step was under way
    assert told.token_ids == whole.token_ids[: len(told.token_ids)]
    assert whole.text.startswith(told.text)
    llm.engine.loop.scheduler.check()


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("place", [0, 2], ids=["a page of the prompt", "a page of the output"])
def test_a_page_that_broke_under_a_sequence_is_not_kept_as_verified(folder: Path, run_ahead: bool, place: int) -> None:
    """That the sequence had drawn from it before does not count."""
    asked, long = [*PREFIX[:30], 1], replace(GREEDY, max_tokens=40)
    whole = run(engine(folder), [asked], long)[0].outputs[0].token_ids
    llm = engine(folder, run_ahead=run_ahead)
    stream = llm.stream({"prompt_token_ids": asked}, long)
    ids = [next(stream) for _ in range(20)][-1].outputs[0].token_ids
    poison(llm, llm.engine.loop.scheduler._queues.running[0].pages[place])
    assert_failed(list(stream)[-1])
    follower = [*asked, *ids[:-1]]  # begins with all pages that the sequence had filled
    outputs = [run(llm, [follower])[0] for _ in range(3)]
    assert [output.error is None for output in outputs][1:] == [True, True], "found broken more than once"
    assert outputs[-1].outputs[0].token_ids == whole[len(ids) - 1 :][: GREEDY.max_tokens]


def test_a_cached_page_that_breaks_fails_who_shares_it_and_is_computed_anew(folder: Path) -> None:
    llm = engine(folder)
    prompts = [[*PREFIX, 1], [*PREFIX, 2], [9, 8, 7]]
    want = [output.outputs[0].token_ids for output in run(llm, prompts)]
    tree = llm.engine.loop.scheduler._prefixes._tree
    assert tree is not None
    held = tree.match([*PREFIX, 1])
    poison(llm, held[1])
    tree.release([], held)
    lost, too, healthy = run(llm, prompts)
    assert_failed(lost)
    assert_failed(too)
    assert healthy.outputs[0].token_ids == want[2]
    assert [output.outputs[0].token_ids for output in run(llm, prompts)] == want


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_pages_hold_beyond_a_sequence_does_not_matter(folder: Path, deterministic: bool) -> None:
    prompts = [[*PREFIX, 1], [5], [*PREFIX, 2, 3], list(range(70))]
    want = [output.outputs[0].token_ids for output in run(engine(folder, deterministic=deterministic), prompts)]
    llm = engine(folder, deterministic=deterministic)
    pool = llm.engine.loop._runner.pool
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(torch.nan)
    assert [output.outputs[0].token_ids for output in run(llm, prompts)] == want
