"""One question with its worked reply, and the rule that keeps some problems out of training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strata.train.tasks.tool import ExerciseCall, ExerciseTool

BOUNDARY = "\u2060"
"""In a reply: no token may span this point. It is not part of the text (a word that the model must write letter by
letter carries one between its letters, so the model never has to guess how the tokenizer would have merged them)."""

HELD_OUT_PERCENT = 8


@dataclass(frozen=True)
class Example:
    """A question and the reply to learn.

    problem: the canonical form of what is asked, the same for every phrasing ("add 38 47"). Whether an example is held
        out depends on the problem alone, so a held-out problem is in no training text however it is asked.
    answer: what the reply must end in; None when the reply is open and not scored.
    tools: what the model is offered. call: what it is to call with this question; the reply follows on its result.
    """

    task: str
    question: str
    reply: str
    answer: str | None
    problem: str
    held_out: bool
    tools: tuple[ExerciseTool, ...] = ()
    call: ExerciseCall | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The example as a chat, without the boundary marks."""
        asked = {"role": "user", "content": self.question}
        reply = {"role": "assistant", "content": self.reply.replace(BOUNDARY, "")}
        return [asked, *(() if self.call is None else self.call.messages), reply]

    @property
    def written(self) -> tuple[str, ...]:
        """What the model writes, turn by turn: the call, if there is one, and the reply."""
        return (self.reply,) if self.call is None else (self.call.text, self.reply)


@dataclass(frozen=True)
class Task:
    """A family of problems. `weight` is its share of the mixture, relative to the other tasks."""

    name: str
    weight: float
    sample: Callable[[random.Random], Example]


@dataclass(frozen=True)
class Offer:
    """A tool together with the questions that it answers. task: what these are scored as. question: one of them, with
    its call.

    subjects: what it is for; tools that are offered together share none. own_tasks: those of the model's own tasks
    whose questions it answers as well. topics: words of other questions that it answers.
    """

    tool: ExerciseTool
    task: str
    question: Callable[[random.Random], Example]
    subjects: frozenset[str]
    own_tasks: frozenset[str]
    topics: frozenset[str] = frozenset()

    def answers(self, example: Example) -> bool:
        """Whether the tool is for this question, which was not asked with it in mind."""
        return example.task in self.own_tasks or any(topic in example.question.lower() for topic in self.topics)


def worked(task: str, question: str, steps: str, answer: str, problem: str, held_out: bool | None = None) -> Example:
    """A question with its steps and its answer, a line. held_out: None if the problem alone decides."""
    reply = f"{steps}\nAnswer: {answer}" if steps else f"Answer: {answer}"
    return Example(task, question, reply, answer, problem, is_held_out(problem) if held_out is None else held_out)


def bucket(problem: str) -> int:
    """A number in 0..99 that depends on the problem alone, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(problem.encode(), digest_size=8).digest(), "big") % 100


def is_held_out(problem: str) -> bool:
    """Whether a problem is reserved for evaluation."""
    return bucket(problem) < HELD_OUT_PERCENT


def spaced(word: str) -> str:
    """The letters of a word, one token each: "c a t"."""
    return " ".join(word)


def joined(word: str) -> str:
    """The word written letter by letter, with a token boundary after each letter."""
    return BOUNDARY.join(word)


def ask(rng: random.Random, phrasings: Sequence[str], **values: object) -> str:
    """One of the phrasings with the values filled in, now and then typed carelessly or politely."""
    text = rng.choice(phrasings).format(**values)
    if "\n" in text:
        return text
    draw = rng.random()
    if draw < 0.10:
        return text[0].lower() + text[1:]
    if draw < 0.18:
        return text.rstrip("?.")
    if draw < 0.22:
        return text[0].lower() + text[1:].rstrip("?.")
    if draw < 0.27:
        return (
            rng.choice(("Please: ", "Hi! ", "Hello. ", "Quick question: ", "Hey, ", "Question: ", "OK. ", "Next: "))
            + text
        )
    if draw < 0.30:
        return text + rng.choice(
            (" Please.", " Thanks!", " Thank you.", " Show your work.", " Explain.", " Step by step.")
        )
    return text
