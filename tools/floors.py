"""Checks the house rules: who may import whom, how long things may get, and which words names are made of.

Usage: python tools/floors.py [--shrink] [ROOT]. Exit code 1 and a line per fault. tools/floors.json has the budgets and
what is left to mend, with reasons. It can only shrink: an entry that nothing needs any more is a fault as well, and
--shrink takes those out.

- A floor imports only the floors it may, by full paths, and no module imports itself through others. Imports inside
  functions count; those for types alone (`if TYPE_CHECKING`) run nothing, and make no cycle.
- A file has at most 450 lines. A floor has at most the lines of its budget, where blank lines, comments and docstrings
  do not count.
- A module under 60 lines that only one other imports is merged into that one or a neighbour, or has a reason.
- A class name is defined once, nested and private ones too.
- Names of modules, functions, classes and flags are made of the field's terms, not of the words these have replaced.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

MAY_IMPORT: dict[str, set[str]] = {
    "hardware": set(),
    "files": set(),
    "kernels": {"hardware"},
    "comm": {"hardware", "kernels"},
    "text": {"files"},
    "models": {"kernels", "files"},
    "parallel": {"comm", "models", "kernels"},
    "graph": {"hardware", "kernels", "comm"},
    "cost": {"hardware", "kernels", "comm", "graph"},
    "cache": {"models", "kernels"},
    "engine": {"cache", "graph", "cost", "parallel", "models", "text", "files", "comm", "kernels", "hardware"},
    "serve": {"engine", "text", "files"},
    "train": {"models", "parallel", "graph", "cost", "text", "files", "comm", "kernels", "hardware"},
}
MAY_IMPORT["rl"] = MAY_IMPORT["engine"] | MAY_IMPORT["train"] | {"engine", "train"}
MAY_IMPORT["plan"] = MAY_IMPORT["rl"]
MAY_IMPORT["bench"] = {*MAY_IMPORT}
ALL_FLOORS = {*MAY_IMPORT, "cli"}
MAX_LINES = 450
MAX_FILES = 25
SMALL = 60
BUDGET_STEP = 100
AIM = 63_000  # counted lines of all floors
SETTINGS = "tools/floors.json"
_UNCOUNTED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Import:
    """What a line imports: a module, or a name that may be one. types_only: under `if TYPE_CHECKING`."""

    line: int
    target: str
    types_only: bool


@dataclass(frozen=True)
class Module:
    """A file of the package. shown: its path from the root, with slashes."""

    shown: str
    text: str

    @property
    def name(self) -> str:
        return self.shown.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def floor(self) -> str | None:
        """None for a file beside the floors."""
        parts = self.shown.split("/")
        return parts[1] if len(parts) > 2 else None

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[Import]:
        """Those of the whole file, wherever they stand; a relative one is dots alone."""
        types = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }
        found: list[Import] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                targets = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.ImportFrom):
                targets = ["." * node.level]
            else:
                continue
            found += [Import(node.lineno, target, id(node) in types) for target in targets]
        return found

    def counted_lines(self) -> int:
        """Lines with code or an import."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _UNCOUNTED:
                lines |= set(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        return len(lines)

    @cached_property
    def public_names(self) -> list[tuple[int, str]]:
        """(line, words in lower case with _ between) of its folder, file, functions, classes, methods and flags."""
        names = [(1, part) for part in self.shown.removesuffix(".py").split("/")[-2:]]
        names += [*_public_definitions(self.tree), *_flags(self.tree, in_cli=self.floor == "cli")]
        return [(line, re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()) for line, name in names]


def _flags(tree: ast.Module, *, in_cli: bool) -> Iterator[tuple[int, str]]:
    """Flags that are spelled out, and parameters of commands, which typer names flags by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"--[a-z-]+(/--[a-z-]+)?", node.value):
                yield node.lineno, node.value.strip("-")
        elif in_cli and isinstance(node, ast.arg) and node.annotation is not None:
            names_a_flag = re.match(r"Annotated\[|options\.", ast.unparse(node.annotation))
            yield from [(node.lineno, node.arg)] if names_a_flag else []


def _public_definitions(node: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and inner.name[0] != "_":
            yield inner.lineno, inner.name
            if isinstance(inner, ast.ClassDef):
                yield from _public_definitions(inner)


def file_faults(module: Module, package: str) -> Iterator[str]:
    """What is wrong with one file by itself: its length, and what it imports."""
    if module.lines > MAX_LINES:
        yield f"{module.shown}: {module.lines} lines, at most {MAX_LINES}; split it"
    if module.floor is not None and module.floor not in ALL_FLOORS:
        yield f"{module.shown}: {module.floor!r} is no floor of the house"
        return
    allowed = ALL_FLOORS if module.floor in (None, "cli") else MAY_IMPORT[str(module.floor)] | {str(module.floor)}
    seen: set[tuple[int, str]] = set()
    for one in module.imports:
        if one.target.startswith("."):
            yield f"{module.shown}:{one.line}: relative import; write the full path, so that the floor shows"
        parts = one.target.split(".")
        if parts[0] != package or len(parts) < 2 or parts[1] not in ALL_FLOORS:
            continue
        if parts[1] not in allowed and (one.line, parts[1]) not in seen:
            seen.add((one.line, parts[1]))
            yield f"{module.shown}:{one.line}: {module.floor} may not import {parts[1]}"


def importers(modules: Mapping[str, Module], *, types: bool) -> dict[str, set[str]]:
    """By the name of a module, those that import it, with types also those that do for types alone."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for module in modules.values():
        for one in module.imports:
            # `from package import name` looks like an import of the package as well, which holds names of its own.
            if one.target in modules and (types or not one.types_only):
                found[one.target].add(module.name)
    return found


def cycles(imported_by: Mapping[str, set[str]]) -> Iterator[str]:
    """A line for each cycle, until none is left when an import of each is thought away."""
    edges = {name: set(others) for name, others in imported_by.items()}
    while True:
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1]  # each is an importer of the next
            yield f"cycle of imports: {' imports '.join(cycle)}; merge them, or move what both need into a third"
            edges[cycle[1]].discard(cycle[0])
        else:
            return


def small_modules(modules: Mapping[str, Module]) -> dict[str, str]:
    """By path, the only importer of a small module."""
    found = importers(modules, types=True)
    return {
        module.shown: next(iter(found[name]))
        for name, module in modules.items()
        if module.lines < SMALL and len(found[name]) == 1 and not module.shown.endswith("__init__.py")
    }


def class_places(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """By class name, where it is defined."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{module.shown}:{node.lineno}")
    return found


def old_word_places(modules: Mapping[str, Module], old: str, rule: Mapping[str, Any]) -> dict[str, str]:
    """By path, the first place (line and name) where a replaced word stands in a public name.

    rule: `in`, the floors where it is replaced (without it, all); `fine`, phrases in which it is the field's own.
    """
    word = re.compile(rf"(?<![a-z0-9])({old})(?![a-z0-9])")
    fine = re.compile("|".join(rf"(?<![a-z0-9]){phrase}s?(?![a-z0-9])" for phrase in rule.get("fine", ["(?!)"])))
    found: dict[str, str] = {}
    for module in modules.values():
        if module.floor not in rule.get("in", [module.floor]):
            continue
        for line, name in module.public_names:
            if word.search(fine.sub("", name)):
                found.setdefault(module.shown, f"{line}: {name}")
    return found


def crowded(files: list[Path], root: Path) -> Iterator[str]:
    """The folders with many files side by side."""
    for folder, count in sorted(Counter(file.parent for file in files).items()):
        if count > MAX_FILES:
            yield f"{folder.relative_to(root)}: {count} files side by side; over {MAX_FILES} are hard to look through"


class Ratchet:
    """Compares what is there with what tools/floors.json allows. `allowed` is changed to what is still needed."""

    def __init__(self, allowed: dict[str, Any]) -> None:
        self.allowed = allowed
        self.faults: list[str] = []

    def _stale(self, what: str) -> None:
        self.faults.append(f"{SETTINGS}: {what}; python tools/floors.py --shrink writes it")

    def budgets(self, counted: Mapping[str, int]) -> None:
        budgets: dict[str, int] = self.allowed["counted_lines"]
        for floor in sorted({*counted, *budgets}):
            lines, budget = counted.get(floor, 0), budgets.get(floor, 0)
            enough = -(-lines // BUDGET_STEP) * BUDGET_STEP
            if lines > budget:
                self.faults.append(f"{floor}: {lines:,} counted lines, its budget is {budget:,} ({SETTINGS})")
            elif enough < budget:
                self._stale(f"the budget of {floor} is {budget:,}, {enough:,} are enough now")
                budgets[floor] = enough

    def small(self, found: Mapping[str, str]) -> None:
        """Reasons are by path; one that ends with a slash is for all of a folder."""
        reasons: dict[str, str] = self.allowed["small_modules"]
        used: set[str] = set()
        for shown, importer in found.items():
            if reason := next(filter(shown.startswith, reasons), None):
                used.add(reason)
            else:
                advice = f"merge it there or with a neighbour, or give a reason in {SETTINGS}"
                self.faults.append(f"{shown}: under {SMALL} lines, and only {importer} imports it; {advice}")
        for unused in [key for key in reasons if key not in used]:
            self._stale(f"no small module with one importer is at {unused}")
            del reasons[unused]

    def classes(self, places: Mapping[str, list[str]]) -> None:
        known: dict[str, int] = self.allowed["class_names"]
        for name, where in places.items():
            if len(where) > max(1, known.get(name, 1)):
                self.faults.append(f"class {name} is defined {len(where)} times: {', '.join(where)}; a name has one")
        for name, count in list(known.items()):
            if (now := len(places.get(name, ()))) < count:
                self._stale(f"class {name} is defined {now} times, not {count}")
                known[name] = now
            if now < 2:
                del known[name]

    def words(self, modules: Mapping[str, Module]) -> None:
        for old, rule in self.allowed["replaced_words"].items():
            found = old_word_places(modules, old, rule)
            for shown in found.keys() - set(rule["files"]):
                self.faults.append(f"{shown}:{found[shown]}: {old!r} is replaced by: {rule['term']}")
            for renamed in sorted(set(rule["files"]) - found.keys()):
                self._stale(f"no public name of {renamed} has {old!r}")
            rule["files"] = sorted(found.keys() & set(rule["files"]))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Checks the house rules.")
    parser.add_argument("--shrink", action="store_true", help=f"take what is no longer needed out of {SETTINGS}")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args(arguments)
    root: Path = options.root
    files = sorted((root / "strata").rglob("*.py"))
    modules = {one.name: one for one in (Module(file.relative_to(root).as_posix(), file.read_text()) for file in files)}
    counted: Counter[str] = Counter()
    for module in modules.values():
        counted[module.floor or "strata"] += module.counted_lines()

    ratchet = Ratchet(json.loads((root / SETTINGS).read_text()))
    ratchet.budgets(counted)
    ratchet.small(small_modules(modules))
    ratchet.classes(class_places(modules))
    ratchet.words(modules)
    if options.shrink:
        (root / SETTINGS).write_text(json.dumps(ratchet.allowed, indent=2, ensure_ascii=False) + "\n")
        return 0
    faults = [fault for module in modules.values() for fault in file_faults(module, "strata")]
    faults += [*cycles(importers(modules, types=False)), *ratchet.faults]
    for fault in faults:
        print(fault)
    tests = [file for file in (root / "tests").rglob("*.py") if "clients" not in file.parts]
    for advice in crowded([*files, *tests], root):
        print(f"advice: {advice}")
    lines = f"{sum(counted.values()):,} counted lines (to become {AIM:,})"
    print(f"floors: {len(files)} files, {lines}, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
