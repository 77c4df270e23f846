"""Weekdays, months and dates: counting forward and backward, days between dates, lengths of months, leap years."""

from __future__ import annotations

import calendar
import datetime
import random

from strata.train.tasks.arithmetic import problem_of
from strata.train.tasks.example import Example, Task, ask, is_held_out, worked
from strata.train.tasks.words import texts

TEXTS = texts("dates")
DAYS = tuple(calendar.day_name)
MONTHS = tuple(calendar.month_name)[1:]


def weekday(rng: random.Random) -> Example:
    """A weekday some days away, by counting what remains after whole weeks."""
    start, n = rng.randrange(7), rng.randrange(1, 31)
    forward = rng.random() < 0.65
    weeks, rest = divmod(n, 7)
    steps = [DAYS[(start + (i if forward else -i)) % 7] for i in range(1, rest + 1)]
    answer = steps[-1] if steps else DAYS[start]
    lines = [f"{n} = {weeks} × 7 + {rest}"] if weeks else []
    lines.append(_counted(steps) if steps else f"the same day, {answer}")
    question = ask(rng, TEXTS["day_after" if forward else "day_before"], day=DAYS[start], n=n)
    problem = f"weekday {DAYS[start]} {n if forward else -n}"
    return worked("weekdays", question.replace(" 1 days", " 1 day"), "\n".join(lines), answer, problem)


def month(rng: random.Random) -> Example:
    """A month some months away, by counting."""
    start, n = rng.randrange(12), rng.randrange(1, 12)
    forward = rng.random() < 0.65
    steps = [MONTHS[(start + (i if forward else -i)) % 12] for i in range(1, n + 1)]
    question = ask(rng, TEXTS["month_after" if forward else "month_before"], month=MONTHS[start], n=n)
    problem = f"month {MONTHS[start]} {n if forward else -n}"
    return worked("months", question.replace(" 1 months", " 1 month"), _counted(steps), steps[-1], problem)


def _counted(names: list[str]) -> str:
    return ", ".join(f"{i} {name}" for i, name in enumerate(names, 1))


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
    question = ask(rng, TEXTS["next_date"], date=rng.choice((f"{date.day} {name}", f"{name} {date.day}")))
    leap = " (29 in a leap year)" if date.month == 2 else ""
    days_text = f"{name} has {days} days{leap}"
    problem = f"next date {date.day} {name}"
    return worked("next date", question, days_text, answer, problem)


def year_fact(rng: random.Random) -> Example:
    """Whether a year is a leap year, or the length of a month. Month lengths are facts and never held out."""
    if rng.random() < 0.25:
        number = rng.randrange(1, 13)
        days = calendar.monthrange(2023, number)[1]
        note = "In a leap year February has 29 days." if number == 2 else ""
        question = ask(rng, TEXTS["month_length"], month=MONTHS[number - 1])
        return worked("leap years", question, note, str(days), f"length {number}", held_out=False)
    year = rng.randrange(1600, 2400, 100) if rng.random() < 0.15 else rng.randrange(1600, 2400)
    answer = "yes" if calendar.isleap(year) else "no"
    problem = f"leap {year}"
    divided = year // 100 if year % 100 == 0 else year % 100
    held_out = is_held_out(problem) or problem_of("÷", divided, 4)[1]
    return worked("leap years", ask(rng, TEXTS["leap"], year=year), leap_steps(year), answer, problem, held_out)


def days_between(rng: random.Random) -> Example:
    """The days from one date to a date at most nine days later, counted along the calendar."""
    first = datetime.date(2023, 1, 1) + datetime.timedelta(rng.randrange(365))
    n = rng.randrange(1, 10)
    dates = [first + datetime.timedelta(i) for i in range(n + 1)]
    names = [f"{date.day} {MONTHS[date.month - 1]}" for date in dates]
    question = ask(rng, TEXTS["between"], first=names[0], second=names[-1])
    problem = f"between {names[0]} {names[-1]}"
    return worked("days between", question, _counted(names[1:]), str(n), problem)


TASKS = (
    Task("weekdays", 2, weekday),
    Task("months", 1.5, month),
    Task("next date", 1, next_date),
    Task("days between", 1, days_between),
    Task("leap years", 1, year_fact),
)
