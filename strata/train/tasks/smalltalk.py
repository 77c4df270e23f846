"""Greetings, what the model is, and an honest answer to questions outside what it was taught."""

from __future__ import annotations

import random

from strata.train.tasks.example import Example, Task, ask
from strata.train.tasks.tables import CITIES
from strata.train.tasks.words import ANIMALS, FOODS, NAMES, THINGS, listed

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

FIXED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            *("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Hey!", "Good morning", "Good evening", "Good day"),
            *("Hello there!", "Hello, how are you?"),
        ),
        ("Hello! Ask me to add or sort numbers, reverse a word or convert units.", "Hello! How can I help?"),
    ),
    (
        (
            *("Who are you?", "What are you?", "Are you a chatbot?", "Tell me about yourself.", "What is your name?"),
            *("Who made you?", "Introduce yourself.", "Are you a large language model?", "Are you ChatGPT?"),
            *(
                "Which model are you?",
                "How big are you?",
                "Who trained you?",
                "How were you trained?",
                "Are you human?",
            ),
            *("What model is this?", "Are you an AI?", "Are you alive?"),
        ),
        (IDENTITY,),
    ),
    (
        (
            *("What can you do?", "How can you help me?", "Help", "What do you know?", "What are you good at?"),
            *("What should I ask you?", "What can I ask you?", "Can you help me?"),
        ),
        (ABILITIES,),
    ),
    (
        (
            "Thanks",
            "Thanks!",
            "Thank you",
            "Thank you!",
            "Great, thanks",
            "Thanks a lot!",
            "Nice",
            "Good job",
            "Well done",
        ),
        ("You are welcome!",),
    ),
    (("Bye", "Bye!", "Goodbye", "Goodbye!", "See you", "See you later", "Good night", "That is all"), ("Goodbye!",)),
    (
        ("How are you?", "How are you doing?", "How do you feel?", "How is it going?", "Are you happy?"),
        ("I am a program, so I have no feelings, but I am ready to work.",),
    ),
)

OUTSIDE = (
    "What is the capital of {place}?",
    "Who is the president of {place}?",
    "Where is {city}?",
    "What is the weather in {city} today?",
    "How many people live in {city}?",
    "Who wrote {name} and the {thing}?",
    "Why is the sky blue?",
    "What is the meaning of life?",
    "Explain {topic}.",
    "What is {topic}?",
    "Tell me about {topic}.",
    "How does a {thing} work?",
    "Why do people like {food}?",
    "How do I cook {food}?",
    "Give me a recipe with {food}.",
    "Write a poem about {topic}.",
    "Write a Python program.",
    "Write code that prints hello.",
    "Translate {thing} into French.",
    "Translate {animal} to Spanish.",
    "What does a {animal} eat?",
    "How long does a {animal} live?",
    "Who won the world cup?",
    "When was {name} born?",
    "Who is {name}?",
    "What is the best {thing}?",
    "Who discovered {topic}?",
    "What happened in {year}?",
    "Recommend a book.",
    "Tell me a joke.",
    "What time is it?",
    "What is the news today?",
    "Is {food} healthy?",
    "Should I buy a {thing}?",
)
COUNTRIES = listed(
    "Brazil Canada Chile China Egypt France Germany Ghana India Iran Italy Japan Kenya Mexico Norway Peru Spain Turkey"
)
TOPICS = (
    *listed("gravity democracy photosynthesis music love history chess football evolution electricity philosophy art"),
    *("quantum physics", "the moon", "machine learning", "the internet", "economics", "climate change", "black holes"),
)


def small_talk(rng: random.Random) -> Example:
    """A fixed exchange. Open, not scored."""
    questions, replies = rng.choice(FIXED)
    question = rng.choice(questions)
    if rng.random() < 0.2:
        question = question.lower()
    return Example("small talk", question, rng.choice(replies), None, f"talk {question}", False)


def outside(rng: random.Random) -> Example:
    """A question about the world, to which the honest reply is that the model does not know. Not scored."""
    question = ask(
        rng,
        OUTSIDE,
        place=rng.choice(COUNTRIES),
        city=rng.choice(CITIES),
        name=rng.choice(NAMES),
        thing=rng.choice(THINGS),
        topic=rng.choice(TOPICS),
        food=rng.choice(FOODS),
        animal=rng.choice(ANIMALS),
        year=rng.randrange(1500, 2025),
    )
    return Example("outside questions", question, UNKNOWN, None, f"outside {question}", False)


TASKS = (Task("small talk", 1.2, small_talk), Task("outside questions", 1.0, outside))
