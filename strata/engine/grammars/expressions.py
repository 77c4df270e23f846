"""Context-free grammars over characters: a rule is an expression of characters, sequences, choices and repetitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # halves of characters, which no text has


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Characters:
    """One character, of these code points: inclusive ranges in order, none next to another. Of no ranges, nothing."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class CallRule:
    """What the rule of this name takes."""

    name: str


@dataclass(frozen=True, eq=False)
class SequenceRule:
    """One after another; of no parts, the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class ChoiceRule:
    """One of several; of none, nothing."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """At least so many times, and at most, None for without end."""

    part: Expression
    least: int
    most: int | None


Expression = Characters | CallRule | SequenceRule | ChoiceRule | Repeat
Rules = Mapping[str, Expression]

EMPTY = SequenceRule(())


def characters(ranges: Iterable[tuple[int, int]], negated: bool = False) -> Characters:
    """The code points of ranges in any order, or all others."""
    if negated:
        return Characters(tuple(_without(_joined([*ranges, SURROGATES]))))
    return Characters(tuple(part for one in _joined(ranges) for part in _cut(one)))


def inner(expression: Expression) -> tuple[Expression, ...]:
    """The expressions that this one is made of."""
    match expression:
        case SequenceRule(parts) | ChoiceRule(parts):
            return parts
        case Repeat(part):
            return (part,)
    return ()


def called(expression: Expression) -> set[str]:
    """The rules that an expression names."""
    names, ahead = set(), [expression]
    while ahead:
        one = ahead.pop()
        if isinstance(one, CallRule):
            names.add(one.name)
        ahead.extend(inner(one))
    return names


def satisfiable(rules: Rules, root: str) -> dict[str, Expression] | None:
    """The rules that an output may need, without what no text ever completes; None if nothing satisfies `root`."""
    callers = callers_of(rules)
    completed: set[str] = set()
    ahead = list(rules)
    while ahead:
        name = ahead.pop()
        if name not in completed and _pruned(rules[name], completed) is not None:
            completed.add(name)
            ahead.extend(callers[name])
    return reached(root, lambda name: _pruned(rules[name], completed)) or None


def callers_of(rules: Rules) -> Mapping[str, list[str]]:
    """Of each rule those that name it."""
    callers = defaultdict(list)
    for name, expression in rules.items():
        for other in called(expression):
            callers[other].append(name)
    return callers


def reached(root: str, made: Callable[[str], Expression | None]) -> dict[str, Expression]:
    """The rules that an output may need, as they are made; of which nothing is made, those are left out."""
    kept: dict[str, Expression] = {}
    needed = [root]
    while needed:
        name = needed.pop()
        if name not in kept and (expression := made(name)) is not None:
            kept[name] = expression
            needed.extend(sorted(called(expression)))
    return kept


def without_outer_calls(rules: Rules) -> dict[str, Expression]:
    """The rules, with repetitions where one calls itself at its beginning or end.

    `list ::= item "," list | item` is `(item ",")* item`, and `sum ::= sum "+" sum | term` is `term ("+" term)*`: a
    parser does not like calls that all wait for the last, and less so a text that can be read in many ways.
    """
    return {name: _repeated(name, expression) for name, expression in rules.items()}


def _repeated(name: str, expression: Expression) -> Expression:
    """Of `a ::= before a | a behind | a between a | once` the language of `one (between one)*`, where `one` is
    `before* once behind*`; what these call inside may be the rule itself."""
    if name not in called(expression):
        return expression
    at_end, others = _split(name, expression, -1)
    between, before = (None, None) if at_end is None else _split(name, at_end, 0)
    behind, once = (None, None) if others is None else _split(name, others, 0)
    if once is None:
        return expression
    any_before, any_behind = (EMPTY if part is None else Repeat(part, 0, None) for part in (before, behind))
    one = SequenceRule(tuple(part for part in (any_before, once, any_behind) if part is not EMPTY))
    if between is None:
        return one
    return (
        Repeat(one, 1, None) if between is EMPTY else SequenceRule((one, Repeat(SequenceRule((between, one)), 0, None)))
    )


def _split(name: str, expression: Expression, end: int) -> tuple[Expression | None, Expression | None]:
    """What comes before a call of `name` at the end of an expression (or after one at its beginning: `end` 0), and what
    there is without that call; None for none.
    """
    match expression:
        case CallRule(called_name) if called_name == name:
            return EMPTY, None
        case ChoiceRule(options):
            splits = [_split(name, option, end) for option in options]
            recalling = tuple(one for one, _ in splits if one is not None)
            others = tuple(one for _, one in splits if one is not None)
            return _either(recalling), _either(others)
        case Repeat(part, 0, 1):
            return _split(name, ChoiceRule((part, EMPTY)), end)
        case SequenceRule(parts) if parts:
            rest = parts[:-1] if end else parts[1:]
            again, once = _split(name, parts[end], end)
            return _with(rest, again, end), _with(rest, once, end)
    return None, expression


def _either(options: tuple[Expression, ...]) -> Expression | None:
    return ChoiceRule(options) if len(options) > 1 else options[0] if options else None


def _with(rest: tuple[Expression, ...], last: Expression | None, end: int) -> Expression | None:
    if last is None:
        return None
    parts = tuple(part for part in ((*rest, last) if end else (last, *rest)) if part is not EMPTY)
    return parts[0] if len(parts) == 1 else SequenceRule(parts) if parts else EMPTY


def _pruned(expression: Expression, completed: set[str]) -> Expression | None:
    """An expression without the options that call rules that are not `completed`; None if nothing is left."""
    match expression:
        case Characters(ranges):
            return expression if ranges else None
        case CallRule(name):
            return expression if name in completed else None
        case SequenceRule(parts):
            pruned = [_pruned(part, completed) for part in parts]
            found = tuple(part for part in pruned if part is not None)
            return SequenceRule(found) if len(found) == len(parts) else None
        case ChoiceRule(options):
            left = [_pruned(option, completed) for option in options]
            found = tuple(option for option in left if option is not None)
            return (found[0] if len(found) == 1 else ChoiceRule(found)) if found else None
        case Repeat(part, least, most):
            inside = None if most == 0 else _pruned(part, completed)
            if inside is None:
                return None if least else EMPTY
            return inside if (least, most) == (1, 1) else Repeat(inside, least, most)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined


def _without(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    place = 0
    for low, high in ranges:
        if place < low:
            yield place, low - 1
        place = high + 1
    if place <= LAST_CHARACTER:
        yield place, LAST_CHARACTER


def _cut(one: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """A range without surrogates."""
    low, high = one
    first, last = SURROGATES
    for begin, end in ((low, min(high, first - 1)), (max(low, last + 1), high)):
        if begin <= end:
            yield begin, end
