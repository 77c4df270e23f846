"""The exercises and the calls of tools in them are right, and no held-out problem is in any training text."""

from __future__ import annotations

import calendar
import datetime
import json
import random
import re
from collections import defaultdict
from fractions import Fraction
from typing import Any

import pytest

from strata.serve.replies.reply_parser import ReplyParser, collect
from strata.train.score import extract_answer
from strata.train.tasks import dates, spelling
from strata.train.tasks.arithmetic import problem_of
from strata.train.tasks.example import HELD_OUT_PERCENT, Example, bucket
from strata.train.tasks.mixture import TASKS, TOOL_TASKS, document, held_out_examples, training_example
from strata.train.tasks.smalltalk import UNKNOWN
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
    stated = 0
    for example in training:
        for text in (example.question, *example.written):
            for a, sign, b in re.findall(r"(?<![\d.])(\d+) ?([-+×÷*/]) ?(\d+)(?![\d.])", text):
                stated += 1
                sign = {"*": "×", "/": "÷"}.get(sign, sign)
                assert not problem_of(sign, int(a), int(b))[1], (example.question, example.written)
    assert stated > 10_000


def test_held_out_does_not_depend_on_phrasing_or_order() -> None:
    rng = random.Random(0)
    for task in TASKS:
        seen: dict[str, bool] = {}
        for _ in range(300):
            example = task.sample(rng)
            if not example.task.startswith("unit") and "years" not in example.task:
                assert seen.setdefault(example.problem, example.held_out) == example.held_out
    assert problem_of("+", 47, 38) == problem_of("+", 38, 47)
    assert spelling.word_held_out("reverse", "Planet") == spelling.word_held_out("reverse", "planet")


def test_held_out_share_of_whole_spaces() -> None:
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    for sign in "+-":
        assert 0.05 < sum(problem_of(sign, b, a)[1] for a, b in pairs) / len(pairs) < 0.11
    # Facts that worked steps consist of are never held out.
    assert not any(problem_of("+", a, b)[1] for a in range(10) for b in range(1000))
    assert not any(problem_of("÷", a, b)[1] for b in range(2, 10) for a in range(10 * b))
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
SIZES = {
    unit: Fraction(size)
    for size, units in (line.split(": ") for line in """\
1000: km t
1: m kg l € s months month
1/10: dm
1/100: cm cl ct
1/1000: mm g ml
1/1000000: mg
604800: weeks week
86400: days day
3600: h
60: min
12: years year ft dozen
36: yd
1: in pieces piece""".splitlines())
    for unit in units.split()
}  # fmt: skip
NAMES = {
    "kilometre": "km", "metre": "m", "decimetre": "dm", "centimetre": "cm", "millimetre": "mm", "tonne": "t",
    "kilogram": "kg", "gram": "g", "milligram": "mg", "litre": "l", "centilitre": "cl", "millilitre": "ml",
    "euro": "€", "cent": "ct", "hour": "h", "minute": "min", "second": "s", "foot": "ft", "inch": "in",
    "yard": "yd",
}  # fmt: skip


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


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SIGNS = {"+": "+", "-": "-", "*": "×", "/": "÷"}
WORDS = {"add": "+", "plus": "+", "sum": "+", "subtract": "-", "minus": "-", "difference": "-"}
WORDS |= {"multiply": "×", "times": "×", "product": "×", "divide": "÷", "divided_by": "÷", "quotient": "÷"}


@pytest.fixture(scope="module")
def calls_by_task() -> dict[str, list[Example]]:
    return {
        task.name: [task.sample(rng) for _ in range(400)] for task in TOOL_TASKS if (rng := random.Random(task.name))
    }


@pytest.fixture(scope="module")
def calling(calls_by_task: dict[str, list[Example]]) -> list[Example]:
    return [example for examples in calls_by_task.values() for example in examples if example.call is not None]


def test_every_call_is_one_that_the_parser_reads_and_the_schema_allows(calling: list[Example]) -> None:
    assert len(calling) == 1200
    for example in calling:
        parser = ReplyParser("hermes", reasoning=False)
        reply = collect(parser.append(example.written[0]) + parser.finish())
        assert reply.content == ""
        (made,) = reply.tool_calls
        offered = {tool["name"]: tool["parameters"] for tool in (one.schema["function"] for one in example.tools)}
        assert len(offered) == len(example.tools)
        _check(json.loads(made.arguments), offered[made.name])


def _check(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
    types = {"string": str, "number": (int, float), "integer": int}
    for name, value in arguments.items():
        wanted = schema["properties"][name]
        assert isinstance(value, types[wanted["type"]])
        assert value in wanted.get("enum", [value])


def test_arguments_are_in_the_question(calling: list[Example]) -> None:
    """Or in the tool's own list of values; only the one of "how many are in one" goes without saying."""
    for example in calling:
        assert example.call is not None
        tool = next(tool for tool in example.tools if tool.name == example.call.name)
        choices = {one.name: one.choices for one in tool.arguments}
        for name, value in example.call.arguments:
            if not choices[name]:
                parts = NUMBER.findall(str(value)) if example.task == "calling a calculator" else [str(value)]
                for part in parts:
                    stated = part.removesuffix(".0") if isinstance(value, float) else part
                    assert stated.lower() in example.question.lower(), (example.question, example.call)


def test_replies_hold_the_result_and_end_in_the_answer(calling: list[Example]) -> None:
    for example in calling:
        assert example.call is not None
        assert example.answer is not None
        assert extract_answer(example.reply) == example.answer
        if example.answer == "unknown":
            continue
        told = example.call.result
        for part in re.findall(r"[\w.:-]+", example.answer):
            assert part in told or part in example.question, (told, example.answer)


def test_calculators_give_the_right_result(calls_by_task: dict[str, list[Example]]) -> None:
    beyond = 0
    for example in calls_by_task["calling a calculator"]:
        assert example.call is not None
        values = dict(example.call.arguments)
        written = next((v for v in values.values() if isinstance(v, str) and any(c.isdigit() for c in v)), None)
        if written is not None:
            a, typed, b = written.split(" ")
            sign = SIGNS[typed]
        else:
            a, b = (str(v) for v in values.values() if not isinstance(v, str))
            named = next((v for v in values.values() if isinstance(v, str)), example.call.name)
            sign = SIGNS.get(named) or next(WORDS[word] for word in WORDS if word in named)
        x, y = Fraction(a), Fraction(b)
        right = {"+": x + y, "-": x - y, "×": x * y, "÷": x / y if y else None}[sign]
        assert right is not None
        assert example.answer is not None
        assert abs(Fraction(example.answer) - right) <= (Fraction(1, 10**6) if sign == "÷" else 0)
        assert example.reply.split(" ")[1] == sign
        beyond += max(x, y) >= 10_000 or "." in a + b or (sign in "×÷" and min(x, y) >= 10)
    # Mostly what no exercise teaches to compute, so that the result has to be read.
    assert beyond > 200


def test_backwards_questions_are_calculated_as_they_are_meant(calls_by_task: dict[str, list[Example]]) -> None:
    seen = 0
    for example in calls_by_task["calling a calculator"]:
        found = re.search(r"([Ss]ubtract|[Tt]ake) ([\d.]*\d) (?:away )?from ([\d.]*\d)", example.question)
        if found:
            seen += 1
            assert example.reply.startswith(f"{found[3]} - {found[2]} = ")
    assert seen > 3


def test_names_and_arguments_are_many(calling: list[Example]) -> None:
    tools = [tool for example in calling for tool in example.tools]
    assert len({tool.name for tool in tools}) > 300
    assert len({one.name for tool in tools for one in tool.arguments}) > 50
    assert any(len(example.tools) == 1 for example in calling)
    assert any(len(example.tools) == 4 for example in calling)


def test_tools_of_no_use_are_left_alone(calls_by_task: dict[str, list[Example]]) -> None:
    own = {"+": "add|plus|sum|calc|comput|math|arith|eval|solve", "in": "convert|unit|factor"}
    for example in calls_by_task["tools of no use"]:
        assert example.tools
        assert example.call is None
        names = " ".join(tool.name for tool in example.tools)
        if re.fullmatch(r"\d+ ?\+ ?\d+( =)?", example.question):
            assert not re.search(own["+"], names), (example.question, names)
        if re.match(r"[Cc]onvert ", example.question):
            assert not any(re.search(own["in"], name) and "look" not in name for name in names.split()), names


def test_documents_with_tools_offer_the_same_ones_in_every_turn() -> None:
    documents = [document(0, index) for index in range(3000)]
    with_tools = [one for one in documents if one.tools]
    assert 0.15 < len(with_tools) / len(documents) < 0.25
    examples = [example for one in with_tools for example in one.examples]
    assert all(example.tools == one.tools for one in with_tools for example in one.examples)
    calls = sum(example.call is not None for example in examples) / len(examples)
    assert 0.5 < calls < 0.7
    unknown = sum(example.reply == UNKNOWN for example in examples) / len(examples)
    assert 0.05 < unknown < 0.2
    assert all(example.call is None for one in documents if not one.tools for example in one.examples)
    assert any(len(one.examples) > 1 for one in with_tools)
