"""Where cuDNN cannot attend for prompts, the engine says why and goes on; planned splits; requests before the first."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.pages import PageAllocator
from strata.cache.pool import KVPool, PoolShape
from strata.cache.prefix import PrefixTree
from strata.engine.engine_config import EngineConfig, library_limit
from strata.engine.ledger import DeviceMemory
from strata.engine.loop import EngineLoop
from strata.engine.plan import StepPlan
from strata.engine.scheduling.config import SchedulerConfig, Statistics
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.startup.executor import has_library_plan, library_scales, without_library
from strata.engine.startup.memory import RankPlace, rank_memory, rank_setup
from strata.engine.warm_up import warm_up
from strata.hardware.specs import device
from strata.kernels.attention import decode_cuda
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.cudnn_prompts import PlanShape
from strata.kernels.attention.decode_tile import decode_tile
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.state.paged import PagedKV
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.layers import Attention
from strata.models.shapes import SHAPES
from tests.engine.simulated import VOCABULARY, SimulatedRunner, Unchecked

HOPPER = DeviceLimits("NVIDIA H200", (9, 0), 227 * 1024, 132)
CONFIG = config_from_dict(SHAPES["0.6B"], "0.6B")


@pytest.mark.parametrize(
    ("changed", "dtype", "page_size", "limits", "why"),
    [
        ({}, torch.bfloat16, 16, HOPPER, None),
        ({}, torch.float16, 64, HOPPER, None),
        ({"windows": (None, 512) * 14}, torch.bfloat16, 16, HOPPER, None),
        ({"windows": (512,) * 28}, torch.bfloat16, 16, HOPPER, "all layers have windows"),
        ({"head_dim": 80}, torch.bfloat16, 16, HOPPER, "heads have 80 elements, not 64 or 128"),
        ({}, torch.float32, 16, HOPPER, "it takes no float32"),
        ({}, torch.bfloat16, 8, HOPPER, "pages have 8 tokens, fewer than 16"),
        ({}, torch.bfloat16, 16, replace(HOPPER, product="A100", capability=(8, 0)), "A100 is no Hopper"),
    ],
)
def test_what_it_does_not_take_has_a_reason(
    changed: dict, dtype: torch.dtype, page_size: int, limits: DeviceLimits, why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert library_limit(limits, replace(CONFIG, **changed), dtype, page_size) == why


def test_a_front_end_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why = library_limit(HOPPER, CONFIG, torch.bfloat16, 16)
    assert why == "nvidia-cudnn-frontend is not installed"
    assert "without cuDNN: nvidia-cudnn-frontend is not installed" in without_library(why)


def test_a_plan_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("cudnn")
    old.backend_version = lambda: 90500  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", old)
    pool = KVPool(PoolShape(1, 16, 8, 128, torch.bfloat16), 2, torch.device("cpu"))
    told: list[str] = []
    assert not has_library_plan(CONFIG, {0.1}, pool, 4096, True, told.append)
    assert len(told) == 1
    assert "90500" in told[0]
    assert "\n" not in told[0]


def test_nothing_is_imported_before_a_plan_is_made() -> None:
    program = "import sys, strata.engine.build, strata.plan.meta_model; sys.exit('cudnn' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_front_end_that_has_no_origin_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some put an empty module in its place."""
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    assert library_limit(HOPPER, CONFIG, torch.bfloat16, 16) == "nvidia-cudnn-frontend is not installed"


def test_plans_are_made_for_the_scales_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers without a window; those of others attend otherwise."""
    with torch.device("meta"):
        model = build(replace(CONFIG, num_layers=3, windows=(None, 512, None)), 4096)
    for module in model.modules():
        if isinstance(module, Attention):
            module.spec = module.spec._replace(scale=0.25 * (1 + module.spec.layer))
    scales = library_scales(model)
    assert scales == {0.25, 0.75}
    made: list[tuple[float, int, int, int]] = []

    def plan(shape: PlanShape, _: torch.device) -> None:
        made.append((shape.scale, shape.key_row, shape.value_row, shape.longest))
        if len(made) == 4:
            raise RuntimeError("no such plan\nin detail")

    monkeypatch.setattr("strata.engine.startup.executor.plan_for", plan)
    pool = KVPool(PoolShape(1, 16, 8, 128, torch.bfloat16), 2, torch.device("cpu"))
    told: list[str] = []
    assert not has_library_plan(CONFIG, scales, pool, 4096, True, told.append)
    fresh, gathered = (24 * 128, 24 * 128 + 8 * 128, 8192), (8 * 128, 8 * 128, 4096)
    assert made == [(0.25, *fresh), (0.25, *gathered), (0.75, *fresh), (0.75, *gathered)]
    made.clear()
    assert has_library_plan(CONFIG, scales, pool, 4096, False, told.append)
    assert made == [(0.25, *gathered), (0.75, *gathered)]
    assert told == ["steps attend for prompts without cuDNN: no such plan"]


pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_of_pages_in_8_bits_and_in_16(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = {}

    def noted(sequences: int, keys: int, *shape: Any, rounded: bool, some: bool) -> int:
        planned[sequences, some] = found = scratch_bytes(sequences, keys, *shape, rounded=rounded, some=some)
        return found

    scratch_bytes = decode_cuda.scratch_bytes
    monkeypatch.setattr(decode_cuda, "scratch_bytes", noted)
    asked = EngineConfig("nowhere", max_num_seqs=16, max_model_len=32768, kv_cache_dtype=kind)
    config = config_from_dict(SHAPES["8B"])
    memory = DeviceMemory("a GPU", 141 << 30, 141 << 30)
    place = RankPlace(torch.device("cuda"), DeviceLimits.listed(device("h200")), 0, memory)
    rank_memory(asked, config, place, rank_setup(asked, config, place))
    assert set(planned) >= {(1, False), (2, False), (4, False), (8, False), (16, False), (17, True)}
    for (sequences, some), nbytes in planned.items():
        tile = decode_tile(32, 8, 128, torch.bfloat16, sequences, 32768, rounded=kind == "fp8", some=some)
        assert nbytes == sequences * tile.splits * 32 * (128 + 1) * 4


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        # Keys and values of 131,072 tokens of 8 heads, for steps that are launched and for those that are replayed.
        ({"max_num_batched_tokens": 512}, 2 * 2 * 131_072 * 8 * 128 * 2),
        ({"tensor_parallel_size": 4, "all_reduce_group_size": 2}, 2 << 30),  # two groups more for NCCL
        ({"passes": "+fold_norm_weights"}, None),
    ],
    ids=str,
)
def test_what_some_options_take_is_set_aside(changed: dict[str, Any], more: int | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    config, memory = config_from_dict(SHAPES["8B"]), DeviceMemory("a GPU", 141 << 30, 141 << 30)
    place = RankPlace(torch.device("cuda"), DeviceLimits.listed(device("h200")), 0, memory)

    def planned(**options: Any) -> Any:
        asked = EngineConfig(
            "nowhere", **{"max_num_seqs": 16, "max_model_len": 16_384, "max_num_batched_tokens": 256, **options}
        )
        return rank_memory(asked, config, place, rank_setup(asked, config, place))

    def taken(ledger: Any) -> int:
        return ledger.activations + ledger.graphs + ledger.messages

    if "tensor_parallel_size" in changed:
        assert taken(planned(**changed)) - taken(planned(tensor_parallel_size=4)) == more
    elif more is not None:
        fewer, found = planned(), planned(**changed)
        assert more <= taken(found) - taken(fewer) < 1.2 * more
    else:
        assert planned(**changed).weights == 2 * planned().weights


def test_decodes_beside_prompts_have_what_each_kernel_of_theirs_needs() -> None:
    """A step that is captured knows its decodes on the device alone, and has more splits: 30 of 17 sequences, where 17
    that all decode have 4."""
    q = torch.empty((64, 32, 128), dtype=torch.bfloat16, device="meta")
    index = torch.empty(17, dtype=torch.int32, device="meta")
    kept = (torch.empty((9, 16, 8, 128), dtype=torch.bfloat16, device="meta"),)
    tables = torch.empty((17, 2048), dtype=torch.int32, device="meta")
    for decodes, splits in ((None, 30), (17, 4)):
        parts = BatchSplit(index, index, index[:2], decodes)
        pages = PagedKV(kept, kept, tables, index, index, parts=parts)
        some = decodes is None
        needed = decode_cuda.scratch(q, 32, 128, 8, pages, 17)
        assert needed == 17 * splits * 32 * (128 + 1) * 4
        assert needed == decode_cuda.scratch_bytes(17, 32768, 32, 8, 128, q.dtype, rounded=False, some=some)


SEED = 5
RECORDED = 2048


def plans(
    *, max_length: int = 4096, pages: int = 2000, sequences: int = 256, tokens: int = 8192, caching: bool = True
) -> list[StepPlan]:
    """Of warming up an engine, which is then as a new one."""
    allocator = PageAllocator(pages, 16)
    config = SchedulerConfig(sequences, tokens, max_length, SEED)
    scheduler = Scheduler(config, allocator, PrefixTree(allocator) if caching else None)
    told: list[StepPlan] = []

    def seconds(plan: StepPlan) -> float:
        told.append(plan)
        return 0.0

    runner = SimulatedRunner(Unchecked(), seconds)
    loop = EngineLoop(scheduler, runner, run_ahead=True, ledger=None)  # type: ignore[arg-type]
    warm_up(loop, allocator, VOCABULARY, RECORDED)
    assert scheduler.config is config
    assert loop.idle
    assert runner.observer is None
    assert scheduler.statistics == Statistics()
    assert (allocator.free, allocator.idle) == (pages, 0)
    scheduler.check()
    return told


@pytest.mark.parametrize("caching", [False, True])
def test_steps_are_as_large_as_they_are_meant_to_be(caching: bool) -> None:
    steps = [(plan.tokens, len(plan.chunks)) for plan in plans(caching=caching)]
    assert (8192, 12) in steps
    assert (7 * 700 + 101, 8) in steps
    decoding = [sequences - 1 for tokens, sequences in steps if RECORDED < tokens < RECORDED + 200]
    assert set(decoding) == {0, 1, 2, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize(
    ("max_length", "pages", "sequences"), [(2, 2000, 8), (4, 1, 1), (8, 2000, 256), (4096, 2, 256), (300, 2000, 1)]
)
def test_it_fits_small_engines(max_length: int, pages: int, sequences: int) -> None:
    found = plans(max_length=max_length, pages=pages, sequences=sequences)
    room = min(max_length, 16 * pages)
    assert max(chunk.start + chunk.count for plan in found for chunk in plan.chunks) == room - 1
    assert max(len(plan.chunks) for plan in found) <= sequences


def test_small_steps_are_not_many() -> None:
    found = plans(tokens=64)
    assert max(plan.tokens for plan in found) == 64
    assert len(found) < 150


def test_nothing_runs_where_nothing_fits() -> None:
    assert plans(max_length=1) == []


def test_a_request_is_answered_as_without_it(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 40, 40)]
    found = []
    for warm in (False, True):
        llm = LLM(folder, device="cpu", dtype="float32", num_pages=20, max_num_seqs=3, max_model_len=60, seed=SEED)
        if warm:
            warm_up(llm.engine.loop, llm.engine.pages, llm.engine.config.vocab_size, RECORDED)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(output.request_id, output.outputs[0].token_ids, output.num_cached_tokens) for output in outputs])
    assert found[0] == found[1]
