"""Ways to lay an engine out over ranks, each with a model that it divides."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata import LLM, SamplingParams
from strata.engine.outputs import RequestOutput
from strata.models.folder import located
from strata.models.save import save
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.parallel.models import random_model
from tests.parallel.shards import divisible_config

# Of five experts two ranks have three and two.
# fmt: off
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 513, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "float32", "attention_bias": False,
}
# fmt: on
# Short steps: prompts are computed in chunks.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "seed": 0,
    "verbose": False,
}

Model = Callable[[Path], Mapping[str, Any]]
"""Writes what is not there yet into a folder; gives the options of an engine that serve it."""


def builtin(folder: Path) -> Mapping[str, Any]:
    return {}


def dummy(config: Mapping[str, Any], *, speaks: bool = False) -> Model:
    """Random weights. speaks: with the tokenizer of the built-in model."""

    def written(folder: Path) -> Mapping[str, Any]:
        own, given = Path(located(None)), dict(config)
        if speaks:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(own / name, folder)
            given["vocab_size"] = json.loads((own / "config.json").read_text())["vocab_size"]
        (folder / "config.json").write_text(json.dumps(given))
        return {"model": folder, "load_format": "dummy", "skip_tokenizer_init": not speaks}

    return written


def saved(name: str, **sizes: Any) -> Model:
    def written(folder: Path) -> Mapping[str, Any]:
        config = divisible_config(name, max_position_embeddings=256, **sizes)
        save(random_model(config, torch.float32), config, folder)
        return {"model": folder, "page_size": 4, "skip_tokenizer_init": True}

    return written


@dataclass(frozen=True)
class Layout:
    """ranked: options of the engine over ranks. pages: of one rank, and of each of several; few, so that sequences are
    preempted. weights, kv: bounds of what a rank has of the weights and of the bytes of all pages. close: how near
    log-probabilities are."""

    ranked: Mapping[str, Any]
    model: Model = builtin
    pages: tuple[int, int] = (48, 48)
    weights: tuple[float, float] = (0.0, 1.0)
    kv: tuple[float, float] = (0.0, 1.0)
    close: float = 2e-5

    def options(self, folder: Path) -> dict[str, Any]:
        return OPTIONS | {"num_pages": self.pages[0]} | dict(self.model(folder))

    def over_ranks(self, options: Mapping[str, Any]) -> LLM:
        gc.collect()  # a process is in one group of ranks at a time
        return LLM(**{**options, "num_pages": self.pages[1], **self.ranked})


TENSOR, STAGES, EXPERTS = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}
ATTENTION_DP = {"enable_dp_attention": True}
KEYS = {"decode_context_parallel_size": 2}
HALF = (0.499, 0.501)
LAYOUTS: dict[str, Layout] = {
    # Of the prompts, long chunks are computed in two halves, short ones whole.
    "tensor": Layout({**TENSOR, "overlap_tokens": 24}, weights=(0.4, 0.6), kv=HALF, close=5e-5),
    "stages": Layout(STAGES, weights=(0.4, 0.75), kv=(0.3, 0.7)),
    "prefill context": Layout({"prefill_context_parallel_size": 2}, weights=(1.0, 1.0), kv=(1.0, 1.0)),
    "attention dp": Layout({**TENSOR, **EXPERTS, **ATTENTION_DP}, dummy(CONFIG, speaks=True), (80, 20), (0.4, 0.99)),
    # A rank has pages for as many tokens; of heads that all ranks have, half the keys.
    "decode context": Layout({**TENSOR, **KEYS}, saved("llama", num_key_value_heads=1), (144, 72), (0.4, 0.7), HALF),
    "decode context of latents": Layout({**TENSOR, **KEYS}, saved("deepseek-v2"), (144, 72), (0.3, 0.9), HALF),
}
FOUR = {"tensor_parallel_size": 4}
MIXED = dummy(CONFIG)
# Answers and a rank's end alone.
SHORT_LAYOUTS: dict[str, Layout] = {
    "mixture": Layout(TENSOR, MIXED),
    "experts": Layout({**TENSOR, **EXPERTS}, MIXED),
    "recurrent": Layout(TENSOR, dummy(RECURRENT_CONFIGS["granite-hybrid-experts"] | {"intermediate_size": 32})),
    "delta rule": Layout(TENSOR, dummy(RECURRENT_CONFIGS["qwen3-next"] | {"intermediate_size": 32})),
    "four, in pairs": Layout({**FOUR, "all_reduce_group_size": 2}),
    "decode context of four": Layout({**FOUR, **KEYS}, saved("qwen3-biases-tied", num_key_value_heads=2), (144, 72)),
    "stages of experts": Layout({**TENSOR, **STAGES, **EXPERTS}, MIXED),
}
LONG_LAYOUTS: dict[str, Layout] = {
    "attention dp of four": Layout({**FOUR, **EXPERTS, **ATTENTION_DP}, MIXED),
    "stages of two": Layout({**TENSOR, **STAGES}),
    "decode context along all": Layout(
        {**FOUR, "decode_context_parallel_size": 4}, saved("llama-biases-tied", num_key_value_heads=1), (144, 36)
    ),
}


def prompt(length: int, step: int = 7) -> list[int]:
    return [(step * place + 3) % 61 for place in range(length)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def assert_alike(
    one: LLM, several: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> None:
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (one, several))
    assert ids(found) == ids(expected)


def assert_same_ids(llm: LLM) -> None:
    """All ranks have the same ids of the sequences."""
    assert llm.engine.ranks is not None
    llm.engine.ranks.check_ids()
