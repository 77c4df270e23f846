"""Ranks with different experts, exchanged rows, messages in 8 bits or deterministic: they answer as one rank does."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.build import build_engine
from strata.engine.engine_config import EngineConfig
from strata.engine.ranks.expert_balance import ExpertBalance, RankExperts
from strata.kernels.choose import MEASURED, thresholds_of
from strata.models.experts import Experts
from strata.models.save import save
from strata.models.weights import load
from strata.parallel.expert_balance.placement import rank_loads
from tests.engine.ranks.layouts import CONFIG, LAYOUTS, prompt
from tests.parallel.models import random_model
from tests.parallel.shards import divisible_config, shard_of

# Few pages and short steps: prompts are computed in chunks, and sequences are preempted.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 36,
    "page_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "verbose": False,
}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
PROMPTS = [[(step * place + 3) % 61 for place in range(length)] for length, step in ((50, 7), (3, 5), (29, 11))]


def ids(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A mixture of eight experts: each token goes to the second or the third, and to the fourth or the fifth."""
    config = divisible_config("qwen3-moe", num_experts=8, mlp_only_layers=[], max_position_embeddings=128)
    model = random_model(config, torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight[1:5:2] *= 10
            weight[2:6:2] = -weight[1:5:2]
    save(model, config, tmp_path)
    return tmp_path


def test_ranks_with_different_experts_answer_as_one_also_while_they_move(folder: Path) -> None:
    wanted = ids(LLM(folder, **OPTIONS))
    ranked: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    llm = LLM(folder, **ranked, **OPTIONS)
    assert ids(llm) == wanted
    ranks = llm.engine.ranks
    assert ranks is not None
    assert ranks.experts is None
    del llm, ranks
    gc.collect()

    # Each with tokens of its own, of which rank 0 counts all that are no padding.
    moving: dict[str, Any] = {"enable_dp_attention": True, "enable_eplb": True, "eplb_step_interval": 15}
    llm = LLM(folder, **ranked, **moving, **OPTIONS)
    assert ids(llm) == wanted
    ranks = llm.engine.ranks
    assert ranks is not None
    assert ranks.experts is not None
    assert not any(np.array_equal(ranks.experts.slots(layer), np.arange(8)) for layer in ranks.experts.layers)
    # So that an update finds the slots of an expert (`test_weight_updates`).
    whole, _ = load(folder)
    for path, module in llm.engine.model.named_modules():
        for own, parameter in module.named_parameters() if isinstance(module, Experts) else ():
            assert torch.equal(parameter, whole.get_parameter(f"{path}.{own}")[list(module.local)]), path
    assert ranks.experts.tables.totals.sum() % 3 == 0
    computed = sum(len(prompt) + 31 for prompt in PROMPTS) - llm.engine.loop.scheduler.statistics.prefix_hits
    counted = ranks.experts.tables.totals[0].sum().item() // 3
    assert counted >= computed, "what a preempted sequence computes again comes on top"
    assert counted < 1.5 * computed, "padding is not counted"
    del llm, ranks
    gc.collect()

    ranked = ranked | {"tensor_parallel_size": 4, "enable_eplb": True, "num_redundant_experts": 4}
    # Rank 0 alone counts choices, and all divide the rows of a step alike.
    llm = LLM(folder, **ranked, eplb_step_interval=30, overlap_tokens=8, **OPTIONS)
    assert ids(llm) == wanted
    assert ids(llm) == wanted
    statistics = llm.engine.loop.scheduler.statistics
    assert statistics.preemptions > 0
    assert statistics.prefix_hits > 0
    ranks = llm.engine.ranks
    assert ranks is not None
    assert ranks.experts is not None
    ranks.check_ids()
    first = np.arange(12) % 8
    assert not any(np.array_equal(ranks.experts.slots(layer), first) for layer in ranks.experts.layers)
    assert ranks.experts.tables.totals.sum() % 3 == 0  # each token goes to three


def test_ranks_that_divide_prompts_and_experts_that_move_answer_as_one(
    folder: Path, ran: list[tuple[str, int, bool]]
) -> None:
    options = OPTIONS | {"max_num_batched_tokens": 48}
    wanted = ids(LLM(folder, **options))
    ranked: dict[str, Any] = {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}
    moving: dict[str, Any] = {"enable_eplb": True, "num_redundant_experts": 2, "eplb_step_interval": 15}
    llm = LLM(folder, enable_expert_parallel=True, **ranked, **moving, **options)
    assert ids(llm) == wanted
    ranks = llm.engine.ranks
    assert ranks is not None
    assert ranks.experts is not None
    assert not any(np.array_equal(ranks.experts.slots(layer), np.arange(10) % 8) for layer in ranks.experts.layers)
    assert any(divided for _, _, divided in ran)
    assert llm.engine.loop.scheduler.statistics.preemptions > 0
    ranks.check_ids()


def test_counts_since_the_last_reading_decide(folder: Path) -> None:
    """One rank, which has all experts: what is decided and when, without ranks that follow."""
    config = divisible_config("mixtral", num_local_experts=4)
    part, own = shard_of(random_model(config, torch.float32), config, 2, 0, expert_parallel=True, redundant=2)
    experts = RankExperts(own, part, part.axes["tp"], torch.device("cpu"))
    assert experts.layers == (0, 1)
    assert experts.slots(0).tolist() == [0, 1, 2, 3, 0, 1]
    lines: list[str] = []
    balance = ExpertBalance(experts, interval=3, log=lines.append)
    totals = experts.tables.totals
    totals += 1000  # of the start
    assert balance.next_move() is None
    totals[1] += torch.tensor([0, 0, 90, 0])
    assert [balance.next_move() for _ in range(2)] == [None, None]
    # Layer 0 had nothing to do; in layer 1 one rank had all of it.
    move = balance.next_move()
    assert move is not None
    layer, placed = move
    assert layer == 1
    assert rank_loads(placed, [0.0, 0, 90, 0], 2).tolist() == [45, 45]
    assert balance.next_move() is None
    assert lines == [
        "experts: the heaviest rank of a layer bore 2.00 times the mean, and 1.00 times by the placement from now on; "
        "1 of 1 layers changed"
    ]


def test_room_that_ranks_cannot_share(folder: Path) -> None:
    ranked: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    with pytest.raises(ValueError, match="num_redundant_experts=1 with 8 experts on 2 ranks"):
        LLM(folder, **ranked, num_redundant_experts=1, **OPTIONS)


def test_one_rank_takes_the_option_of_experts_as_vllm_does_and_says_that_it_does_nothing(tmp_path: Path) -> None:
    config = divisible_config("qwen3-moe")
    save(random_model(config, torch.float32), config, tmp_path)
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True}
    told: list[list[str]] = [[], []]
    graphs = []
    for enabled, lines in enumerate(told):
        asked = EngineConfig.from_options(tmp_path, options | {"enable_expert_parallel": bool(enabled)})
        graphs.append(build_engine(asked, lines.append).program.logits.code)
    assert graphs[0] == graphs[1]
    said = "enable_expert_parallel=True has no effect with tensor_parallel_size=1: one rank has all experts"
    assert [said in lines for lines in told] == [False, True]


# So wide that half a row less there and back is worth it from 1,025 tokens of a rank on, and else as small as can be.
WIDE: dict[str, Any] = CONFIG | {
    "hidden_size": 16384,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 4,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "norm_topk_prob": False,
    "vocab_size": 97,
    "max_position_embeddings": 2048,
}
SIZES: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "num_pages": 160,
    "max_num_batched_tokens": 1200,
    "max_num_seqs": 4,
    "enable_prefix_caching": False,
    "seed": 0,
    "verbose": False,
}
RANKED: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True}
# Two fill a step of one rank each, one is shorter, and one takes a step that is too short.
WIDE_PROMPTS = [
    [(step * place + 3) % 97 for place in range(length)] for step, length in ((5, 1190), (7, 1100), (11, 300))
]


def logprobs(llm: LLM, prompts: list[list[int]]) -> list[list[dict[int, float]]]:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [{id: one.logprob for id, one in each.items()} for each in out.outputs[0].logprobs or ()] for out in outputs
    ]


def test_ranks_that_exchange_rows_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    wanted = logprobs(LLM(tmp_path, **SIZES), WIDE_PROMPTS)
    llm = LLM(tmp_path, **RANKED, **SIZES)
    variant = llm.engine.program.variant("exchanged_logits")
    assert variant is not None
    assert 1024 < variant.least < 1050
    ran: list[int] = []
    forward = variant.graph.forward

    def noted(batch: Any, rows: torch.Tensor) -> Any:
        ran.append(len(batch.tokens))
        return forward(batch, rows)

    monkeypatch.setattr(variant.graph, "forward", noted)
    # Together, then one alone, beside which the other rank has padding.
    for prompts, expected in ((WIDE_PROMPTS, wanted), (WIDE_PROMPTS[:1], wanted[:1])):
        ran.clear()
        found = logprobs(llm, prompts)
        assert ran
        assert min(ran) >= variant.least
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
    assert llm.engine.ranks is not None
    llm.engine.ranks.check_ids()


BUILTIN_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "enable_prefix_caching": False,
    "verbose": False,
}


def sums(number: int) -> str:
    """Additions, the last one without its result."""
    given = [((number * 7 + row * 13) % 90 + 3, (number * 11 + row * 5) % 90 + 2) for row in range(13)]
    return "\n".join(f"{one} + {other} = {one + other}" for one, other in given)[:-2]


def test_answers_by_messages_in_8_bits_stay_nearly_the_same(ran: list[tuple[str, int, bool]]) -> None:
    prompts, params = [sums(number) for number in range(10)], SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    one = LLM("builtin", **BUILTIN_OPTIONS)
    two = LLM("builtin", tensor_parallel_size=2, message_dtype="fp8", **BUILTIN_OPTIONS)
    wanted, found = (
        [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)] for llm in (one, two)
    )
    # Of the one rank's large steps none; of the two ranks' all, and no others.
    found_in = {
        (tokens >= thresholds_of(MEASURED).quantized_message_tokens, name == "quantized_message_logits")
        for name, tokens, _ in ran
    }
    assert {(True, False), (True, True)} <= found_in
    assert (False, True) not in found_in
    assert two.engine.ranks is not None
    two.engine.ranks.check_ids()
    assert sum(one.token_ids == other.token_ids for one, other in zip(wanted, found, strict=True)) >= 8


def bits(llm: LLM, prompts: list[list[int]], place: int, tokens: int, logprobs: int) -> list[dict[int, float]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    found = llm.generate(prompts, params, use_tqdm=False)[place].outputs[0].logprobs or []
    return [{id: entry.logprob for id, entry in each.items()} for each in found]


def test_ranks_that_divide_prompts_have_the_bits_of_one(tmp_path: Path, ran: list[tuple[str, int, bool]]) -> None:
    layout = LAYOUTS["prefill context"]
    options = layout.options(tmp_path) | {"deterministic": True}
    one, two = LLM(**options), layout.over_ranks(options)
    alone = bits(one, [prompt(130)], 0, 2, 5)
    ran.clear()
    assert bits(two, [prompt(130)], 0, 2, 5) == alone
    assert ran[0][2], "the first step was to be divided"


def test_bits_depend_on_no_rank_and_on_nothing_else_that_runs(tmp_path: Path) -> None:
    layout = LAYOUTS["attention dp"]
    llm = layout.over_ranks(layout.options(tmp_path) | {"deterministic": True, "enable_prefix_caching": False})
    asked, *others = [[(step * place + 3) % 300 for place in range(60 + 9 * step)] for step in range(5, 11)]
    alone = bits(llm, [asked], 0, 12, 2)
    assert len(alone) == 12
    for place in (0, 1, 4):
        assert bits(llm, [*others[:place], asked, *others[place:]], place, 12, 2) == alone
