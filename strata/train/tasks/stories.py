"""Short templated stories: telling one, and answering questions about one."""

from __future__ import annotations

import random

from strata.train.tasks.arithmetic import (
    addition_held_out,
    addition_problem,
    addition_steps,
    subtraction_held_out,
    subtraction_problem,
    subtraction_steps,
)
from strata.train.tasks.example import Example, Task, ask, is_held_out
from strata.train.tasks.words import ANIMALS, FOODS, NAMES, PLACES_WORDS, THINGS, listed

TELL = (
    "Tell me a story about {a_hero}.",
    "Tell me a short story about {a_hero}.",
    "Write a story about {a_hero}.",
    "Write a short story about {a_hero} and {a_thing}.",
    "Tell a story about {a_hero} who finds {a_thing}.",
    "Can you tell me a story about {a_hero} and {a_thing}?",
    "I want a story about {a_hero}.",
    "Make up a story about {a_hero} with {a_thing}.",
)
OPENINGS = (
    "Once upon a time there was a {mood} {hero} named {name}.",
    "{name} was a {mood} {hero} who lived near the {place}.",
    "In a small house by the {place} lived a {mood} {hero} called {name}.",
    "Long ago a {mood} {hero} named {name} lived by the {place}.",
)
MIDDLES = (
    "One morning {name} went to the {place} and found a {thing} under a tree.",
    "One day {name} walked to the {place} and saw an old {thing} in the grass.",
    "On a rainy day {name} looked behind the {place} and found a little {thing}.",
)
TROUBLES = (
    "But the {thing} was not alone: {a_other} sat on it and cried.",
    'Just then {a_other} came and said, "That {thing} is mine, but I am too tired to carry it."',
    '{A_other} came by and asked, "May I play with your {thing}?"',
)
ENDINGS = (
    "{name} helped the {other}, and from that day on they were best friends.",
    "So {name} shared some {food} with the {other}, and they both laughed until the sun went down.",
    '"Let us use it together," said {name}. They ate {food} and were happy.',
)
MOODS = listed("brave clever curious gentle happy kind lazy little lonely patient proud quiet shy young")


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def telling(rng: random.Random) -> Example:
    """A four-sentence story about an animal and a thing. Open, not scored."""
    hero, other = rng.sample(ANIMALS, 2)
    values = {"hero": hero, "other": other, "thing": rng.choice(THINGS), "place": rng.choice(PLACES_WORDS)}
    values |= {"name": rng.choice(NAMES), "mood": rng.choice(MOODS), "food": rng.choice(FOODS)}
    values |= {f"a_{key}": with_article(values[key]) for key in ("hero", "other", "thing")}
    values["A_other"] = values["a_other"].capitalize()
    question = ask(rng, TELL, **values)
    parts = [rng.choice(part).format(**values) for part in (OPENINGS, MIDDLES, TROUBLES, ENDINGS)]
    return Example("telling stories", question, " ".join(parts), None, f"story {hero} {values['thing']}", False)


def where_is(rng: random.Random) -> Example:
    """People walk about with a thing; the question asks where someone or something is.

    In a third of the stories nobody moves on: whose place is whose is learned from those first.
    """
    people, places = rng.sample(NAMES, rng.randrange(2, 4)), rng.sample(PLACES_WORDS, 5)
    thing = rng.choice(THINGS)
    at: dict[str, str] = {}
    sentences = []
    for person in people:
        at[person] = rng.choice(places)
        sentences.append(
            rng.choice(("{} is in the {}.", "{} went to the {}.", "{} walks to the {}.")).format(person, at[person])
        )
    holder = rng.choice(people)
    sentences.append(rng.choice(("{} takes the {}.", "{} picks up the {}.", "{} has the {}.")).format(holder, thing))
    movers = 0 if rng.random() < 1 / 3 else rng.randrange(1, len(people) + 1)
    for person in rng.sample(people, movers):
        at[person] = rng.choice(places)
        sentences.append(
            rng.choice(("Then {} goes to the {}.", "{} moves to the {}.", "Later {} went to the {}.")).format(
                person, at[person]
            )
        )
    story = " ".join(sentences)
    if rng.random() < 0.5:
        person = rng.choice(people)
        question, answer = f"Where is {person}?", at[person]
        reply = f"{person} is in the {answer}.\nAnswer: {answer}"
    else:
        question, answer = f"Where is the {thing}?", at[holder]
        reply = f"{holder} has the {thing}. {holder} is in the {answer}.\nAnswer: {answer}"
    problem = f"where {story} {question}"
    return Example("story places", f"{story} {question}", reply, answer, problem, is_held_out(problem))


def how_many(rng: random.Random) -> Example:
    """Someone gets or gives away things. The problem is the sum or difference behind the story."""
    first, second = rng.sample(NAMES, 2)
    things = rng.choice(
        listed("apples balls books cards coins cookies eggs keys marbles pencils shells stamps stones tickets")
    )
    a, b = rng.randrange(2, 100), rng.randrange(2, 100)
    if rng.random() < 0.5:
        story = rng.choice((
            "{first} has {a} {things}. {second} gives {first} {b} more.",
            "{first} had {a} {things} and found {b} more.",
            "There are {a} {things} on the table. {first} brings {b} more {things}.",
            "{first} bought {a} {things} on Monday and {b} {things} on Tuesday.",
        ))  # fmt: skip
        question = rng.choice(("How many {things} are there now?", "How many {things} is that in all?"))
        if not story.startswith("There"):
            question = rng.choice(("How many {things} does {first} have now?", "How many {things} does {first} have?"))
        answer, steps = str(a + b), addition_steps(a, b)
        problem, held_out = addition_problem(a, b), addition_held_out(a, b)
        line = f"{a} + {b}"
    else:
        a, b = max(a, b), min(a, b)
        story = rng.choice((
            "{first} has {a} {things} and gives {b} of them to {second}.",
            "{first} had {a} {things}. {second} took {b}.",
            "{first} had {a} {things} and lost {b} of them.",
            "There were {a} {things} in the box. {first} took out {b}.",
        ))  # fmt: skip
        question = "How many {things} are left?"
        answer, steps = str(a - b), subtraction_steps(a, b)
        problem, held_out = subtraction_problem(a, b), subtraction_held_out(a, b)
        line = f"{a} - {b}"
    text = f"{story} {question}".format(first=first, second=second, things=things, a=a, b=b)
    return Example("story sums", text, f"{line}\n{steps}\nAnswer: {answer}", answer, problem, held_out)


TASKS = (Task("telling stories", 1.5, telling), Task("story places", 5, where_is), Task("story sums", 3, how_many))
