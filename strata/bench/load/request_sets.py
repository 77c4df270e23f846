"""What the requests of a load ask: random prompts, prompts with shared prefixes, or those of a file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.bench.load.send import LoadRequest
from strata.files import request_rows
from strata.files.request_rows import HASHED_TOKENS, Messages, RequestRow
from strata.text.counted import counted

TEMPERATURE = 0.6
# Deviation of the logarithm of lognormal lengths: the longest of a hundred is ten times as long as the middle one.
SIGMA = 1.0


@dataclass(frozen=True)
class Ask:
    """One request. prompt: token ids, text, or the messages of a chat. due: seconds from the start, in a trace."""

    prompt: list[int] | str | Messages
    output_tokens: int
    due: float | None = None


@dataclass(frozen=True)
class EvenLengths:
    """Tokens of prompts and outputs, drawn evenly from mean * (1 - spread) to mean * (1 + spread)."""

    prompt: int
    output: int
    spread: float = 0.0

    def sample(self, rng: random.Random) -> tuple[int, int]:
        return self._around(self.prompt, rng), self._around(self.output, rng)

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its output together."""
        return int(self.prompt * (1 + self.spread)) + int(self.output * (1 + self.spread))

    @property
    def words(self) -> str:
        spread = f" (+-{self.spread:.0%})" if self.spread else ""
        if not spread:
            return f"prompts of {self.prompt} and answers of {counted(self.output, 'token')}"
        return f"prompts of {self.prompt}{spread} and answers of {self.output}{spread} tokens"

    def _around(self, mean: int, rng: random.Random) -> int:
        return rng.randint(max(1, round(mean * (1 - self.spread))), int(mean * (1 + self.spread)))


@dataclass(frozen=True)
class LognormalLengths:
    """Tokens of prompts and outputs, most short and few long, as those of people are (ShareGPT's).

    prompt, output: means, before the few that are longer than `longest` are cut to it.
    """

    prompt: int
    output: int
    longest: int

    def sample(self, rng: random.Random) -> tuple[int, int]:
        return self._one(self.prompt, rng), self._one(self.output, rng)

    @property
    def max_tokens(self) -> int:
        return 2 * self.longest

    @property
    def words(self) -> str:
        means = f"prompts of {self.prompt} and answers of {counted(self.output, 'token')} on average"
        return f"{means}, each at most {self.longest}"

    def _one(self, mean: int, rng: random.Random) -> int:
        drawn = round(rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))
        return min(max(1, drawn), self.longest)


# Of both `max_tokens` are the most of a prompt and its output together, `words` as a result names them.
Lengths = EvenLengths | LognormalLengths


@dataclass(frozen=True)
class RandomSet:
    """Prompts of ids drawn from `ids`, which share nothing."""

    lengths: Lengths
    ids: Sequence[int]

    def asks(self, count: int, seed: int) -> list[Ask]:
        rng = random.Random(seed)
        lengths = (self.lengths.sample(rng) for _ in range(count))
        return [Ask(rng.choices(self.ids, k=prompt), output) for prompt, output in lengths]


@dataclass(frozen=True)
class SharedPrefixSet:
    """Random prompts that begin with the `prefix_tokens` ids of one of `groups` prefixes, each group equally often."""

    lengths: Lengths
    ids: Sequence[int]
    groups: int
    prefix_tokens: int

    def asks(self, count: int, seed: int) -> list[Ask]:
        rng = random.Random(seed)
        prefixes = [rng.choices(self.ids, k=self.prefix_tokens) for _ in range(self.groups)]
        of_group = [number % self.groups for number in range(count)]
        rng.shuffle(of_group)
        rest = RandomSet(self.lengths, self.ids).asks(count, rng.getrandbits(64))
        return [
            Ask([*prefixes[group], *ask.prompt], ask.output_tokens) for group, ask in zip(of_group, rest, strict=True)
        ]


@dataclass(frozen=True)
class FileSet:
    """The first requests of a file, in its order. The seed draws the prompts of which it says the length alone."""

    path: Path
    rows: tuple[RequestRow, ...]
    output_tokens: int
    ids: Sequence[int]

    def asks(self, count: int, seed: int) -> list[Ask]:
        if count > len(self.rows):
            raise ValueError(f"{self.path} has {len(self.rows)} requests, --num-prompts asks for {count}")
        rng = random.Random(seed)
        return [self._ask(row, rng) for row in self.rows[:count]]

    def _ask(self, row: RequestRow, rng: random.Random) -> Ask:
        prompt = row.messages or row.prompt or self._drawn(row, rng)
        due = None if row.timestamp is None else (row.timestamp - (self.rows[0].timestamp or 0.0)) / 1e3
        return Ask(prompt, row.output_length or self.output_tokens, due)

    def _drawn(self, row: RequestRow, rng: random.Random) -> list[int]:
        """As many ids as the row says: the same for blocks of the same name."""
        length = row.input_length or 1
        if row.hash_ids is None:
            return rng.choices(self.ids, k=length)
        blocks = (random.Random(name).choices(self.ids, k=HASHED_TOKENS) for name in row.hash_ids)
        return [id for block in blocks for id in block][:length]


# Each gives so many `asks`, the same for the same seed.
RequestSet = RandomSet | SharedPrefixSet | FileSet


def read_rows(path: Path, timed: bool) -> tuple[RequestRow, ...]:
    """The requests of a JSON-lines file. timed: each must have a timestamp, none before that of the line above.

    Raises ValueError that names the line at fault.
    """
    try:
        return request_rows.read_rows(path, ordered=timed, needed=("timestamp",) if timed else ())
    except OSError as error:
        raise ValueError(
            f"--dataset is random, shared-prefix, lognormal, agents or a JSON-lines file; {path}: {error.strerror}"
        ) from None


def encode(ask: Ask, model: str, *, with_ids: bool = False) -> LoadRequest:
    """A streamed request for exactly `ask.output_tokens` tokens, with their ids if asked."""
    chat = isinstance(ask.prompt, list) and isinstance(ask.prompt[0], dict)
    body = {
        "model": model,
        "messages" if chat else "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "ignore_eos": True,
        "temperature": TEMPERATURE,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if with_ids:
        body["return_token_ids"] = True
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return LoadRequest(path, json.dumps(body).encode(), ask.output_tokens)
