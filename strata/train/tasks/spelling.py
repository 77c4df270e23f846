"""Spelling words, reversing them, and counting their letters.

The three tasks hold out different words: a word whose reversal is held out may be spelled in training, which is how the
model can know the letters of a token, but its reversal is never shown.
"""

from __future__ import annotations

import random

from strata.train.tasks.example import HELD_OUT_PERCENT, Example, Task, ask, bucket, joined, spaced
from strata.train.tasks.words import LETTERS, any_word

SPELL = (
    "Spell {word}.",
    "Spell the word {word}.",
    "Spell {quoted}.",
    "How do you spell {word}?",
    "How is {quoted} spelled?",
    "Spell {word} letter by letter.",
    "What are the letters of {word}?",
    "List the letters of {quoted}.",
    "Can you spell {word}?",
    "Split {word} into letters.",
)
REVERSE = (
    "Spell {word} backwards.",
    "Spell {word} backwards",
    "Spell {quoted} backwards.",
    "Spell the word {word} backwards.",
    "Reverse {word}.",
    "Reverse the word {word}.",
    "Reverse the word {quoted}.",
    "Reverse {quoted}",
    "Reverse: {word}",
    "What is {word} backwards?",
    "What is {quoted} spelled backwards?",
    "Write {word} backwards.",
    "Write the word {quoted} in reverse.",
    "How do you write {word} backwards?",
    "Turn the word {word} around.",
    "Can you reverse {word}?",
    "Can you spell {quoted} backwards?",
    "Reverse the letters of {word}.",
    "Reverse the letters in {quoted}.",
    "What do you get if you reverse {word}?",
    "{word} backwards",
    "{word} in reverse",
)
COUNT_ALL = (
    "How many letters are in {word}?",
    "How many letters are in the word {word}?",
    "How many letters does {quoted} have?",
    "How many letters are there in {quoted}?",
    "Count the letters in {word}.",
    "Count the letters of {quoted}.",
    "How long is the word {word}?",
    "What is the length of the word {quoted}?",
)
COUNT_ONE = (
    "How many times does the letter {letter} appear in {word}?",
    "How many times does {letter} occur in {quoted}?",
    "How many {letter}'s are in {word}?",
    "How many {letter}s are in {word}?",
    "How many {letter}'s are there in the word {quoted}?",
    "Count the letter {letter} in {word}.",
    "Count the {letter}'s in {quoted}.",
    "How often does {letter} appear in the word {word}?",
)

_FIRST_BUCKET = {"reverse": 0, "spell": HELD_OUT_PERCENT, "count": 2 * HELD_OUT_PERCENT}


def word_held_out(task: str, word: str) -> bool:
    """Whether a word is held out of "reverse", "spell" or "count"; at most one of the three holds it out."""
    first = _FIRST_BUCKET[task]
    return first <= bucket(f"word {word.lower()}") < first + HELD_OUT_PERCENT


def _word(rng: random.Random) -> str:
    word = any_word(rng)
    return word.capitalize() if rng.random() < 0.06 else word


def _quoted(rng: random.Random, word: str) -> str:
    return rng.choice(('"{}"', "'{}'", '"{}"')).format(word)


def spelling(rng: random.Random) -> Example:
    """The letters of a word, in order."""
    word = _word(rng)
    question = ask(rng, SPELL, word=word, quoted=_quoted(rng, word))
    answer = spaced(word)
    problem = f"spell {word.lower()}"
    return Example("spelling", question, f"Answer: {answer}", answer, problem, word_held_out("spell", word))


def reversal(rng: random.Random) -> Example:
    """A word backwards, by way of its letters."""
    word = _word(rng)
    question = ask(rng, REVERSE, word=word, quoted=_quoted(rng, word))
    answer = word[::-1]
    reply = f"forwards: {spaced(word)}\nbackwards: {spaced(answer)}\nAnswer: {joined(answer)}"
    return Example("word reversal", question, reply, answer, f"reverse {word.lower()}", word_held_out("reverse", word))


def counting(rng: random.Random) -> Example:
    """All letters of a word, or the occurrences of one, counted along the word."""
    word = _word(rng)
    values = {"word": word, "quoted": _quoted(rng, word)}
    if rng.random() < 0.5:
        steps = [f"{letter} {i}" for i, letter in enumerate(word, 1)]
        answer = str(len(word))
        question = ask(rng, COUNT_ALL, **values)
    else:
        wanted = rng.choice(word.lower()) if rng.random() < 0.85 else rng.choice(LETTERS)
        steps, count = [], 0
        for letter in word:
            count += letter.lower() == wanted
            steps.append(f"{letter} {count}")
        answer = str(count)
        question = ask(rng, COUNT_ONE, letter=wanted, **values)
    reply = f"{', '.join(steps)}\nAnswer: {answer}"
    return Example("counting letters", question, reply, answer, f"count {word.lower()}", word_held_out("count", word))


TASKS = (Task("spelling", 7, spelling), Task("word reversal", 10, reversal), Task("counting letters", 6, counting))
