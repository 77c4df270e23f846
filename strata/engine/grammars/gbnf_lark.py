"""Grammars in GBNF as llguidance's dialect of Lark has them, which takes the same texts."""

from __future__ import annotations

from strata.engine.grammars.expressions import (
    Call,
    Characters,
    Choice,
    Expression,
    Repeat,
    Rules,
    Sequence,
    satisfiable,
    without_outer_calls,
)
from strata.engine.grammars.gbnf import ROOT, read_gbnf
from strata.engine.grammars.lexemes import inlined, lexemes

_MAX_NESTING = 20  # of parentheses; llguidance takes 30


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
        if nesting >= _MAX_NESTING:
            self._parts += 1
            name = f"part_{self._parts}"
            self._define(name, expression)
            return name
        match expression:
            case Call(name):
                return self._names[name]
            case Sequence(parts):
                return " ".join(self._written(part, nesting) for part in parts) or '""'
            case Choice(options):
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
        case Sequence(parts):
            return "".join(map(_pattern, parts))
        case Choice(options):
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
