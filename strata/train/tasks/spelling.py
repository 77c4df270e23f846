"""Spelling words, reversing them, and counting their letters.

The three tasks hold out different words: a word whose reversal is held out may be spelled in training, which is how the
model can know the letters of a token, but its reversal is never shown.
"""

from __future__ import annotations

import random

from strata.train.tasks.example import HELD_OUT_PERCENT, Example, Task, ask, bucket, joined, spaced, worked
from strata.train.tasks.words import LETTERS, any_word, texts

TEXTS = texts("spelling")
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
    question = ask(rng, TEXTS["spell"], word=word, quoted=_quoted(rng, word))
    return worked("spelling", question, "", spaced(word), f"spell {word.lower()}", word_held_out("spell", word))


def reversal(rng: random.Random) -> Example:
    """A word backwards, by way of its letters."""
    word = _word(rng)
    question = ask(rng, TEXTS["reverse"], word=word, quoted=_quoted(rng, word))
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
        question = ask(rng, TEXTS["count_all"], **values)
    else:
        wanted = rng.choice(word.lower()) if rng.random() < 0.85 else rng.choice(LETTERS)
        steps, count = [], 0
        for letter in word:
            count += letter.lower() == wanted
            steps.append(f"{letter} {count}")
        answer = str(count)
        question = ask(rng, TEXTS["count_one"], letter=wanted, **values)
    problem, held_out = f"count {word.lower()}", word_held_out("count", word)
    return worked("counting letters", question, ", ".join(steps), answer, problem, held_out)


TASKS = (Task("spelling", 7, spelling), Task("word reversal", 10, reversal), Task("counting letters", 6, counting))
