"""Options that no engine has, and that do not go together, are refused by name before anything is loaded; how many
sequences an engine runs; what a start imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from strata.cli.ending import explanation
from strata.cli.main import options_of
from strata.engine.engine_config import EngineConfig
from strata.engine.faults import EngineFault, memory_explained
from strata.engine.ledger import DeviceMemory, Ledger
from strata.engine.startup.memory import RankPlace, listed_memory, rank_memory, rank_setup
from strata.engine.startup.option_names import as_flags
from strata.engine.startup.sequences import with_sequences
from strata.hardware.specs import device
from strata.kernels.device_limits import DeviceLimits
from strata.models import weights
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.plan.meta_model import find_config
from strata.plan.simulate.engine import predicted_engine

WHOLE = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "page_size")


@pytest.mark.parametrize("name", [*WHOLE, "decode_context_parallel_size", "eplb_step_interval"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None, [2]])
def test_numbers_are_whole_and_over_zero(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got "):
        EngineConfig("8B", **{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, [2]])
def test_how_many_run_at_once_is_whole_and_over_zero_or_left_to_the_engine(value: Any) -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be an integer of at least 1, got "):
        EngineConfig("8B", max_num_seqs=value)
    assert EngineConfig("8B", max_num_seqs=None).max_sequences == 256


@pytest.mark.parametrize("name", ["overlap_tokens", "num_redundant_experts"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_numbers_are_whole_and_not_negative(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 0"):
        EngineConfig("8B", **{name: value})


def test_one_rank_has_no_messages_that_could_travel_beside_products() -> None:
    for options in ({}, {"pipeline_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        with pytest.raises(ValueError, match=r"overlap_tokens=64 .* tensor_parallel_size=1 adds up nothing; leave it"):
            EngineConfig("8B", overlap_tokens=64, **options)
        assert EngineConfig("8B", overlap_tokens=0, **options).overlapped_from == 0
    assert EngineConfig("8B", overlap_tokens=64, tensor_parallel_size=2).overlapped_from == 64


@pytest.mark.parametrize("name", ["enable_expert_parallel", "enable_dp_attention", "enable_eplb", "deterministic"])
@pytest.mark.parametrize("value", ["false", 1, None])
def test_what_is_on_or_off_is_a_bool(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {value!r}"):
        EngineConfig("8B", **{name: value})


OPTIONS = ["max_num_seqs", "max_model_len", "dtype", "quantization", "deterministic", "enable_prefix_caching", "passes"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lower max_num_seqs, num_pages or max_model_len", "lower --max-num-seqs, num_pages or --max-model-len"),
        (
            "max_model_len=100,000 is over it: max_model_len=9.",
            "--max-model-len 100,000 is over it: --max-model-len 9.",
        ),
        ("quantization='fp8' with deterministic=True: leave", "--quantization fp8 with --deterministic: leave"),
        ("enable_prefix_caching=False; leave out passes=", "--no-enable-prefix-caching; leave out --passes"),
        ("the dtype of what passes is deterministic", "the dtype of what passes is deterministic"),
        ("give --max-num-seqs 4, or a/max_num_seqs/b", "give --max-num-seqs 4, or a/max_num_seqs/b"),
        ("max_num_seqs_of and my_max_num_seqs", "max_num_seqs_of and my_max_num_seqs"),
        ("max_num_seqs=-5 and max_model_len=None", "--max-num-seqs -5 and --max-model-len None"),
        ('quantization="it\'s" with max_num_seqs=1e-05', "--quantization it's with --max-num-seqs 1e-05"),
        ("passes=['a', 'b'] of the engine's max_num_seqs", "passes=['a', 'b'] of the engine's --max-num-seqs"),
        ("rope='(max_num_seqs)' is not max_num_seqs", "rope='(max_num_seqs)' is not --max-num-seqs"),
    ],
)
def test_options_that_a_command_has_are_named_as_it_takes_them(text: str, said: str) -> None:
    assert as_flags(text, OPTIONS) == said
    assert as_flags(text, []) == text


@pytest.mark.parametrize(
    "echoed",
    [
        "model folder 'max_num_seqs' does not exist",
        "got 'max_num_seqs=3' for one",
        'no folder "max_model_len: it\'s"',
        "runs/lr=1,dtype=bf16/x has no config.json",
        "max_num_seqs.json is no folder",
    ],
)
def test_what_a_user_gave_is_told_as_it_was_given(echoed: str) -> None:
    assert as_flags(f"{echoed}; lower max_num_seqs", OPTIONS) == f"{echoed}; lower --max-num-seqs"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve"], "--gpu-memory-utilization, --max-num-seqs, --max-num-batched-tokens or --max-model-len"),
        (["generate", "hi"], "gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or --max-model-len"),
        (["bench", "kernels"], "gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or max_model_len"),
    ],
)
def test_a_lack_of_memory_is_told_with_the_options_of_the_command(command: list[str], said: str) -> None:
    ledger = Ledger("a device", *[1 << 30] * 3, *[0] * 9)
    with pytest.raises(EngineFault) as raised, memory_explained("counting", ledger):
        torch.empty(1 << 60, dtype=torch.uint8)
    told = explanation(raised.value, lambda: options_of(command))
    assert told is not None
    assert told.startswith(f"out of memory on a device while counting: lower {said}, or end")


def test_what_config_refuses_is_told_as_it_was_given() -> None:
    with pytest.raises(ValueError, match="quantization='fp8' and sparsity='2:4' pack") as raised:
        EngineConfig("8B", quantization="fp8", sparsity="2:4")
    told = explanation(raised.value, lambda: options_of(["serve", "8B"]))
    assert told is not None
    assert told.startswith("--quantization fp8 and --sparsity 2:4 pack the same weights")


CODE = """
import sys
from strata import LLM, SamplingParams
llm = LLM(device="cpu", num_pages=20, max_num_seqs=2, max_model_len=64, verbose=False)
llm.generate("1 + 1", SamplingParams(max_tokens=2), use_tqdm=False)
print(sorted({"sympy", "torch._dynamo", "torch._inductor", "transformers"} & sys.modules.keys()))
"""


def test_a_start_imports_no_compiler_and_no_symbolic_algebra() -> None:
    """Half a second and more, which weights on the meta device once cost."""
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def place_on(name: str, memory: DeviceMemory | None = None) -> RankPlace:
    memory = memory or listed_memory(device(name))
    return RankPlace(torch.device("cuda"), DeviceLimits.listed(device(name)), memory=memory)


def sequences(model: str, name: str, place: RankPlace | None = None, **options: Any) -> int | None:
    asked = EngineConfig(model, load_format="dummy", **options)
    return with_sequences(asked, weights.resolve(model, "dummy")[0], place or place_on(name)).max_num_seqs


# By hand, of 0.9 of 141e9 bytes of an H200. 8B has 16.1e9 in its weights and 131,072 a token, so 448 tokens of 1,024
# sequences take 60e9, of 2,048 120e9. Products of a token take 2 * 8.0e9 / (0.71 * 989e12) = 22.9 us, its keys 448 *
# 131,072 / (0.75 * 4.8e12) = 16.3 us, and a step besides 32 * 35 us = 1.12 ms: with twice 512 it is 2.7 % faster.
# 0.6B has 1.2e9 and 114,688 a token: 2,048 take 105e9. 70B on four H100 (288e9) has 141e9 and 327,680 a token: 512 take
# 75e9, 1,024 150e9. An L4 has 24e9, of which 8B leaves 5e9 of the 7.5e9 that 128 sequences take.
@pytest.mark.parametrize(
    ("model", "name", "ranks", "count"),
    [
        ("8B", "h200", 1, 1024),
        ("0.6B", "h200", 1, 2048),
        ("70B", "h100", 4, 512),
        ("8B", "l4", 1, 256),
    ],
)
def test_as_many_as_find_room_and_make_the_engine_faster(model: str, name: str, ranks: int, count: int) -> None:
    assert sequences(model, name, tensor_parallel_size=ranks) == count


def test_a_gpu_that_others_use_has_fewer() -> None:
    """Of the 127e9 bytes of an H200 that may be used, 60e9 are."""
    total = int(device("h200").ceiling("memory").value)
    busy = place_on("h200", DeviceMemory("an H200", total - 60 * 10**9, total))
    assert sequences("8B", "h200", busy) == 512


def test_no_more_than_a_step_can_make_faster() -> None:
    """Products of 8B on an H100 take as long as on an H200, its keys longer; and half of the memory is left unused."""
    ample = DeviceMemory("a GPU", 1 << 40, 1 << 40)
    assert sequences("8B", "h200", place_on("h200", ample)) == 1024
    assert sequences("0.6B", "h200", place_on("h200", ample)) == 2048


@pytest.mark.parametrize(
    ("model", "name", "options"),
    [
        ("80B-A3B", "h100", {"tensor_parallel_size": 4}),  # the states of 1,024 sequences do not fit
        ("granite-4.0-h-tiny", "h200", {}),
        ("0.6B", "h200", {"max_model_len": 40960, "gpu_memory_utilization": 0.2}),
        ("8B", "h200", {"num_pages": 20_000}),
        ("0.6B", "h100", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ],
)
def test_where_they_take_much_memory_they_still_leave_pages_for_each(
    model: str, name: str, options: dict[str, Any]
) -> None:
    config, place = weights.resolve(model, "dummy")[0], place_on(name)
    given = with_sequences(EngineConfig(model, load_format="dummy", **options), config, place)
    assert given.max_num_seqs is not None
    ledger = rank_memory(given, config, place, rank_setup(given, config, place))
    assert given.max_num_seqs == 256 or ledger.tokens >= 448 * given.max_num_seqs


def test_long_sequences_whose_ids_take_much_memory_are_fewer() -> None:
    """Ids and block tables of a sequence of 2.6 million tokens take 22 MB: 46e9 bytes of 2,048."""
    config = config_from_dict(SHAPES["1B"] | {"max_position_embeddings": 5 << 19})
    place = place_on("h200")
    short, long = (
        with_sequences(EngineConfig("nowhere", max_model_len=most, load_format="dummy"), config, place).max_num_seqs
        for most in (8192, 5 << 19)
    )
    assert short == 2048
    assert long is not None
    assert 256 <= long < 2048
    asked = EngineConfig("nowhere", max_model_len=5 << 19, max_num_seqs=long, load_format="dummy")
    rank_memory(asked, config, place, rank_setup(asked, config, place))


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}, {"tensor_parallel_size": 2, "dtype": "float16"}],
)
def test_all_ranks_choose_alike(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their own devices have left, and whichever share of the model they have."""
    monkeypatch.setattr("strata.engine.ledger.available_memory", lambda _: pytest.fail("a rank looked at its own"))
    place = RankPlace(torch.device("cuda"), DeviceLimits.listed(device("h200")))
    ranks = EngineConfig("8B", **options).ranks
    counts = {sequences("8B", "h200", replace(place, index=index), **options) for index in range(ranks)}
    assert len(counts) == 1
    assert counts != {None}


def test_what_is_asked_for_is_had_and_a_cpu_has_the_usual_number() -> None:
    assert sequences("8B", "h200", max_num_seqs=3) == 3
    config = weights.resolve("0.6B", "dummy")[0]
    asked = with_sequences(EngineConfig("0.6B"), config, RankPlace(torch.device("cpu"), None))
    assert asked.max_sequences == 256


def test_a_simulated_engine_runs_as_many() -> None:
    asked = EngineConfig("8B", load_format="dummy")
    made = predicted_engine(asked, find_config("8B"), device("h200"))
    assert made.shape.scheduler.max_sequences == sequences("8B", "h200") == 1024


RANKS: dict[str, Any] = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
# A value of each that asks for something, with what it needs.
ASKED: dict[str, Any] = {
    "deterministic": True,
    "enable_dp_attention": True,
    "enable_eplb": True,
    "pipeline_parallel_size": 2,
    "prefill_context_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "kv_cache_dtype": "fp8",
    "sparse_prefill": 0.9,
    "decode_pages": 8,
    "message_dtype": "fp8",
    "overlap_tokens": 64,
    "all_reduce_group_size": 2,
    "quantization": "int8",
    "sparsity": "2:4",
}
# What each cannot be had with; the others with each other can.
APART = {
    "pipeline_parallel_size": {"enable_eplb", "enable_dp_attention", "prefill_context_parallel_size"},
    "enable_dp_attention": {"prefill_context_parallel_size"},
    "enable_eplb": {"deterministic", "quantization", "sparsity"},
    "quantization": {"sparsity", "deterministic"},  # with several ranks
    "sparsity": {"deterministic"},
    "sparse_prefill": {
        "decode_pages", "deterministic", "kv_cache_dtype", "prefill_context_parallel_size", "enable_dp_attention"
    },
    "decode_pages": {"deterministic", "kv_cache_dtype", "prefill_context_parallel_size", "enable_dp_attention"},
    "kv_cache_dtype": {"prefill_context_parallel_size"},
    "message_dtype": {"deterministic", "enable_dp_attention", "prefill_context_parallel_size", "overlap_tokens"},
    "all_reduce_group_size": {
        "deterministic", "enable_dp_attention", "prefill_context_parallel_size", "decode_context_parallel_size",
        "overlap_tokens",
    },
    "decode_context_parallel_size": {
        "deterministic", "enable_dp_attention", "pipeline_parallel_size", "prefill_context_parallel_size",
        "kv_cache_dtype", "sparse_prefill", "decode_pages", "message_dtype", "overlap_tokens",
    },
}  # fmt: skip


def together(one: str, other: str) -> bool:
    return other not in APART.get(one, ()) and one not in APART.get(other, ())


@pytest.mark.parametrize("name", ASKED)
def test_each_is_taken_alone_and_with_what_it_goes_along_with(name: str) -> None:
    EngineConfig("8B", **RANKS, **{name: ASKED[name]})
    for other in ASKED.keys() - {name}:
        if together(name, other):
            EngineConfig("8B", **RANKS, **{name: ASKED[name], other: ASKED[other]})


@pytest.mark.parametrize(("one", "other"), [pair for pair in combinations(ASKED, 2) if not together(*pair)])
def test_two_that_do_not_go_together_are_both_named(one: str, other: str) -> None:
    with pytest.raises(ValueError, match="leave out one of") as refused:
        EngineConfig("8B", **RANKS, **{one: ASKED[one], other: ASKED[other]})
    assert one in str(refused.value)
    assert other in str(refused.value)


@pytest.mark.parametrize(
    "other",
    [
        {"deterministic": True},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"passes": "exact"},
        {"sparse_prefill": 0.9},
        {"decode_pages": 8},
    ],
    ids=str,
)
def test_torch_compile_is_to_compare_with_and_takes_none_of_them(other: dict[str, Any]) -> None:
    ((name, value),) = other.items()
    with pytest.raises(ValueError, match=f"executor='compile' and {name}={value!r} are not there together"):
        EngineConfig("8B", executor="compile", **other)
