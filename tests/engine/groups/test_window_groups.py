"""Models with windows keep them in pools of their own: the same ids as with all tokens kept, in the windows' memory."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.groups import PageGroup
from strata.cache.staging import Staging
from strata.cache.window_pages import WindowPages
from strata.engine import engine_config
from strata.engine.program.sizes import recorded_sizes
from strata.engine.runner import Runner
from tests.engine.program.test_recorded_steps import Replayed
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint

LENGTH, PAGE = 448, 16
CONFIGS = dict(FAMILY_CONFIGS)
CHANGED = {"mistral-window": {"sliding_window": 21}, "qwen3-biases-window": {"sliding_window": 30}}


@pytest.fixture(scope="module", params=list(CHANGED))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers with one window; and a layer with a window behind one without."""
    config = CONFIGS[request.param] | CHANGED[request.param] | {"max_position_embeddings": LENGTH}
    return make_checkpoint(tmp_path_factory.mktemp("windows") / request.param, config)


def engine(folder: Path, **options: object) -> LLM:
    sizes = {"num_pages": 120, "max_num_batched_tokens": 64, "max_num_seqs": 6, "page_size": PAGE, "seed": 3}
    return LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **(sizes | options))


def windows(llm: LLM) -> tuple[WindowPages, ...]:
    return llm.engine.loop.scheduler._windows.groups


def poison_what_is_given_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that nobody holds are NaN, as if another sequence had left that there."""
    for window, (pool, _) in zip(windows(llm), llm.engine.loop._runner._windows._windows, strict=True):
        pool.all_keys.fill_(torch.nan)
        pool.all_values.fill_(torch.nan)

        def let_go(page: int, window: WindowPages = window, pool=pool, add_free=window.books._add_free) -> None:
            add_free(page)
            pool.all_keys[:, page] = pool.all_values[:, page] = torch.nan

        monkeypatch.setattr(window.books, "_add_free", let_go)


def generated(llm: LLM) -> list[list[int]]:
    """Long prompts that begin alike, samples that fork, and a second round that finds what the first has left."""
    source = random.Random(5)
    shared = [source.randrange(80) for _ in range(200)]
    prompts = [shared[: source.choice([0, 150, 200])] + source.choices(range(80), k=11 + 7 * i) for i in range(4)]
    params = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)
    found = []
    for _ in range(2):
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        found += [sample.token_ids for output in outputs for sample in output.outputs]
        llm.engine.loop.scheduler.check()
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """With all layers' rows in one pool, where nothing is given back before a sequence ends."""
    with pytest.MonkeyPatch.context() as patched:

        def alike(asked: object, config: object, pool, max_length: int) -> tuple[PageGroup, ...]:
            return (PageGroup(tuple(range(pool.layers)), None, pool),)

        patched.setattr(engine_config, "groups_of", alike)
        llm = engine(folder)
    assert llm.engine.loop.scheduler._windows is None
    return generated(llm)


@pytest.mark.parametrize("options", [{"num_pages": 26, "max_num_batched_tokens": 40}, {"deterministic": True}])
def test_ids_are_those_of_an_engine_that_keeps_all_tokens(
    folder: Path, expected: list[list[int]], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(folder, **options)
    poison_what_is_given_back(llm, monkeypatch)
    assert generated(llm) == expected
    statistics = llm.engine.loop.scheduler.statistics
    assert statistics.prefix_hits > 0
    assert (statistics.preemptions > 0) == ("num_pages" in options)


def test_the_memory_of_a_window_does_not_grow_past_it(folder: Path) -> None:
    llm = engine(folder, enable_prefix_caching=False, max_num_batched_tokens=32)
    (window,) = windows(llm)
    held = []
    for _ in llm.stream({"prompt_token_ids": [7] * 270}, SamplingParams(max_tokens=60, ignore_eos=True)):
        held.append(window.books.num_pages - window.books.free)
    # The window, whole blocks of 128 keys, and what a step writes; all 330 tokens would take 21.
    assert max(held) <= window.most + 32 // PAGE
    assert max(held) <= 13
    assert window.books.free == window.books.num_pages


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
