"""Grammars over characters, read by the book: what a converted grammar is held against.

A rule is a list of options, an option a list of symbols: the name of a rule, or what tells whether a character is one
of it. Repetitions and groups are rules of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from strata.engine.grammars.expressions import CallRule, Characters, ChoiceRule, Expression, Repeat, Rules, SequenceRule

Symbol = str | Callable[[str], bool]

# What random grammars are made of; two share their first byte.
CHARACTERS = 'ab"-]\\\né\u00e8€😀'


class Item(NamedTuple):
    """So many symbols of an option of a rule were read, from this place of the text on."""

    rule: str
    option: int
    read: int
    begin: int


@dataclass
class PlainGrammar:
    """Begins at `root`. characters: some of each kind that the rules distinguish."""

    rules: dict[str, list[list[Symbol]]]
    characters: str = CHARACTERS
    _charts: dict[str, list[set[Item]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Options that no text completes go, so that what is left of a text can be completed."""
        done: set[str] = set()
        while True:
            more = {name for name, options in self.rules.items() if any(self._done(one, done) for one in options)}
            if more == done:
                break
            done = more
        self.rules = {
            name: [one for one in options if self._done(one, done)]
            for name, options in self.rules.items()
            if name in done
        }
        self.empty = self._empty()

    @property
    def has_texts(self) -> bool:
        return "root" in self.rules

    def goes_on(self, text: str) -> bool:
        """Whether some text of the grammar begins with this one."""
        return bool(self._chart(text)[-1])

    def accepts(self, text: str) -> bool:
        final = self._chart(text)[-1]
        return any(
            item.rule == "root" and item.begin == 0 and item.read == len(self.rules["root"][item.option])
            for item in final
        )

    def bytes_go_on(self, text: bytes) -> bool:
        """The same, of bytes that may end within a character."""
        for cut in range(min(4, len(text) + 1)):
            try:
                whole = text[: len(text) - cut].decode()
            except UnicodeDecodeError:
                continue
            rest = text[len(text) - cut :]
            if not rest:
                return self.goes_on(whole)
            return any(self.goes_on(whole + one) for one in self._completions(rest))
        return False

    def _completions(self, begun: bytes) -> list[str]:
        """Characters that begin with these bytes: those that the rules distinguish, and some other."""
        known = [one for one in self.characters if one.encode().startswith(begun)]
        for first, rest in itertools.product((b"\x81", b"\x91", b"\xa1"), (b"", b"\x91", b"\x91\x91")):
            with contextlib.suppress(UnicodeDecodeError):
                known.append((begun + first + rest).decode())
        return known

    def _done(self, option: list[Symbol], done: set[str]) -> bool:
        return all(
            symbol in done if isinstance(symbol, str) else any(map(symbol, self.characters)) for symbol in option
        )

    def _empty(self) -> set[str]:
        empty: set[str] = set()
        while True:
            more = {name for name, options in self.rules.items() if any(empty.issuperset(one) for one in options)}
            if more == empty:
                return empty
            empty = more

    def _chart(self, text: str) -> list[set[Item]]:
        if text not in self._charts:
            if not text:
                self._charts[text] = [
                    self._closed([], {Item("root", number, 0, 0) for number in range(len(self.rules["root"]))})
                ]
            else:
                before = self._chart(text[:-1])
                read = set()
                for item in before[-1]:
                    symbol = self._next(item)
                    if symbol is not None and not isinstance(symbol, str) and symbol(text[-1]):
                        read.add(item._replace(read=item.read + 1))
                self._charts[text] = [*before, self._closed(before, read)]
        return self._charts[text]

    def _next(self, item: Item) -> Symbol | None:
        option = self.rules[item.rule][item.option]
        return option[item.read] if item.read < len(option) else None

    def _closed(self, before: list[set[Item]], items: set[Item]) -> set[Item]:
        place = len(before)
        closed, ahead = set(items), list(items)

        def add(item: Item) -> None:
            if item not in closed:
                closed.add(item)
                ahead.append(item)

        while ahead:
            item = ahead.pop()
            symbol = self._next(item)
            if symbol is None:
                for waiting in list(closed if item.begin == place else before[item.begin]):
                    if self._next(waiting) == item.rule:
                        add(waiting._replace(read=waiting.read + 1))
            elif isinstance(symbol, str):
                for number in range(len(self.rules[symbol])):
                    add(Item(symbol, number, 0, place))
                if symbol in self.empty:
                    add(item._replace(read=item.read + 1))
        return closed


def plain(rules: Rules) -> PlainGrammar:
    """A grammar that was read from GBNF."""
    made: dict[str, list[list[Symbol]]] = {}
    bounds: set[int] = set()

    def symbols_of(expression: Expression) -> list[Symbol]:
        match expression:
            case Characters(ranges):
                bounds.update(code for low, high in ranges for code in (low - 1, low, high, high + 1))
                return [lambda one: any(low <= ord(one) <= high for low, high in ranges)]
            case CallRule(name):
                return [name]
            case SequenceRule(parts):
                return [symbol for part in parts for symbol in symbols_of(part)]
            case ChoiceRule(options):
                name = f"choice {len(made)}"
                made[name] = []
                made[name] += [symbols_of(option) for option in options]
                return [name]
            case Repeat(part, least, most):
                name = f"repeat {len(made)}"
                made[name] = []
                symbols = symbols_of(part)
                made[name] += [[], [name, *symbols]] if most is None else [symbols * n for n in range(most - least + 1)]
                return [*symbols * least, name]

    for name, expression in rules.items():
        made[name] = []
        made[name].append(symbols_of(expression))
    characters = "".join(
        chr(code) for code in sorted(bounds) if 0 <= code <= sys.maxunicode and not 0xD800 <= code < 0xE000
    )
    return PlainGrammar(made, characters)


class RandomGrammar:
    """A grammar as GBNF and as a plain one."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._rules: dict[str, list[list[Symbol]]] = {}
        self._numbers = itertools.count()
        self._names = ["root", "B-b", "c_2", "D3"][: self._chance.randint(1, 4)]
        lines = [f"{name} ::= {self._choice(name, 0)}" for name in self._names]
        self.gbnf = "\n".join(lines)
        self.plain = PlainGrammar(self._rules)

    def _choice(self, name: str, depth: int) -> str:
        texts = []
        self._rules[name] = options = []
        for _ in range(self._chance.choice([1, 1, 2, 3])):
            parts = [self._part(depth) for _ in range(self._chance.choice([0, 1, 1, 2, 2, 3]))]
            texts.append(" ".join(text for text, _ in parts))
            options.append([symbol for _, symbols in parts for symbol in symbols])
        return " | ".join(texts)

    def _part(self, depth: int) -> tuple[str, list[Symbol]]:
        text, symbols = self._one(depth)
        kind = self._chance.choice(["", "", "", "", "*", "+", "?", "{}"])
        if not kind:
            return text, symbols
        least = self._chance.randint(0, 2)
        most = self._chance.choice([None, least, least + self._chance.randint(0, 2)])
        if kind == "{}":
            kind = f"{{{least},{'' if most is None else most}}}" if most != least else f"{{{least}}}"
        else:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[kind]
        return text + kind, self._repeated(symbols, least, most)

    def _repeated(self, symbols: list[Symbol], least: int, most: int | None) -> list[Symbol]:
        name = f"repeat {next(self._numbers)}"
        if most is None:
            self._rules[name] = [[], [name, *symbols]]
        else:
            self._rules[name] = [symbols * times for times in range(most - least + 1)]
        return [*symbols * least, name]

    def _one(self, depth: int) -> tuple[str, list[Symbol]]:
        kind = self._chance.choice(["literal", "literal", "class", "class", "call", "group", "any"])
        if kind == "call":
            name = self._chance.choice(self._names)
            return name, [name]
        if kind == "group" and depth < 2:
            name = f"group {next(self._numbers)}"
            return f"({self._choice(name, depth + 1)})", [name]
        if kind == "literal":
            text = "".join(
                self._chance.choices(
                    CHARACTERS[:9], [9, 9, 1, 1, 1, 1, 1, 2, 1], k=self._chance.choice([0, 1, 1, 1, 2, 3])
                )
            )
            return '"' + "".join(map(self._written, text)) + '"', [one.__eq__ for one in text]
        if kind == "any" and self._chance.random() < 0.3:
            return ".", [lambda _: True]
        members = self._chance.sample(CHARACTERS[:9], self._chance.randint(1, 3))
        if self._chance.random() < 0.2:
            members.append("c-z")
        negated = self._chance.random() < 0.2
        written = "".join(one if len(one) > 1 else self._written(one) for one in members)

        def takes(one: str) -> bool:
            return (one in members or ("c-z" in members and "c" <= one <= "z")) != negated

        return f"[{'^' * negated}{written}]", [takes]

    def _written(self, one: str) -> str:
        if one in '"-]\\':
            return self._chance.choice(["\\" + one, f"\\x{ord(one):02x}"])
        if one == "\n":
            return self._chance.choice(["\\n", "\\x0A", "\\u000a"])
        return self._chance.choice([one, one, f"\\u{ord(one):04X}", f"\\U{ord(one):08x}"])
