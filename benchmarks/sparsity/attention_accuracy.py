"""What the built-in model loses when prompts or decodes see fewer keys, on a CPU: KL, and its replies to exercises.

    python -m benchmarks.sparsity.attention_accuracy --shares 1,0.95,0.9,0.8,0.6,0.4 --block 16 --passages 80
    python -m benchmarks.sparsity.attention_accuracy --pages 2,3,4,6,8   # decodes that see so many pages of 16 tokens

A passage is a conversation of three held-out exercises of which replies look up what stands far before them: tables,
stories, numbers to be sorted, words to be spelled. It runs as a prompt; a reply is right if each of its tokens is the
likeliest where it stands. With --pages conversations are asked up to their last reply, which is decoded greedily, and
the longest quarter of them run token by token, each a decode, for what is predicted of all replies.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata import LLM, SamplingParams
from strata.bench.accuracy.passages import Passage
from strata.bench.accuracy.states import Predictions, predict
from strata.kernels.attention.sparse import prompts
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.models.folder import model_folder
from strata.train.data.encode import Encoder
from strata.train.score import questions
from strata.train.tasks.mixture import ExerciseDocument

_TASKS = ("tables", "story places", "story sums", "sorting", "longer addition", "word reversal", "counting letters")


@dataclass(frozen=True)
class Conversation:
    """written: of the ids of the passage from its first scored one on, those that the model says, as (start, end)."""

    passage: Passage
    written: tuple[tuple[int, int], ...]


def conversations(count: int, seed: int) -> list[Conversation]:
    """The longest of four times as many."""
    shuffled, encoder = random.Random(seed), Encoder.load(model_folder("builtin"))
    examples = [one for one in questions(200) if one.task in _TASKS]
    found = []
    for number in range(4 * count):
        encoded = encoder.encode([ExerciseDocument(tuple(shuffled.sample(examples, 3)))])
        marks = encoded.loss_mask.tolist()
        ends = [at for at in range(1, len(marks) + 1) if marks[at - 1] and (at == len(marks) or not marks[at])]
        starts = [at for at in range(1, len(marks)) if marks[at] and not marks[at - 1]]
        first = starts[0]
        written = tuple((start - first, end - first) for start, end in zip(starts, ends, strict=True))
        found.append(Conversation(Passage(tuple(encoded.tokens.tolist()), first, number), written))
    return sorted(found, key=lambda one: -len(one.passage.ids))[:count]


class Kept:
    """Counts blocks of keys that are kept, of those that could be, while prompts run on a CPU."""

    def __init__(self) -> None:
        self.kept = self.seen = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        choose = prompts.chosen_blocks

        def counting(scores: Tensor, new: int, total: int, choice: BlockChoice) -> Tensor:
            found = choose(scores, new, total, choice)
            self.kept += int(found.sum())
            self.seen += int(choose(scores, new, total, choice._replace(share=1.0)).sum())
            return found

        prompts.chosen_blocks = counting
        try:
            yield
        finally:
            prompts.chosen_blocks = choose


def compared(found: Predictions, wanted: Predictions, given: Sequence[Conversation]) -> dict[str, float]:
    """Over what the model says: mean KL(wanted || found) in nats, agreement of the likeliest ids, share of replies that
    are right, perplexity."""
    divergence = agreement = loss = scored = 0.0
    right = []
    for number, one in enumerate(given):
        rows = slice(0, one.passage.scored)
        ours, theirs = found.log_probabilities(number, rows), wanted.log_probabilities(number, rows)
        ids = torch.tensor(one.passage.ids[one.passage.first :])
        for start, end in one.written:
            part = slice(start, end)
            likeliest = ours[part].argmax(-1)
            right.append(bool((likeliest == ids[part]).all()))
            divergence += float((theirs[part].exp() * (theirs[part] - ours[part])).sum())
            agreement += float((likeliest == theirs[part].argmax(-1)).sum())
            loss -= float(ours[part].gather(1, ids[part, None]).sum())
            scored += end - start
    return {
        "tokens": sum(len(one.passage.ids) for one in given) / len(given),
        "kl": divergence / scored,
        "agreement": agreement / scored,
        "replies_right": sum(right) / len(right),
        "perplexity": math.exp(loss / scored),
    }


def over_pages(options: dict[str, Any], pages: int | None, given: Sequence[Conversation]) -> dict[str, float]:
    """kept: share of the pages, on average over the tokens of last replies, that is seen; right: share of these replies
    that greedy decoding gives word for word, after prompts that see all keys."""
    llm = LLM("builtin", **options, decode_pages=pages)
    asked, wanted, kept = [], [], []
    for one in given:
        start, end = (one.passage.first + at for at in one.written[-1])
        asked.append({"prompt_token_ids": list(one.passage.ids[:start])})
        wanted.append(list(one.passage.ids[start:end]))
        held = [-(-length // llm.engine.ledger.page_size) for length in range(start + 1, end)]
        kept += [1.0 if pages is None else min(1.0, pages / count) for count in held]
    params = [SamplingParams(temperature=0.0, max_tokens=len(ids), ignore_eos=True) for ids in wanted]
    found = llm.generate(asked, params, use_tqdm=False)
    right = sum(output.outputs[0].token_ids == ids for output, ids in zip(found, wanted, strict=True))
    return {"kept": sum(kept) / len(kept), "right": right / len(given)}


def measure_pages(options: dict[str, Any], counts: Sequence[int], given: Sequence[Conversation]) -> None:
    longest = given[: -(-len(given) // 4)]
    passages = [one.passage for one in longest]
    wanted = predict(LLM("builtin", **options), passages)
    for pages in (None, *counts):
        one_each = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "decode_pages": pages}
        found = wanted if pages is None else predict(LLM("builtin", **options, **one_each), passages)
        line = {"pages": pages, **over_pages(options, pages, given), **compared(found, wanted, longest)}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", default="1,0.95,0.9,0.8,0.6,0.4")
    parser.add_argument("--pages", help="of decodes, instead of blocks of prompts")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--passages", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "verbose": False, "enable_prefix_caching": False}
    given = conversations(asked.passages, asked.seed)
    if asked.pages is not None:
        measure_pages(options, [*map(int, asked.pages.split(","))], given)
        return
    passages = [one.passage for one in given]
    wanted = predict(LLM("builtin", **options), passages)
    print(json.dumps({"share": None, "kept": 1.0, **compared(wanted, wanted, given)}), flush=True)
    for share in map(float, asked.shares.split(",")):
        sparse = {"sparse_prefill": share, "sparse_prefill_min_keys": 1, "sparse_prefill_block": asked.block}
        kept = Kept()
        with kept.counted():
            found = predict(LLM("builtin", **options, **sparse), passages)
        line = {"share": share, "block": asked.block, "kept": kept.kept / kept.seen, **compared(found, wanted, given)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
