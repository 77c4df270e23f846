"""torch.compile as an executor on a GPU: captured steps replay its kernels, with the logits of ours in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata import LLM, SamplingParams
from strata.models.shapes import SHAPES

pytestmark = pytest.mark.gpu


def test_log_probabilities_are_those_of_the_graph(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["0.6B"] | {"num_hidden_layers": 3}))
    prompts = [{"prompt_token_ids": [(7 * place + first) % 1000 for place in range(length)]} for first, length in
               ((1, 40), (2, 9), (3, 1))]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    found = []
    for executor in ("graph", "compile"):
        llm = LLM(
            tmp_path,
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cuda",
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            num_pages=100,
            executor=executor,
            seed=0,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        captured = llm.engine.captured
        assert captured is not None
        assert captured.sizes
        assert not captured.uncaptured["too_large"]
        found.append([output.outputs[0].logprobs for output in outputs])
        del llm, captured  # or the next has no memory left
    for plain, compiled in zip(*found, strict=True):
        for id, value in plain[0].items():  # later ones follow from the ids, which near ties may change
            if id in compiled[0]:
                assert compiled[0][id].logprob == pytest.approx(value.logprob, abs=0.05)
        assert len(set(plain[0]) & set(compiled[0])) >= 3
