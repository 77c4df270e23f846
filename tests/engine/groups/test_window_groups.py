"""Pools of windows and states of fixed size: the ids of an engine that keeps all tokens, in less memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.groups import PageGroup
from strata.cache.window_pages import WindowPages
from strata.engine import engine_config
from strata.engine.program.sizes import captured_sizes
from strata.engine.scheduling import states as states_module
from strata.models.batch import Batch
from strata.models.families import FAMILIES
from tests.engine.groups.recurrent_family import family
from tests.engine.program.test_captured_steps import Replayed, as_on_cuda, recorded_by
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS

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
    assert max(held) <= window.max_pages + 32 // PAGE
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
    as_on_cuda(monkeypatch, graphs)
    llm = LLM(folder, **OPTIONS)
    recorded_by(llm, captured_sizes(4, 48, 10**6, library=False))
    others = [tables for _, tables, _ in llm.engine.runner._windows._others]  # type: ignore[union-attr]
    assert ids(llm) == wanted
    assert {key[1] for key in graphs.replayed} == {"run", "draw"}
    assert all(torch.equal(tables.on_device, torch.from_numpy(tables.rows)) for tables in others)


ARCHITECTURE, STATES_PAGE = "MistralForCausalLM", 8
CONFIG = {
    "architectures": [ARCHITECTURE],
    "model_type": "mistral",
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": None,
}
# Layers, and the window of those that attend.
MODELS = {"hybrid": ("rar", None), "windows": ("rar", 20), "states": ("rr", None)}


@pytest.fixture(scope="module", autouse=True)
def frequent_snapshots() -> Iterator[None]:
    """Sequences here are short."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(states_module, "SNAPSHOT_TOKENS", 32)
        yield


@pytest.fixture(scope="module", params=list(MODELS))
def states_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    kinds, window = MODELS[request.param]
    made = tmp_path_factory.mktemp(request.param)
    (made / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": len(kinds), "sliding_window": window}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, ARCHITECTURE, family(kinds))
        yield made


def stateful(states_folder: Path, **options: object) -> LLM:
    """With weights by which each token counts, and with rows in which others have left NaN."""
    sizes = {
        "max_num_batched_tokens": 29,
        "max_num_seqs": 5,
        "page_size": STATES_PAGE,
        "seed": 3,
        "load_format": "dummy",
    }
    llm = LLM(states_folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **(sizes | options))
    with torch.no_grad():
        for parameter in llm.engine.model.parameters():
            parameter.mul_(15 if parameter.dim() > 1 else 1)
    for state in llm.engine.loop._runner._states._all:
        state.fill_(torch.nan)
    return llm


def prompts() -> list[list[int]]:
    """That begin alike, and part within pages and between them; one is longer than a step."""
    source = random.Random(7)
    common = source.choices(range(97), k=40)
    return [common[:shared] + source.choices(range(97), k=own) for shared, own in ((40, 1), (0, 17), (40, 31), (35, 5))]


def check(llm: LLM, asked: list[list[int]], n: int = 1, outputs: int = 64) -> None:
    """Greedy ids are those of a model that is given all tokens at once."""
    params = SamplingParams(temperature=0.0, n=n, max_tokens=outputs, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)
    for prompt, output in zip(asked, answers, strict=True):
        assert len(output.outputs) == n
        for sample in output.outputs:
            assert sample.token_ids == greedy(llm, prompt, tuple(sample.token_ids))
    llm.engine.loop.scheduler.check()


def greedy(llm: LLM, prompt: list[int], drawn: tuple[int, ...]) -> list[int]:
    """What is likeliest behind the prompt, and behind each id that was drawn. It equals what was drawn only if that
    is what step by step comes of the prompt."""
    tokens = torch.tensor([*prompt, *drawn[:-1]], dtype=torch.int32)
    positions = torch.arange(len(tokens), dtype=torch.int32)
    batch = Batch(tokens, positions, torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens))
    with torch.inference_mode():
        model = llm.engine.model
        return model.head(model(batch)[len(prompt) - 1 :]).argmax(-1).tolist()


def test_chunks_prefixes_and_forks(states_folder: Path) -> None:
    llm = stateful(states_folder)
    statistics = llm.engine.loop.scheduler.statistics
    check(llm, prompts(), n=2)
    first = statistics.prefix_hits
    assert first > 0, "prompts that run at once find what they have in common"
    check(llm, prompts(), n=3, outputs=4)
    assert statistics.prefix_hits - first >= 40 + 16 + 64 + 32, "each finds all its full pages but for a token"


def test_a_conversation_goes_on_behind_what_was_generated(states_folder: Path) -> None:
    llm = stateful(states_folder, deterministic=True)
    (prompt, *_) = prompts()
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    check(llm, [[*prompt, *output.outputs[0].token_ids, 5, 6, 7]], outputs=8)
    assert llm.engine.loop.scheduler.statistics.prefix_hits >= len(prompt) + 32


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_restores_states(states_folder: Path, caching: bool) -> None:
    llm = stateful(states_folder, num_pages=18, enable_prefix_caching=caching)
    check(llm, prompts(), n=2, outputs=32)
    statistics = llm.engine.loop.scheduler.statistics
    assert statistics.preemptions > 0
    assert (statistics.prefix_hits > 0) == caching


def test_ranks_that_divide_layers_or_prompts_are_refused_before_weights_are_read(states_folder: Path) -> None:
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        asked = {name: 2, **({"tensor_parallel_size": 2} if name.startswith("prefill") else {})}
        with pytest.raises(ValueError, match=f"{name}=2 is not there for {ARCHITECTURE}"):
            stateful(states_folder, **asked)


@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid", "granite-hybrid-experts", "qwen3-next"])
def test_families_with_states(name: str, tmp_path: Path) -> None:
    states_folder = make_checkpoint(tmp_path / name, RECURRENT_CONFIGS[name])
    llm = stateful(states_folder, load_format="auto", max_model_len=256, num_pages=24)
    check(llm, prompts(), n=2)
    check(llm, prompts(), outputs=4)
    statistics = llm.engine.loop.scheduler.statistics
    assert statistics.preemptions > 0
    assert statistics.prefix_hits > 0


def test_recorded_steps_read_the_rows_of_states(states_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph, here replayed without a GPU, reads the rows of its sequences from device memory, as it does all
    that changes; padding leaves the states of sequences alone."""
    graphs = Replayed()
    as_on_cuda(monkeypatch, graphs)
    llm = stateful(states_folder)
    recorded_by(llm, captured_sizes(5, 29, 10**6, library=False))
    check(llm, prompts(), n=2, outputs=16)
    assert {key[1] for key in graphs.replayed} == {"run", "draw"}
