"""Prompts of 1 to 100,000 tokens in chunks of any size, alone and beside decodes: no fault, and the numbers are right.

Few layers: every layer runs the same kernels, and what a long prompt may break does not depend on their number.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from strata import LLM, SamplingParams
from strata.engine.outputs import RequestOutput
from strata.models import weights
from strata.models.shapes import SHAPES

pytestmark = pytest.mark.gpu

LAYERS = {"0.6B": 8, "8B": 4}
CHUNKS = (8192, 4096, 1024, 512)
LENGTHS = (1, 17, 513, 8191, 9000, 39000, 100_000)
# Run beside decodes, of which each takes a token of every step.
BESIDE = (9000, 39000, 100_000)
DECODES = 32
OUTPUTS = 6
LONGEST = 100_352
# For these the logits of the prompt's last token are compared with transformers.
COMPARED = (513, 9000, 39000)
# One row of logits has a less even error than the hundreds of tests/gpu/test_models_gpu.py, where the bound is 1.2.
MARGIN = 1.5


@dataclass(frozen=True)
class Answer:
    """What came of a prompt: ids, the exact log-probabilities of those, and the logits of the prompt's last token."""

    ids: list[int]
    logprobs: list[float]
    logits: Tensor | None


class Subject:
    """An engine whose steps can be made shorter, and which keeps the logits of the last prompt."""

    def __init__(self, folder: Path, shape: str, deterministic: bool) -> None:
        self.deterministic, self.vocabulary = deterministic, SHAPES[shape]["vocab_size"]
        self.llm = LLM(
            folder,
            load_format="dummy",
            deterministic=deterministic,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=LONGEST,
            max_num_seqs=DECODES + 1,
            max_num_batched_tokens=max(CHUNKS),
            num_pages=LONGEST // 16 + 40 * DECODES,
        )
        self._prompts: dict[int, list[int]] = {}
        self._logits: Tensor | None = None
        runner: Any = self.llm.engine.loop._runner
        draw = runner._draw

        def kept(step: Any, *masks: Any) -> Any:
            if not step.arrays.are_decodes:
                self._logits = step.logits[-1].clone()  # prompts come behind the decodes of a step
            return draw(step, *masks)

        runner._draw = kept

    def prompt(self, length: int) -> list[int]:
        if length not in self._prompts:
            rng = random.Random(length)
            self._prompts[length] = [rng.randrange(self.vocabulary) for _ in range(length)]
        return self._prompts[length]

    def answer(self, length: int, chunk: int, decodes: int = 0) -> tuple[Answer, list[RequestOutput]]:
        """The answer to a prompt in steps of `chunk` tokens, and those of the sequences that decode beside it."""
        scheduler = self.llm.engine.loop.scheduler
        scheduler.config = replace(scheduler.config, max_tokens=chunk)
        self._logits = None
        steps = length // (chunk - decodes) + 2 * OUTPUTS
        params = SamplingParams(temperature=0, max_tokens=OUTPUTS, logprobs=1, ignore_eos=True)
        beside = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        asked = [{"prompt_token_ids": [number + 1] * 8} for number in range(decodes)]
        outputs = self.llm.generate(
            [*asked, {"prompt_token_ids": self.prompt(length)}], [*[beside] * decodes, params], use_tqdm=False
        )
        scheduler.check()
        *others, own = outputs
        sample = own.outputs[0]
        assert sample.logprobs is not None
        logprobs = [entry[id].logprob for id, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert len(logprobs) == OUTPUTS
        assert torch.tensor(logprobs).isfinite().all()
        assert all(len(other.outputs[0].token_ids) == steps for other in others)
        return Answer(sample.token_ids, logprobs, self._logits), others


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Causal attention [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim], in memory that grows with tokens.

    Given grouped heads, torch would hold all scores of float32 at once.
    """
    assert mask is None
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scaling"]).transpose(1, 2), None


AttentionInterface.register("every head apart", attend)


class Truth:
    """The logits of a prompt's last token by transformers in float32, and how far it is off in bfloat16."""

    def __init__(self, folder: Path, shape: str, subject: Subject) -> None:
        made, _ = weights.load(folder, "cuda", "bfloat16", "dummy")
        config = AutoConfig.from_pretrained(folder)
        with torch.device("cuda"):
            peer = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="every head apart"
            ).eval()
        peer.load_state_dict(made.state_dict(), strict=False)
        del made
        theirs = self._rows(peer, subject)
        self.rows = self._rows(peer.float(), subject)
        self.errors = {length: self.error(row, length) for length, row in theirs.items()}

    @staticmethod
    @torch.inference_mode()
    def _rows(peer: Any, subject: Subject) -> dict[int, Tensor]:
        found = {}
        for length in COMPARED:
            ids = torch.tensor([subject.prompt(length)], device="cuda")
            found[length] = peer(ids, logits_to_keep=1, use_cache=False).logits[0, -1].float()
        return found

    def error(self, row: Tensor, length: int) -> float:
        return float((row.float() - self.rows[length]).norm() / self.rows[length].norm())


@pytest.fixture(scope="module", params=[(shape, mode) for shape in LAYERS for mode in (True, False)], ids=str)
def subject_and_truth(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Subject, Truth]]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape, deterministic = request.param
    folder = tmp_path_factory.mktemp(shape)
    config = SHAPES[shape] | {"num_hidden_layers": LAYERS[shape], "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(config))
    subject = Subject(folder, shape, deterministic)
    truth = Truth(folder, shape, subject)
    gc.collect()
    torch.cuda.empty_cache()
    yield subject, truth
    del subject, truth
    gc.collect()
    torch.cuda.empty_cache()


def check(subject: Subject, truth: Truth, length: int, found: dict[str, Answer]) -> None:
    """Answers to one prompt by the way in which it ran, the first of which the others are held against."""
    first = next(iter(found.values()))
    for way, answer in found.items():
        if subject.deterministic:
            assert answer.ids == first.ids, f"{length} tokens, {way}"
            assert answer.logprobs == first.logprobs, f"{length} tokens, {way}"
        if answer.logits is None or length < min(COMPARED):  # a single token runs as those of a decode
            continue
        assert first.logits is not None
        if length in COMPARED:
            error, bound = truth.error(answer.logits, length), MARGIN * truth.errors[length]
            print(f"{length} tokens, {way}: {error:.5f} off, transformers {truth.errors[length]:.5f}")
            assert error <= bound, f"{length} tokens, {way}"
        else:
            apart = float((answer.logits.float() - first.logits.float()).norm() / first.logits.float().norm())
            print(f"{length} tokens, {way}: {apart:.5f} from the first way")
            assert apart <= 2 * MARGIN * max(truth.errors.values()), f"{length} tokens, {way}"


def test_prompts_alone(subject_and_truth: tuple[Subject, Truth]) -> None:
    subject, truth = subject_and_truth
    for length in LENGTHS:
        check(subject, truth, length, {f"chunks of {chunk}": subject.answer(length, chunk)[0] for chunk in CHUNKS})


def test_prompts_beside_decodes(subject_and_truth: tuple[Subject, Truth]) -> None:
    subject, truth = subject_and_truth
    for length in BESIDE:
        found, others = {"alone": subject.answer(length, CHUNKS[0])[0]}, []
        for chunk in CHUNKS if length < max(LENGTHS) else CHUNKS[:1]:
            found[f"chunks of {chunk} beside decodes"], beside = subject.answer(length, chunk, DECODES)
            others.append([output.outputs[0].token_ids for output in beside])
        check(subject, truth, length, found)
        if subject.deterministic:
            # Steps are more where chunks are smaller: the shorter outputs are the beginnings of the longer.
            for some in others:
                assert all(own[: len(least)] == least for own, least in zip(some, others[0], strict=True))
