"""Which parts of a grammar over characters a lexer may read, so that what is accepted stays the same.

llguidance reads a text as lexemes, each as long as it can be: the end of one is where none that could stand there goes
on. A part of a grammar may be a lexeme if that is where it ends in every derivation, so: if wherever a byte can come
next, either all ways to read it go on within a lexeme, or all begin another. Both kinds are followed side by side
over all texts, with the grammar's stack forgotten (a rule returns to all places that call it) and bounded repetitions
without bounds, which only adds ways. One character is always a lexeme, but a parser that sees each takes a hundred
times as long for a mask.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from strata.engine.grammars.expressions import (
    CallRule,
    Characters,
    ChoiceRule,
    Expression,
    Repeat,
    Rules,
    SequenceRule,
    called,
    callers_of,
    inner,
    reached,
)

# Expressions that are put in place of one call, and of all; and levels of them, of which a pattern may have 250.
_MAX_OF_A_CALL = 600
_MAX_OF_CALLS = 10_000
_MAX_HEIGHT = 60
# Steps of the search, some 0.1 s; without an answer by then each character is a lexeme. A step handles sets of places,
# and counts once more for each 4096 of them.
_MAX_WORK = 100_000
_PLACES_OF_A_STEP = 4096


def inlined(rules: Rules, root: str) -> dict[str, Expression]:
    """The rules with calls of small rules that do not lead back to themselves replaced by what they call.

    No node of the expressions is in two places.
    """
    waiting = {name: len(called(expression)) for name, expression in rules.items()}
    callers = callers_of(rules)
    sizes: dict[str, tuple[int, int]] = {}
    ahead = [name for name, count in waiting.items() if not count]
    while ahead:
        name = ahead.pop()
        size, height = _size(rules[name], sizes)
        if size <= _MAX_OF_A_CALL and height <= _MAX_HEIGHT:
            sizes[name] = size, height
            for caller in callers[name]:
                waiting[caller] -= 1
                if not waiting[caller]:
                    ahead.append(caller)
    copier = _Copier(rules, sizes)
    return reached(root, lambda name: copier.copy(rules[name]))


def _size(expression: Expression, sizes: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Expressions that this one is made of, and levels of them and of calls, with what is called in place."""
    if isinstance(expression, CallRule):
        size, height = sizes[expression.name]
        return size, height + 1
    parts = [_size(part, sizes) for part in inner(expression)]
    return 1 + sum(size for size, _ in parts), 1 + max((height for _, height in parts), default=0)


class _Copier:
    def __init__(self, rules: Rules, sizes: dict[str, tuple[int, int]]) -> None:
        self._rules = rules
        self._sizes = sizes
        self._room = _MAX_OF_CALLS

    def copy(self, expression: Expression) -> Expression:
        """A copy with the calls of rules that have a size replaced, as long as there is room."""
        match expression:
            case Characters(ranges):
                return Characters(ranges)
            case CallRule(name):
                size, _ = self._sizes.get(name, (self._room + 1, 0))
                if size > self._room:
                    return CallRule(name)
                self._room -= size
                return self.copy(self._rules[name])
            case SequenceRule(parts):
                return SequenceRule(tuple(map(self.copy, parts)))
            case ChoiceRule(options):
                return ChoiceRule(tuple(map(self.copy, options)))
            case Repeat(part, least, most):
                return Repeat(self.copy(part), least, most)


def lexemes(rules: Rules, root: str) -> set[int]:
    """The `id` of each expression of `inlined` rules that is read as one lexeme; none of them is within another."""
    found = {id(part): part for expression in rules.values() for part in _without_calls(expression)}
    try:
        places = _Places(rules, root)
        while wrong := places.in_conflict(found):
            for one in wrong:
                for part in inner(found.pop(one)):
                    if inner(part):
                        found[id(part)] = part
    except _TooMuchError:
        return set()
    return set(found)


def _without_calls(expression: Expression) -> Iterator[Expression]:
    """The outermost parts of more than a character that call no rule and nest no deeper than a pattern may."""
    if inner(expression):
        if not called(expression) and _size(expression, {})[1] <= _MAX_HEIGHT:
            yield expression
        else:
            for part in inner(expression):
                yield from _without_calls(part)


class _TooMuchError(Exception):
    """The search takes too long."""


@dataclass(frozen=True)
class _Ends:
    """Whether an expression takes the empty text, and the places of its first and of its last characters, as bits."""

    empty: bool = False
    first: int = 0
    last: int = 0

    def then(self, other: _Ends) -> _Ends:
        first = self.first | (other.first if self.empty else 0)
        last = other.last | (self.last if other.empty else 0)
        return _Ends(self.empty and other.empty, first, last)

    def __or__(self, other: _Ends) -> _Ends:
        return _Ends(self.empty or other.empty, self.first | other.first, self.last | other.last)


class _Places:
    """The places where the rules name a character, and which can come after which."""

    def __init__(self, rules: Rules, root: str) -> None:
        self._work = 0
        self._rules = rules
        self._places: dict[int, int] = {}
        self._characters: list[Characters] = []
        for expression in rules.values():
            self._number(expression)
        self._ends: dict[int, _Ends] = {}
        self._ends_of_rules = {name: _Ends() for name in rules}
        self._find_ends()
        # Of each expression that puts one character after another: from which places to which.
        self._steps: list[tuple[int, int, int]] = []
        for expression in rules.values():
            self._find_steps(expression)
        self._atoms = self._find_atoms()
        self._texts = self._find_texts(root)

    def in_conflict(self, lexemes: dict[int, Expression]) -> set[int]:
        """The lexemes that may go on with a byte with which another may begin."""
        owners = {id(part): one for one, lexeme in lexemes.items() for part in _all(lexeme)}
        within: dict[int, int] = defaultdict(int)
        across: dict[int, int] = defaultdict(int)
        for owner, before, after in self._steps:
            for place in self._bits(before):
                (within if owner in owners else across)[place] |= after
        wrong: set[int] = set()
        for places in self._texts:
            on, other = 0, 0
            for place in self._bits(places):
                on |= within[place]
                other |= across[place]
            if on and other and (both := self._first_bytes(on) & self._first_bytes(other)):
                going = (place for place in self._bits(places) if self._first_bytes(within[place]) & both)
                wrong.update(owners[id(self._characters[place])] for place in going)
        return wrong

    def _first_bytes(self, places: int) -> int:
        """The bytes that a character of one of the places begins with, as bits."""
        self._spend(len(self._atoms))
        found = 0
        for atom, first_bytes in self._atoms.items():
            if atom & places:
                found |= first_bytes
        return found

    def _number(self, expression: Expression) -> None:
        if isinstance(expression, Characters):
            self._places[id(expression)] = len(self._characters)
            self._characters.append(expression)
        for part in inner(expression):
            self._number(part)

    def _find_ends(self) -> None:
        callers = callers_of(self._rules)
        ahead = dict.fromkeys(self._rules)
        while ahead:
            name, _ = ahead.popitem()
            ends = self._ends_of(self._rules[name])
            if ends != self._ends_of_rules[name]:
                self._ends_of_rules[name] = ends
                ahead.update(dict.fromkeys(callers[name]))

    def _ends_of(self, expression: Expression) -> _Ends:
        self._spend(1)
        match expression:
            case Characters():
                bit = 1 << self._places[id(expression)]
                ends = _Ends(False, bit, bit)
            case CallRule(name):
                ends = self._ends_of_rules[name]
            case SequenceRule(parts):
                ends = _Ends(True)
                for part in parts:
                    ends = ends.then(self._ends_of(part))
            case ChoiceRule(options):
                ends = _Ends()
                for option in options:
                    ends |= self._ends_of(option)
            case Repeat(part, least, _):
                ends = self._ends_of(part)
                if not least:
                    ends |= _Ends(True)
        self._ends[id(expression)] = ends
        return ends

    def _find_steps(self, expression: Expression) -> None:
        match expression:
            case SequenceRule(parts):
                before = _Ends(True)
                for part in parts:
                    ends = self._ends[id(part)]
                    self._steps.append((id(expression), before.last, ends.first))
                    before = before.then(ends)
            case Repeat(part, _, most) if most != 1:
                self._steps.append((id(expression), self._ends[id(part)].last, self._ends[id(part)].first))
        for part in inner(expression):
            self._find_steps(part)

    def _find_atoms(self) -> dict[int, int]:
        """The sets of places that a character can be at, and the first bytes of such characters, as bits."""
        turns: dict[int, int] = defaultdict(int)
        for place, one in enumerate(self._characters):
            for low, high in one.ranges:
                turns[low] ^= 1 << place
                turns[high + 1] ^= 1 << place
        atoms: dict[int, int] = defaultdict(int)
        here = 0
        for code, end in itertools.pairwise(sorted(turns)):
            self._spend(1)
            here ^= turns[code]
            if here:
                atoms[here] |= (2 << chr(end - 1).encode()[0]) - (1 << chr(code).encode()[0])
        return dict(atoms)

    def _find_texts(self, root: str) -> list[int]:
        """Where the last character of a text can be, of all texts: sets of places, as bits."""
        after: dict[int, int] = defaultdict(int)
        for _, before, then in self._steps:
            for place in self._bits(before):
                after[place] |= then
        found: dict[int, None] = {}
        ahead = [self._ends_of_rules[root].first]
        following = set(ahead)
        while ahead:
            next_places = ahead.pop()
            for atom in self._atoms:
                self._spend(1)
                places = next_places & atom
                if places and places not in found:
                    found[places] = None
                    then = 0
                    for place in self._bits(places):
                        then |= after[place]
                    if then not in following:
                        following.add(then)
                        ahead.append(then)
        return list(found)

    def _bits(self, places: int) -> Iterator[int]:
        while places:
            self._spend(1)
            low = places & -places
            yield low.bit_length() - 1
            places ^= low

    def _spend(self, work: int) -> None:
        self._work += work * (1 + len(self._characters) // _PLACES_OF_A_STEP)
        if self._work > _MAX_WORK:
            raise _TooMuchError


def _all(expression: Expression) -> Iterator[Expression]:
    yield expression
    for part in inner(expression):
        yield from _all(part)
