"""An engine's messages name options as a command line does, where one has them."""

from __future__ import annotations

import pytest
import torch

from strata.cli.ending import explanation
from strata.cli.main import options_of
from strata.engine.engine_config import EngineConfig
from strata.engine.faults import EngineFault, memory_explained
from strata.engine.ledger import Ledger
from strata.engine.startup.option_names import as_flags

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
