"""Output tokens per second on this CPU: Strata against transformers, the same weights, prompts and greedy answers.

The prompts are exercises that the built-in model never saw; every answer ends where the model ends it. Batched, at most
`--concurrency` requests run at once. transformers gets every batched form it has: padded batches of several sizes, in
order of arrival and of prompt length, and its own continuous batching, each in float32 and bfloat16. The fastest of one
look at all is measured again, in turn with Strata, and medians are compared. Then the same one request at a time.

    python benchmarks/cpu_vs_transformers.py

Run it on a machine that does nothing else: where a second process takes a core, threads of either side wait for each
other and a run can take a hundred times as long. `ratio_of_best_runs` tells how much of a result was that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from strata.engine.llm import LLM
from strata.engine.sampling_params import SamplingParams
from strata.models.folder import BUILTIN_FOLDER
from strata.train.tasks.mixture import TASKS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_TOKENS = 400
PREFILL_TOKENS = 2048

Prompts = Sequence[list[int]]
Generate = Callable[[Prompts], list[list[int]]]


@dataclass
class Contender:
    """A way to generate, with the output tokens per second of its runs and its newest answers."""

    engine: str
    form: str
    dtype: str
    generate: Generate
    rates: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def run(self, prompts: Prompts) -> None:
        start = time.perf_counter()
        self.answers = self.generate(prompts)
        self.rates.append(sum(map(len, self.answers)) / (time.perf_counter() - start))

    def summary(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "form": self.form,
            "dtype": self.dtype,
            "tokens_per_s": self.rate,
            "all": self.rates,
        }


def questions(count: int, seed: int) -> list[str]:
    """Held-out questions, drawn from the tasks as training draws them."""
    rng = random.Random(f"benchmark {seed}")
    found: list[str] = []
    while len(found) < count:
        example = rng.choices(TASKS, weights=[task.weight for task in TASKS])[0].sample(rng)
        if example.held_out:
            found.append(example.question)
    return found


class Transformers:
    """transformers with one dtype: `generate` over padded batches, and `generate_batch`."""

    def __init__(self, folder: Path, dtype: str, concurrency: int) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa")
        self._model = loaded.eval()
        self._concurrency = concurrency
        own = self._model.generation_config
        self._pad, self._eos = own.pad_token_id, own.eos_token_id
        self._config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=self._pad, eos_token_id=self._eos
        )

    def padded(self, size: int, *, by_length: bool = False) -> Generate:
        """Batches of `size`, padded on the left; each runs until its longest answer has ended."""

        def generate(prompts: Prompts) -> list[list[int]]:
            order = sorted(range(len(prompts)), key=lambda i: len(prompts[i])) if by_length else range(len(prompts))
            answers: dict[int, list[int]] = {}
            for start in range(0, len(prompts), size):
                chosen = order[start : start + size]
                answers |= zip(chosen, self._batch([prompts[i] for i in chosen]), strict=True)
            return [answers[i] for i in range(len(prompts))]

        return generate

    @torch.inference_mode()
    def _batch(self, prompts: Prompts) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        rows = self._model.generate(ids, attention_mask=mask, generation_config=self._config)[:, longest:].tolist()
        return [row[: row.index(self._eos) + 1] if self._eos in row else row for row in rows]

    @torch.inference_mode()
    def continuous(self, prompts: Prompts) -> list[list[int]]:
        """Continuous batching of transformers; it needs to be told how large its cache may be on a CPU."""
        limits = ContinuousBatchingConfig(
            num_blocks=4 * self._concurrency,
            max_batch_tokens=PREFILL_TOKENS,
            max_requests_per_batch=self._concurrency,
        )
        results = self._model.generate_batch(
            inputs=list(prompts),
            generation_config=self._config,
            continuous_batching_config=limits,
            persistent_manager=True,
            warmup=False,
        )
        if len(results) != len(prompts):
            raise RuntimeError(f"continuous batching answered {len(results)} of {len(prompts)} prompts")
        by_prompt = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]


def strata(llm: LLM) -> Generate:
    """Strata's offline interface, from ids to ids and text."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def generate(prompts: Prompts) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return generate


def one_by_one(generate: Generate) -> Generate:
    return lambda prompts: [generate([prompt])[0] for prompt in prompts]


def fastest(contenders: Sequence[Contender], prompts: Prompts, console: Console) -> Contender:
    """Run each once after a warm-up; a form that fails is left out with its error."""
    working = []
    for contender in contenders:
        try:
            contender.generate(prompts[:2])
            contender.run(prompts)
        except Exception as error:  # whatever another library raises, the other forms still count
            console.print(f"{contender.engine}, {contender.form}, {contender.dtype}: left out ({error})")
            continue
        console.print(f"{contender.engine}, {contender.form}, {contender.dtype}: {contender.rate:,.0f} tokens/s")
        working.append(contender)
    best = max(working, key=lambda contender: contender.rate)
    best.rates.clear()
    return best


def compare(ours: Sequence[Contender], theirs: Contender, prompts: Prompts, repeat: int) -> None:
    """Interleaved, so that whatever else the machine does hits all alike."""
    for contender in ours:
        contender.generate(prompts[:2])
    for _ in range(repeat):
        for contender in (*ours, theirs):
            contender.run(prompts)


def equal_answers(left: Contender, right: Contender) -> int:
    return sum(a == b for a, b in zip(left.answers, right.answers, strict=True))


def report(
    title: str, ours: Sequence[Contender], theirs: Contender, exact: Contender, console: Console
) -> dict[str, Any]:
    table = Table("", "form", "dtype", "tokens/s", "against transformers", "equal answers", title=title)
    for contender in (theirs, *ours):
        table.add_row(
            contender.engine,
            contender.form,
            contender.dtype,
            f"{contender.rate:,.0f}",
            f"{contender.rate / theirs.rate:.2f}",
            f"{equal_answers(contender, exact)} of {len(exact.answers)}",
        )
    console.print(table)
    best = max(ours, key=lambda contender: contender.rate)
    return {
        "ratio": best.rate / theirs.rate,
        "ratio_of_best_runs": max(max(contender.rates) for contender in ours) / max(theirs.rates),
        "ratios": {contender.dtype: contender.rate / theirs.rate for contender in ours},
        "theirs": theirs.summary(),
        "ours": [contender.summary() for contender in ours],
        "requests": len(exact.answers),
        "output_tokens": sum(map(len, exact.answers)),
        "equal_answers": {contender.dtype: equal_answers(contender, exact) for contender in ours},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUILTIN_FOLDER, help="checkpoint folder with a chat template")
    parser.add_argument("--requests", type=int, default=96, help="batched requests")
    parser.add_argument("--concurrency", type=int, default=32, help="requests that run at once")
    parser.add_argument("--single", type=int, default=8, help="requests that run one after the other")
    parser.add_argument("--repeat", type=int, default=5, help="timed runs of each, of which the median counts")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    asked = parser.parse_args()
    console = Console(highlight=False, stderr=True, soft_wrap=True)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    llms = {
        dtype: LLM(asked.model, dtype=dtype, device="cpu", max_num_seqs=asked.concurrency, enable_prefix_caching=False)
        for dtype in DTYPES
    }
    others = {dtype: Transformers(asked.model, dtype, asked.concurrency) for dtype in DTYPES}
    prompts = [
        llms["float32"].chat_prompt([{"role": "user", "content": question}])["prompt_token_ids"]
        for question in questions(asked.requests, asked.seed)
    ]

    forms = [
        Contender("transformers", f"padded {size}, by {order}", dtype, other.padded(size, by_length=order == "length"))
        for dtype, other in others.items()
        for size in (8, 16, 32)
        if size <= asked.concurrency
        for order in ("arrival", "length")
    ]
    forms += [Contender("transformers", "continuous", dtype, other.continuous) for dtype, other in others.items()]
    batched = [Contender("strata", "continuous", dtype, strata(llm)) for dtype, llm in llms.items()]
    theirs = fastest(forms, prompts, console)
    compare(batched, theirs, prompts, asked.repeat)
    exact = Contender("transformers", "one by one", "float32", one_by_one(others["float32"].padded(1)))
    exact.run(prompts)
    together = report(f"{asked.concurrency} concurrent requests", batched, theirs, exact, console)

    few = prompts[: asked.single]
    singles = [
        Contender("transformers", "one by one", dtype, one_by_one(other.padded(1))) for dtype, other in others.items()
    ]
    alone = [Contender("strata", "one by one", dtype, one_by_one(strata(llm))) for dtype, llm in llms.items()]
    theirs = fastest(singles, few, console)
    compare(alone, theirs, few, asked.repeat)
    exact.run(few)
    single = report("One request at a time", alone, theirs, exact, console)

    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    print(json.dumps({"batched": together, "single": single} | facts))


if __name__ == "__main__":
    main()
