"""Short templated stories: telling one, and answering questions about one."""

from __future__ import annotations

import random

from strata.train.tasks.arithmetic import addition_steps, problem_of, subtraction_steps
from strata.train.tasks.example import Example, Task, ask, worked
from strata.train.tasks.words import ANIMALS, FOODS, NAMES, PLACES_WORDS, THINGS, texts

TEXTS = texts("stories")
_PARTS = [TEXTS[name] for name in ("openings", "middles", "troubles", "endings")]


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def telling(rng: random.Random) -> Example:
    """A four-sentence story about an animal and a thing. Open, not scored."""
    hero, other = rng.sample(ANIMALS, 2)
    values = {"hero": hero, "other": other, "thing": rng.choice(THINGS), "place": rng.choice(PLACES_WORDS)}
    values |= {"name": rng.choice(NAMES), "mood": rng.choice(TEXTS["moods"]), "food": rng.choice(FOODS)}
    values |= {f"a_{key}": with_article(values[key]) for key in ("hero", "other", "thing")}
    values["A_other"] = values["a_other"].capitalize()
    question = ask(rng, TEXTS["tell"], **values)
    parts = [rng.choice(part).format(**values) for part in _PARTS]
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
        sentences.append(rng.choice(TEXTS["is"]).format(person, at[person]))
    holder = rng.choice(people)
    sentences.append(rng.choice(TEXTS["takes"]).format(holder, thing))
    movers = 0 if rng.random() < 1 / 3 else rng.randrange(1, len(people) + 1)
    for person in rng.sample(people, movers):
        at[person] = rng.choice(places)
        sentences.append(rng.choice(TEXTS["goes"]).format(person, at[person]))
    story = " ".join(sentences)
    if rng.random() < 0.5:
        person = rng.choice(people)
        question, answer = f"Where is {person}?", at[person]
        steps = f"{person} is in the {answer}."
    else:
        question, answer = f"Where is the {thing}?", at[holder]
        steps = f"{holder} has the {thing}. {holder} is in the {answer}."
    text = f"{story} {question}"
    return worked("story places", text, steps, answer, f"where {text}")


def how_many(rng: random.Random) -> Example:
    """Someone gets or gives away things. The problem is the sum or difference behind the story."""
    first, second = rng.sample(NAMES, 2)
    things = rng.choice(TEXTS["things"])
    a, b = rng.randrange(2, 100), rng.randrange(2, 100)
    sign = "+" if rng.random() < 0.5 else "-"
    if sign == "+":
        story = rng.choice(TEXTS["gains"])
        question = rng.choice(TEXTS["gained_in_all"])
        if not story.startswith("There"):
            question = rng.choice(TEXTS["gained"])
        answer, steps = str(a + b), addition_steps(a, b)
    else:
        a, b = max(a, b), min(a, b)
        story = rng.choice(TEXTS["losses"])
        question = "How many {things} are left?"
        answer, steps = str(a - b), subtraction_steps(a, b)
    text = f"{story} {question}".format(first=first, second=second, things=things, a=a, b=b)
    return worked("story sums", text, f"{a} {sign} {b}\n{steps}", answer, *problem_of(sign, a, b))


TASKS = (Task("telling stories", 1.5, telling), Task("story places", 5, where_is), Task("story sums", 3, how_many))
