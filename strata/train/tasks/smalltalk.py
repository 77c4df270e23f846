"""Greetings, what the model is, and an honest answer to questions outside what it was taught."""

from __future__ import annotations

import random

from strata.train.tasks.example import Example, Task, ask
from strata.train.tasks.tables import TEXTS as TABLES
from strata.train.tasks.words import ANIMALS, FOODS, NAMES, THINGS, texts

TEXTS = texts("smalltalk")
ABILITIES = (
    "I can add, subtract, multiply and divide small numbers, compare and sort numbers, spell, reverse and count "
    "letters of words, convert units, answer questions about dates, small tables and short stories, tell "
    "a very short story, and call tools that I am offered."
)
IDENTITY = (
    "I am the small built-in model of Strata. I have a few million parameters and was trained from scratch by Strata "
    "on generated exercises. " + ABILITIES + " I do not know facts about the world."
)
UNKNOWN = "I do not know that. I am a very small model that learned only generated exercises. " + ABILITIES


def small_talk(rng: random.Random) -> Example:
    """A fixed exchange. Open, not scored."""
    talk = rng.choice(TEXTS["fixed"])
    question = rng.choice(talk["questions"])
    if rng.random() < 0.2:
        question = question.lower()
    reply = rng.choice(talk["replies"]).format(abilities=ABILITIES, identity=IDENTITY)
    return Example("small talk", question, reply, None, f"talk {question}", False)


def outside(rng: random.Random) -> Example:
    """A question about the world, to which the honest reply is that the model does not know. Not scored."""
    question = ask(
        rng,
        TEXTS["outside"],
        place=rng.choice(TEXTS["countries"]),
        city=rng.choice(TABLES["cities"]),
        name=rng.choice(NAMES),
        thing=rng.choice(THINGS),
        topic=rng.choice(TEXTS["topics"]),
        food=rng.choice(FOODS),
        animal=rng.choice(ANIMALS),
        year=rng.randrange(1500, 2025),
    )
    return Example("outside questions", question, UNKNOWN, None, f"outside {question}", False)


TASKS = (Task("small talk", 1.2, small_talk), Task("outside questions", 1.0, outside))
