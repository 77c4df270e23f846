"""Options of a kind or a size that no engine has are refused by name, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from strata.cli.ending import explanation
from strata.cli.main import options_of
from strata.engine.engine_config import EngineConfig
from strata.engine.faults import EngineFault, memory_explained
from strata.engine.ledger import Ledger
from strata.engine.startup.option_names import as_flags

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
