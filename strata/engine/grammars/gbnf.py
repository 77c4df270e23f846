"""GBNF, llama.cpp's format of grammars (`root ::= "(" root ")" | [a-z]+`), read and written as llguidance's dialect of
Lark, which takes the same texts."""

from __future__ import annotations

import re

from strata.engine.grammars.expressions import (
    EMPTY,
    LAST_CHARACTER,
    SURROGATES,
    CallRule,
    Characters,
    ChoiceRule,
    Expression,
    Repeat,
    Rules,
    SequenceRule,
    called,
    characters,
    satisfiable,
    without_outer_calls,
)
from strata.engine.grammars.lexemes import inlined, lexemes

ROOT = "root"

_MAX_NESTING = 64
_MAX_TIMES = 10_000  # of a repetition

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_HEAD = re.compile(rf"({_NAME.pattern})[ \t]*::=")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_TIMES = re.compile(r"\{\s*([0-9]{1,9})\s*(?:(,)\s*([0-9]{1,9})?\s*)?\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{mark: mark for mark in '\\"[]-'}}
_OPERATORS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def is_gbnf(text: str) -> bool:
    """Whether some line begins a rule as GBNF has it."""
    return re.search(rf"^[ \t]*{_HEAD.pattern}", text, re.MULTILINE) is not None


def read_gbnf(text: str) -> dict[str, Expression]:
    """The rules of a grammar, one of them `root`. Raises ValueError, which says where the grammar goes wrong."""
    return _Reader(text).rules()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._nesting = 0

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._skip(_BLANK_LINES)
        while self._place < len(self._text):
            head = self._take(_HEAD)
            if head is None:
                raise self._wrong("a rule was expected (name ::= ...)")
            self._skip(_BLANK_LINES)
            rules[head[1]] = self._choice(_BLANK)
            if self._here() not in "\r\n" and not self._at_rule():
                raise self._wrong(f"{self._here()!r} was not expected")
            self._skip(_BLANK_LINES)
        if ROOT not in rules:
            raise ValueError("it has no rule named root")
        for name, expression in rules.items():
            if unknown := sorted(called(expression) - rules.keys()):
                raise ValueError(f"rule {name} names {unknown[0]}, and there is no such rule")
        return rules

    def _choice(self, blank: re.Pattern[str]) -> Expression:
        options = [self._sequence(blank)]
        while self._here() == "|":
            self._place += 1
            self._skip(_BLANK_LINES)
            options.append(self._sequence(blank))
        return ChoiceRule(tuple(options)) if len(options) > 1 else options[0]

    def _sequence(self, blank: re.Pattern[str]) -> Expression:
        parts: list[Expression] = []
        while (part := self._part()) is not None:
            self._skip(blank)
            repeated = 0
            while (times := self._times()) is not None:
                repeated += 1
                if self._nesting + repeated > _MAX_NESTING:
                    raise self._wrong(f"it nests deeper than {_MAX_NESTING} repetitions and parentheses")
                part = Repeat(part, *times)
                self._skip(blank)
            parts.append(part)
        if self._here() and self._here() in "*+?{":
            raise self._wrong(f"there is nothing before {self._here()} that it could repeat")
        return parts[0] if len(parts) == 1 else SequenceRule(tuple(parts))

    def _part(self) -> Expression | None:
        mark = self._here()
        if mark == '"':
            return self._literal()
        if mark == "[":
            return self._class()
        if mark == "(":
            return self._group()
        if mark == ".":
            self._place += 1
            return characters((), negated=True)
        if mark in ("<", "!"):
            raise self._wrong("tokens (<...>) are not taken: write their text as a literal")
        name = None if self._at_rule() else self._take(_NAME)
        return CallRule(name[0]) if name is not None else None

    def _group(self) -> Expression:
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise self._wrong(f"it nests deeper than {_MAX_NESTING} repetitions and parentheses")
        self._place += 1
        self._skip(_BLANK_LINES)
        inside = self._choice(_BLANK_LINES)
        if self._here() != ")":
            raise self._wrong("a ) was expected")
        self._place += 1
        self._nesting -= 1
        return inside

    def _literal(self) -> Expression:
        self._place += 1
        codes = []
        while self._here() != '"':
            codes.append(self._character())
            if SURROGATES[0] <= codes[-1] <= SURROGATES[1]:
                raise self._wrong(f"\\u{codes[-1]:04X} is half a character: write all of it as \\UXXXXXXXX")
        self._place += 1
        if not codes:
            return EMPTY
        parts = tuple(characters([(code, code)]) for code in codes)
        return parts[0] if len(parts) == 1 else SequenceRule(parts)

    def _class(self) -> Characters:
        self._place += 1
        negated = self._here() == "^"
        self._place += negated
        ranges = []
        while self._here() != "]":
            low = high = self._character()
            if self._here() == "-" and not self._text.startswith("]", self._place + 1):
                self._place += 1
                high = self._character()
                if high < low:
                    raise self._wrong("a range of characters ends before it begins")
            ranges.append((low, high))
        if not ranges:
            raise self._wrong("[] has no character")
        self._place += 1
        return characters(ranges, negated)

    def _character(self) -> int:
        mark = self._here()
        if not mark:
            raise self._wrong("it ends within a literal or a class of characters")
        self._place += 1
        if mark != "\\":
            return ord(mark)
        if code := self._take(_CODE):
            number = int(code[code.lastindex or 0], 16)
            if number > LAST_CHARACTER:
                raise self._wrong(f"\\{code[0]} is no character")
            return number
        if self._here() not in _ESCAPES:
            raise self._wrong(
                rf"\{self._here()} is no escape: there are \n \r \t \\ \" \[ \] \- \xXX \uXXXX \UXXXXXXXX"
            )
        self._place += 1
        return ord(_ESCAPES[self._text[self._place - 1]])

    def _times(self) -> tuple[int, int | None] | None:
        mark = self._here()
        if mark in _OPERATORS:
            self._place += 1
            return _OPERATORS[mark]
        if mark != "{":
            return None
        times = self._take(_TIMES)
        if times is None:
            raise self._wrong("a number of times was expected ({3}, {3,} or {3,5})")
        least = int(times[1])
        most = int(times[3]) if times[3] else None if times[2] else least
        if most is not None and most < least:
            raise self._wrong(f"{times[0]} ends before it begins")
        if max(least, most or 0) > _MAX_TIMES:
            raise self._wrong(f"{times[0]} repeats more often than {_MAX_TIMES} times")
        return least, most

    def _at_rule(self) -> bool:
        """Whether the next rule begins here, as it may after a | that nothing follows."""
        return _HEAD.match(self._text, self._place) is not None

    def _here(self) -> str:
        """The next character, nothing at the end."""
        return self._text[self._place : self._place + 1]

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._place)
        if found is not None:
            self._place = found.end()
        return found

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._take(pattern)

    def _wrong(self, what: str) -> ValueError:
        before = self._text[: self._place]
        line, column = before.count("\n") + 1, self._place - before.rfind("\n")
        return ValueError(f"line {line}, column {column}: {what}")


_MAX_PARENTHESES = 20  # of parentheses; llguidance takes 30


def gbnf_to_lark(text: str) -> str:
    """Raises ValueError for what is no GBNF, or takes no text at all."""
    try:
        read = read_gbnf(text)
    except ValueError as error:
        raise ValueError(f"the grammar is no GBNF: {error}") from None
    rules = satisfiable(read, ROOT)
    if rules is None:
        raise ValueError("nothing satisfies the grammar: every text of root would have to go on for ever")
    rules = inlined(without_outer_calls(rules), ROOT)
    return _Writer(rules, lexemes(rules, ROOT)).text()


class _Writer:
    def __init__(self, rules: Rules, lexemes: set[int]) -> None:
        self._rules = rules
        self._lexemes = lexemes
        self._names = {name: "start" if name == ROOT else f"rule_{number}" for number, name in enumerate(rules)}
        self._lines: list[str] = []
        self._parts = 0

    def text(self) -> str:
        for name, expression in self._rules.items():
            self._define(self._names[name], expression)
        return "\n".join(self._lines)

    def _define(self, name: str, expression: Expression) -> None:
        self._lines.append(f"{name}: {self._written(expression, 0)}")

    def _written(self, expression: Expression, nesting: int) -> str:
        if isinstance(expression, Characters) or id(expression) in self._lexemes:
            pattern = _pattern(expression)
            return f"/{pattern}/" if pattern else '""'
        if nesting >= _MAX_PARENTHESES:
            self._parts += 1
            name = f"part_{self._parts}"
            self._define(name, expression)
            return name
        match expression:
            case CallRule(name):
                return self._names[name]
            case SequenceRule(parts):
                return " ".join(self._written(part, nesting) for part in parts) or '""'
            case ChoiceRule(options):
                return f"({' | '.join(self._written(option, nesting + 1) for option in options)})"
            case Repeat(part, least, most):
                return f"({self._written(part, nesting + 1)}){_times(least, most)}"
        raise TypeError(f"{type(expression).__name__} is no expression")


def _pattern(expression: Expression) -> str:
    """A regular expression of an expression without calls."""
    match expression:
        case Characters(ranges):
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return _code(ranges[0][0])
            return f"[{''.join(_code(low) if low == high else f'{_code(low)}-{_code(high)}' for low, high in ranges)}]"
        case SequenceRule(parts):
            return "".join(map(_pattern, parts))
        case ChoiceRule(options):
            return f"(?:{'|'.join(map(_pattern, options))})"
        case Repeat(part, least, most):
            return f"(?:{_pattern(part)}){_times(least, most)}"
    raise TypeError(f"a lexeme has no {type(expression).__name__}")


def _times(least: int, most: int | None) -> str:
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
        (least, most)
    ) or f"{{{least},{'' if most is None else most}}}"


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else rf"\x{{{code:X}}}"
