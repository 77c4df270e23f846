"""Weekdays, months and dates: counting forward and backward, days between dates, lengths of months, leap years."""

from __future__ import annotations

import calendar
import datetime
import random

from strata.train.tasks.arithmetic import division_held_out
from strata.train.tasks.example import Example, Task, ask, is_held_out

DAYS = tuple(calendar.day_name)
MONTHS = tuple(calendar.month_name)[1:]

DAY_AFTER = (
    "If today is {day}, what day is it in {n} days?",
    "Today is {day}. What day will it be in {n} days?",
    "What day comes {n} days after {day}?",
    "Which weekday is {n} days after {day}?",
    "What day is {n} days after {day}?",
    "It is {day}. Which day is it {n} days later?",
)
DAY_BEFORE = (
    "What day comes {n} days before {day}?",
    "Which weekday is {n} days before {day}?",
    "Today is {day}. What day was it {n} days ago?",
    "If today is {day}, what day was it {n} days ago?",
)
MONTH_AFTER = (
    "What month comes {n} months after {month}?",
    "Which month is {n} months after {month}?",
    "It is {month}. What month will it be in {n} months?",
    "If it is {month} now, what month is it in {n} months?",
)
MONTH_BEFORE = (
    "What month comes {n} months before {month}?",
    "Which month is {n} months before {month}?",
    "It is {month}. What month was it {n} months ago?",
)
NEXT_DATE = (
    "What date comes after {date}?",
    "What is the day after {date}?",
    "Which date follows {date}?",
    "Today is {date}. What is the date tomorrow?",
    "What date is it one day after {date}?",
)
MONTH_LENGTH = (
    "How many days are in {month}?",
    "How many days does {month} have?",
    "How long is {month} in days?",
    "What is the number of days in {month}?",
)
LEAP = (
    "Is {year} a leap year?",
    "Was {year} a leap year?",
    "Tell me if {year} is a leap year.",
    "Does {year} have a February 29?",
)
BETWEEN = (
    "How many days are there from {first} to {second}?",
    "How many days are between {first} and {second}?",
    "Count the days from {first} to {second}.",
    "How many days after {first} is {second}?",
)


def weekday(rng: random.Random) -> Example:
    """A weekday some days away, by counting what remains after whole weeks."""
    start, n = rng.randrange(7), rng.randrange(1, 31)
    forward = rng.random() < 0.65
    weeks, rest = divmod(n, 7)
    steps = [DAYS[(start + (i if forward else -i)) % 7] for i in range(1, rest + 1)]
    answer = steps[-1] if steps else DAYS[start]
    lines = [f"{n} = {weeks} × 7 + {rest}"] if weeks else []
    lines.append(", ".join(f"{i} {day}" for i, day in enumerate(steps, 1)) if steps else f"the same day, {answer}")
    question = ask(rng, DAY_AFTER if forward else DAY_BEFORE, day=DAYS[start], n=n).replace(" 1 days", " 1 day")
    problem = f"weekday {DAYS[start]} {n if forward else -n}"
    return Example(
        "weekdays", question, "\n".join([*lines, f"Answer: {answer}"]), answer, problem, is_held_out(problem)
    )


def month(rng: random.Random) -> Example:
    """A month some months away, by counting."""
    start, n = rng.randrange(12), rng.randrange(1, 12)
    forward = rng.random() < 0.65
    steps = [MONTHS[(start + (i if forward else -i)) % 12] for i in range(1, n + 1)]
    answer = steps[-1]
    counted = ", ".join(f"{i} {name}" for i, name in enumerate(steps, 1))
    question = ask(rng, MONTH_AFTER if forward else MONTH_BEFORE, month=MONTHS[start], n=n)
    problem = f"month {MONTHS[start]} {n if forward else -n}"
    question = question.replace(" 1 months", " 1 month")
    return Example("months", question, f"{counted}\nAnswer: {answer}", answer, problem, is_held_out(problem))


def leap_steps(year: int) -> str:
    """Why a year is or is not a leap year (Gregorian calendar)."""
    if year % 100 == 0:
        return f"{year} ends in 00, {year // 100} ÷ 4 leaves {year // 100 % 4}"
    return f"{year} ends in {year % 100:02d}, {year % 100} ÷ 4 leaves {year % 4}"


def next_date(rng: random.Random) -> Example:
    """The date that follows, often at the end of a month."""
    date = datetime.date(2023, 1, 1) + datetime.timedelta(rng.randrange(365))
    if rng.random() < 0.4:
        date = date.replace(day=calendar.monthrange(2023, date.month)[1])
    following = date + datetime.timedelta(1)
    days = calendar.monthrange(2023, date.month)[1]
    name = MONTHS[date.month - 1]
    answer = f"{following.day} {MONTHS[following.month - 1]}"
    question = ask(rng, NEXT_DATE, date=rng.choice((f"{date.day} {name}", f"{name} {date.day}")))
    leap = " (29 in a leap year)" if date.month == 2 else ""
    days_text = f"{name} has {days} days{leap}"
    problem = f"next date {date.day} {name}"
    return Example("next date", question, f"{days_text}\nAnswer: {answer}", answer, problem, is_held_out(problem))


def year_fact(rng: random.Random) -> Example:
    """Whether a year is a leap year, or the length of a month. Month lengths are facts and never held out."""
    if rng.random() < 0.25:
        number = rng.randrange(1, 13)
        days = calendar.monthrange(2023, number)[1]
        note = "In a leap year February has 29 days.\n" if number == 2 else ""
        question = ask(rng, MONTH_LENGTH, month=MONTHS[number - 1])
        return Example("leap years", question, f"{note}Answer: {days}", str(days), f"length {number}", False)
    year = rng.randrange(1600, 2400, 100) if rng.random() < 0.15 else rng.randrange(1600, 2400)
    answer = "yes" if calendar.isleap(year) else "no"
    problem = f"leap {year}"
    divided = year // 100 if year % 100 == 0 else year % 100
    reply = f"{leap_steps(year)}\nAnswer: {answer}"
    held_out = is_held_out(problem) or division_held_out(divided, 4)
    return Example("leap years", ask(rng, LEAP, year=year), reply, answer, problem, held_out)


def days_between(rng: random.Random) -> Example:
    """The days from one date to a date at most nine days later, counted along the calendar."""
    first = datetime.date(2023, 1, 1) + datetime.timedelta(rng.randrange(365))
    n = rng.randrange(1, 10)
    dates = [first + datetime.timedelta(i) for i in range(n + 1)]
    names = [f"{date.day} {MONTHS[date.month - 1]}" for date in dates]
    counted = ", ".join(f"{i} {name}" for i, name in enumerate(names[1:], 1))
    question = ask(rng, BETWEEN, first=names[0], second=names[-1])
    problem = f"between {names[0]} {names[-1]}"
    return Example("days between", question, f"{counted}\nAnswer: {n}", str(n), problem, is_held_out(problem))


TASKS = (
    Task("weekdays", 2, weekday),
    Task("months", 1.5, month),
    Task("next date", 1, next_date),
    Task("days between", 1, days_between),
    Task("leap years", 1, year_fact),
)
