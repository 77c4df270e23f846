"""An engine with weights of 2:4 sparsity on CUDA; its products stand in test_packed_linear_gpu.py."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from strata import LLM, SamplingParams
from strata.models.folder import BUILTIN_FOLDER
from strata.models.pruned.prune import prune
from strata.models.pruned.settings import Pruning

pytestmark = pytest.mark.gpu


def test_an_engine_says_what_it_says_with_the_zeros(tmp_path: Path) -> None:
    """Prompts in one step and in chunks, and decodes: the likelihoods of what it reads and writes, to a rounding."""
    prune(BUILTIN_FOLDER, tmp_path / "pruned", Pruning.of("2:4", 0.5, "magnitude"), [], torch.device("cpu"))
    said = []
    for sparsity in (None, "2:4"):
        options = {"dtype": "bfloat16", "max_num_seqs": 4, "num_pages": 100, "verbose": False}
        llm = LLM(tmp_path / "pruned", sparsity=sparsity, **options)
        prompt = llm.get_tokenizer().encode("What is 47 + 38? " * 12)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        logprobs = [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]
        said.append(torch.tensor(logprobs))
        assert len(output.outputs[0].token_ids) == 8
        del llm
        gc.collect()
    assert (said[0] - said[1]).abs().mean() < 0.1
    assert said[0].std() > 1
