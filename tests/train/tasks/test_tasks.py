"""The exercises are right, and no held-out problem is in any training text."""

from __future__ import annotations

import calendar
import datetime
import random
import re
from collections import defaultdict
from fractions import Fraction

import pytest

from strata.train.score import extract_answer
from strata.train.tasks import arithmetic, dates, spelling
from strata.train.tasks.example import HELD_OUT_PERCENT, Example, bucket
from strata.train.tasks.mixture import TASKS, TOOL_TASKS, document, held_out_examples, training_example
from strata.train.tasks.words import SPELLABLE

SAMPLES = 20_000


@pytest.fixture(scope="module")
def training() -> list[Example]:
    return [example for i in range(SAMPLES * 3 // 4) for example in document(0, i).examples]


@pytest.fixture(scope="module")
def by_task() -> dict[str, list[Example]]:
    """Examples of every task, held out or not."""
    found = defaultdict(list)
    for task in TASKS:
        rng = random.Random(task.name)
        found[task.name] = [task.sample(rng) for _ in range(400)]
    return found


def integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def test_document_depends_on_seed_and_index_alone() -> None:
    assert document(5, 17) == document(5, 17)
    assert len({document(seed, index).examples[0].question for seed in range(3) for index in range(5)}) > 12


def test_training_has_no_held_out_problem(training: list[Example]) -> None:
    assert len(training) > SAMPLES * 0.9
    tasks = (*TASKS, *TOOL_TASKS)
    held_out = {example.problem for task in tasks for example in held_out_examples(task, 60)}
    assert len(held_out) > 1000
    assert not any(example.held_out for example in training)
    assert not held_out & {example.problem for example in training}


def test_no_training_text_states_a_held_out_calculation(training: list[Example]) -> None:
    """Read from the texts themselves, so that worked steps and stories count as well."""
    checks = {"+": arithmetic.addition_held_out, "-": arithmetic.subtraction_held_out}
    checks |= dict.fromkeys("×*", arithmetic.multiplication_held_out)
    checks |= dict.fromkeys("÷/", arithmetic.division_held_out)
    stated = 0
    for example in training:
        for text in (example.question, *example.written):
            for a, sign, b in re.findall(r"(?<![\d.])(\d+) ?([-+×÷*/]) ?(\d+)(?![\d.])", text):
                stated += 1
                assert not checks[sign](int(a), int(b)), (example.question, example.written)
    assert stated > 10_000


def test_held_out_does_not_depend_on_phrasing_or_order() -> None:
    rng = random.Random(0)
    for task in TASKS:
        seen: dict[str, bool] = {}
        for _ in range(300):
            example = task.sample(rng)
            if not example.task.startswith("unit") and "years" not in example.task:
                assert seen.setdefault(example.problem, example.held_out) == example.held_out
    assert arithmetic.addition_problem(47, 38) == arithmetic.addition_problem(38, 47)
    assert spelling.word_held_out("reverse", "Planet") == spelling.word_held_out("reverse", "planet")


def test_held_out_share_of_whole_spaces() -> None:
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    share = sum(arithmetic.addition_held_out(a, b) for a, b in pairs) / len(pairs)
    assert 0.05 < share < 0.11
    share = sum(arithmetic.subtraction_held_out(b, a) for a, b in pairs) / len(pairs)
    assert 0.05 < share < 0.11
    # Facts that worked steps consist of are never held out.
    assert not any(arithmetic.addition_held_out(a, b) for a in range(10) for b in range(1000))
    assert not any(arithmetic.division_held_out(a, b) for b in range(2, 10) for a in range(10 * b))
    words = [sum(spelling.word_held_out(task, word) for word in SPELLABLE) for task in ("reverse", "spell", "count")]
    assert all(0.04 < count / len(SPELLABLE) < 0.13 for count in words)
    assert all(
        sum(spelling.word_held_out(task, word) for task in ("reverse", "spell", "count")) <= 1 for word in SPELLABLE
    )


def test_small_space_is_exhausted_without_a_held_out_problem() -> None:
    """Every month question can be drawn, and training refuses exactly those whose hash says so."""
    sample = next(task.sample for task in TASKS if task.name == "months")
    rng = random.Random(1)
    drawn = {(example.problem, example.held_out) for example in (sample(rng) for _ in range(20_000))}
    problems = {f"month {month} {sign * n}" for month in dates.MONTHS for n in range(1, 12) for sign in (1, -1)}
    assert {problem for problem, _ in drawn} == problems
    assert {problem for problem, held_out in drawn if held_out} == {
        problem for problem in problems if bucket(problem) < HELD_OUT_PERCENT
    }


def test_every_reply_ends_in_its_answer(by_task: dict[str, list[Example]]) -> None:
    for examples in by_task.values():
        for example in examples:
            if example.answer is not None:
                assert extract_answer(example.messages[1]["content"]) == example.answer


@pytest.mark.parametrize(
    ("task", "compute"),
    [
        ("two-digit addition", lambda a, b: str(a + b)),
        ("longer addition", lambda a, b: str(a + b)),
        ("multiplication", lambda a, b: str(a * b)),
    ],
)
def test_commutative_arithmetic(by_task: dict[str, list[Example]], task: str, compute) -> None:  # type: ignore[no-untyped-def]
    for example in by_task[task]:
        assert example.answer == compute(*integers(example.question))


def test_subtraction(by_task: dict[str, list[Example]]) -> None:
    for example in by_task["two-digit subtraction"] + by_task["longer subtraction"]:
        a, b = integers(example.question)
        backwards = re.search(r"[Ss]ubtract|[Tt]ake", example.question)
        assert example.answer == str(b - a if backwards else a - b)


def test_division(by_task: dict[str, list[Example]]) -> None:
    for example in by_task["division"]:
        a, b = integers(example.question)
        if "go into" in example.question:
            a, b = b, a
        rest = f" remainder {a % b}" if a % b else ""
        assert example.answer == f"{a // b}{rest}"


def test_every_stated_equation_holds(by_task: dict[str, list[Example]]) -> None:
    """Each "expression = number" in the worked steps, evaluated here."""
    checked = 0
    for examples in by_task.values():
        for example in examples:
            for left, right in re.findall(r"((?:-?\d+ [-+×] )+-?\d+) = (-?\d+)(?! ?[\d×÷])", example.reply):
                assert _evaluate(left) == int(right), example.reply
                checked += 1
            for a, b, quotient, rest in re.findall(r"(\d+) ÷ (\d+) = (\d+) remainder (\d+)", example.reply):
                assert divmod(int(a), int(b)) == (int(quotient), int(rest))
                checked += 1
    assert checked > 3000


def _evaluate(expression: str) -> int:
    parts = expression.split(" ")
    value = int(parts[0])
    for sign, number in zip(parts[1::2], parts[2::2], strict=True):
        value = {"+": value + int(number), "-": value - int(number), "×": value * int(number)}[sign]
    return value


def test_sorting_and_extremes(by_task: dict[str, list[Example]]) -> None:
    for example in by_task["sorting"] + by_task["sorting five numbers"]:
        down = any(word in example.question.lower() for word in ("descending", "largest to", "high to low"))
        assert [int(x) for x in example.answer.split()] == sorted(integers(example.question), reverse=down)
    assert all(len(integers(example.question)) == 5 for example in by_task["sorting five numbers"])
    for example in by_task["largest or smallest"] + by_task["comparison"]:
        small = any(word in example.question.lower() for word in ("small", "less", "low", "min"))
        assert example.answer == str((min if small else max)(integers(example.question)))


def test_words(by_task: dict[str, list[Example]]) -> None:
    for example in by_task["word reversal"]:
        assert example.answer[::-1] in example.question
        assert example.messages[1]["content"].endswith(f"Answer: {example.answer}")
    for example in by_task["spelling"]:
        assert example.answer.replace(" ", "") in example.question
    for example in by_task["counting letters"]:
        word = "".join(re.findall(r"(\w) \d+", example.reply.split("\n")[0]))
        assert word in example.question
        letter = re.search(
            r"letter (\w) |times does (\w) |(?:many|the) (\w)'?s (?:are|in)|often does (\w) ", example.question
        )
        expected = len(word)
        if letter is not None:
            expected = word.lower().count(next(group for group in letter.groups() if group))
        assert int(example.answer) == expected, example.question


# Each unit as a multiple of the base unit of its kind, written down apart from the generator.
SIZES = {"km": 1000, "m": 1, "dm": Fraction(1, 10), "cm": Fraction(1, 100), "mm": Fraction(1, 1000)}
SIZES |= {"t": 1000, "kg": 1, "g": Fraction(1, 1000), "mg": Fraction(1, 1_000_000)}
SIZES |= {"l": 1, "cl": Fraction(1, 100), "ml": Fraction(1, 1000), "ct": Fraction(1, 100)} | {"€": 1}
SIZES |= {"weeks": 604800, "week": 604800, "days": 86400, "day": 86400, "h": 3600, "min": 60, "s": 1}
SIZES |= {
    "years": 12,
    "year": 12,
    "months": 1,
    "month": 1,
    "ft": 12,
    "yd": 36,
    "dozen": 12,
    "pieces": 1,
    "piece": 1,
} | {"in": 1}
NAMES = {
    "kilometre": "km",
    "metre": "m",
    "decimetre": "dm",
    "centimetre": "cm",
    "millimetre": "mm",
    "tonne": "t",
    "kilogram": "kg",
}
NAMES |= {
    "gram": "g",
    "milligram": "mg",
    "litre": "l",
    "centilitre": "cl",
    "millilitre": "ml",
    "euro": "€",
    "cent": "ct",
    "hour": "h",
}
NAMES |= {"minute": "min", "second": "s", "foot": "ft", "inch": "in", "yard": "yd"}


def test_units(by_task: dict[str, list[Example]]) -> None:
    for example in by_task["unit conversion"]:
        _, value, *source, target = example.problem.split(" ")
        number, unit = example.answer.split(" ")
        source_size = SIZES[NAMES.get(source[0], source[0])]
        assert NAMES.get(target, target).rstrip("s") == unit.rstrip("s")
        assert Fraction(value) * source_size == Fraction(number) * SIZES[unit], example
        assert value in example.question


def test_dates(by_task: dict[str, list[Example]]) -> None:
    monday = datetime.date(2024, 1, 1)
    for example in by_task["weekdays"]:
        _, day, n = example.problem.split(" ")
        date = monday + datetime.timedelta(list(calendar.day_name).index(day) + int(n))
        assert example.answer == date.strftime("%A")
        assert str(abs(int(n))) in example.question
    for example in by_task["months"]:
        _, month, n = example.problem.split(" ")
        assert example.answer == calendar.month_name[(list(calendar.month_name).index(month) - 1 + int(n)) % 12 + 1]
    for example in by_task["next date"]:
        date = datetime.datetime.strptime(example.problem + " 2023", "next date %d %B %Y") + datetime.timedelta(1)
        assert example.answer == f"{date.day} {date:%B}"
    for example in by_task["days between"]:
        found = re.findall(r"(\d+) ([A-Z][a-z]+)", example.question)
        first, second = (datetime.datetime.strptime(f"{d} {m} 2023", "%d %B %Y") for d, m in found)
        assert int(example.answer) == (second - first).days % 365
    for example in by_task["leap years"]:
        if example.answer in ("yes", "no"):
            year = integers(example.question)[0]
            assert (example.answer == "yes") == calendar.isleap(year)


def test_tables_and_stories_hold_their_answer(by_task: dict[str, list[Example]]) -> None:
    for task in ("tables", "story places"):
        assert all(example.answer in example.question for example in by_task[task])
    for example in by_task["story sums"]:
        a, b = integers(example.question)
        gone = any(word in example.question for word in ("left", "lost", "took out"))
        assert example.answer == str(a - b if gone else a + b)


def test_held_out_examples_are_distinct_and_repeatable() -> None:
    for task in (*TASKS, *TOOL_TASKS):
        first, second = held_out_examples(task, 20), held_out_examples(task, 20)
        assert first == second
        assert len({example.problem for example in first}) == len(first)
        assert all(example.held_out and example.task == task.name for example in first)
    assert not training_example(random.Random(0)).held_out
