"""An engine whose ranks keep different tokens of the same KV heads answers as one of one rank does."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.ledger import DeviceMemory
from strata.engine.outputs import RequestOutput
from strata.engine.ranks.rank import share_of
from strata.engine.startup.divided_keys import check_gathered_heads
from strata.engine.startup.kept_states import check_states
from strata.engine.startup.memory import planned_memory
from strata.models.save import save
from tests.engine.program.programs import graph_of
from tests.parallel.models import random_model
from tests.parallel.shards import divisible_config

# Few pages and short steps: prompts are computed in chunks, and sequences are preempted.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "page_size": 4,
    "skip_tokenizer_init": True,
    "verbose": False,
}
# Tokens that all pages hold.
KEPT = 576
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
SHORT = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(seed=5, max_tokens=16, temperature=0.8, top_k=20, n=3, detokenize=False)


@pytest.fixture(autouse=True)
def _ranks_have_left() -> Iterator[None]:
    """A process is in one group of ranks at a time."""
    yield
    gc.collect()


def prompt(length: int, step: int = 7) -> list[int]:
    return [(step * place + 3) % 61 for place in range(length)]


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def assert_alike(one: LLM, several: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    assert ids(generated(several, prompts, params)) == ids(generated(one, prompts, params))


def noted_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many steps rank 0 runs by each graph."""
    assert llm.engine.ranks is not None
    ran: Counter[str] = Counter()
    for name in ("logits", "gathered_logits"):
        graph = graph_of(llm.engine.program, name)

        def noted(*given: Any, name: str = name, forward: Any = graph.forward) -> Any:
            ran[name] += 1
            return forward(*given)

        monkeypatch.setattr(graph, "forward", noted)
    return ran


def started(folder: Path, name: str, kv_heads: int | None, ranks: int, key_ranks: int) -> tuple[LLM, LLM]:
    """An engine of one rank and one of several, with pages for as many tokens. kv_heads: None: all heads read the same
    latents."""
    config = divisible_config(name, num_key_value_heads=kv_heads, max_position_embeddings=256)
    save(random_model(config, torch.float32), config, folder)
    one = LLM(folder, num_pages=KEPT // 4, **OPTIONS)
    divided = {"tensor_parallel_size": ranks, "decode_context_parallel_size": key_ranks}
    several = LLM(folder, num_pages=KEPT // 4 // key_ranks, **divided, **OPTIONS)
    assert [llm.engine.ledger.tokens for llm in (one, several)] == [KEPT, KEPT]
    # Of as many tokens a rank has its one KV head, and a part of that.
    assert several.engine.ledger.kv * (kv_heads or 1) * key_ranks == one.engine.ledger.kv
    assert several.engine.ranks is not None
    pool = several.engine.ranks._runner.pool
    assert pool.all_keys.nbytes + (pool.all_values.nbytes if kv_heads else 0) == several.engine.ledger.kv
    return one, several


@pytest.mark.parametrize(("name", "kv_heads"), [("llama", 1), ("deepseek-v2", None)])
def test_two_ranks_that_divide_keys_answer_as_one(
    name: str, kv_heads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, several = started(tmp_path, name, kv_heads, 2, 2)
    statistics = several.engine.loop.scheduler.statistics
    ran = noted_steps(several, monkeypatch)

    # In chunks, and found again.
    assert_alike(one, several, [prompt(130), prompt(1), prompt(70, 11)], GREEDY)
    # Chunks gather keys, decodes their queries.
    assert ran["gathered_logits"] >= 2
    assert ran["logits"] >= 60
    before = statistics.prefix_hits
    assert_alike(one, several, [prompt(130) + prompt(20, 13)], SHORT)
    assert statistics.prefix_hits >= before + 128

    # With decodes beside prompts, and preempted.
    assert_alike(one, several, [prompt(80 + count, 13 + count) for count in range(8)], GREEDY)
    assert statistics.preemptions > 0

    # Samples of one prompt share its pages, the last of which is copied when it is written.
    assert_alike(one, several, [prompt(61, 5), prompt(40)], SAMPLED)

    scored = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, detokenize=False)
    (expected,), (found,) = (generated(llm, [prompt(70, 29)], scored) for llm in (one, several))
    pairs = zip(
        [*(expected.prompt_logprobs or ()), *(expected.outputs[0].logprobs or ())],
        [*(found.prompt_logprobs or ()), *(found.outputs[0].logprobs or ())],
        strict=True,
    )
    for wanted, given in pairs:
        for id, entry in (wanted or {}).items():
            assert given is not None
            assert given[id].logprob == pytest.approx(entry.logprob, abs=1e-5)
    vectors = [
        torch.tensor(llm.embed([{"prompt_token_ids": prompt(40)}], use_tqdm=False)[0].outputs.embedding)
        for llm in (one, several)
    ]
    torch.testing.assert_close(vectors[1], vectors[0], atol=1e-5, rtol=0)
    assert several.engine.ranks is not None
    several.engine.ranks.check_ids()


@pytest.mark.parametrize(
    ("name", "kv_heads", "key_ranks"),
    [("qwen3-biases-tied", 2, 2), pytest.param("llama-biases-tied", 1, 4, marks=pytest.mark.long)],
)
def test_four_ranks_that_divide_keys_answer_as_one(name: str, kv_heads: int, key_ranks: int, tmp_path: Path) -> None:
    """In chunks, found again, and samples that share pages."""
    one, several = started(tmp_path, name, kv_heads, 4, key_ranks)
    assert_alike(one, several, [prompt(130), prompt(1), prompt(70, 11)], SHORT)
    assert_alike(one, several, [prompt(130) + prompt(20, 13), prompt(61, 5)], SAMPLED)
    assert several.engine.loop.scheduler.statistics.prefix_hits >= 128
    assert several.engine.ranks is not None
    several.engine.ranks.check_ids()


def test_memory_holds_more_tokens(tmp_path: Path) -> None:
    """What a rank has for pages is what it has without: pages stand for more tokens."""
    config = divisible_config("llama", num_key_value_heads=1)
    save(random_model(config, torch.float32), config, tmp_path)
    ledgers = []
    for key_ranks in (1, 2, 4):
        asked = EngineConfig(
            str(tmp_path), device="cpu", tensor_parallel_size=4, decode_context_parallel_size=key_ranks, page_size=4
        )
        shard = share_of(asked, config, 1)
        sizes = EngineSizes.of(asked, shard.config, torch.device("cpu"), None, shard)
        memory = DeviceMemory("cpu", 1 << 34, 1 << 34)
        ledgers.append(planned_memory(asked, shard.config, sizes, torch.device("cpu"), memory))
    assert len({ledger.page_bytes for ledger in ledgers}) == 1
    assert [ledger.page_size for ledger in ledgers] == [4, 8, 16]


def test_it_divides_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"size=3 divides keys among .*size=4.* needs 3 ranks for each KV head"):
        EngineConfig("8B", tensor_parallel_size=4, decode_context_parallel_size=3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mistral", "layers with windows"), ("gpt-oss", "layers with windows")],
)
def test_models_that_cannot_are_refused(name: str, kind: str) -> None:
    asked = EngineConfig("8B", tensor_parallel_size=4, decode_context_parallel_size=2)
    with pytest.raises(ValueError, match=f"decode_context_parallel_size=2 is not there for .*, which has {kind}"):
        check_states(asked, divisible_config(name))


def test_more_heads_than_kernels_take_are_refused_on_gpus() -> None:
    """48 of 8 ranks: the reference would wait for the device in every layer, which no recorded step can."""
    config = divisible_config("llama", num_attention_heads=48, num_key_value_heads=1, hidden_size=96)
    for key_ranks in (1, 2, 4, 8):
        asked = EngineConfig("8B", tensor_parallel_size=8, decode_context_parallel_size=key_ranks)
        own = share_of(asked, config, 0).config
        check_gathered_heads(asked, own, "cpu")
        if key_ranks < 8:
            check_gathered_heads(asked, own, "cuda")
    with pytest.raises(
        ValueError, match=r"size=8 gathers 48 query heads for a KV head, .* at most 32; accepted are 1, 2, 4"
    ):
        check_gathered_heads(asked, own, "cuda")
