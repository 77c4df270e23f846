"""Checks the house rules: a floor imports only the floors it may, and files and folders stay small enough to be read.

Usage: python tools/floors.py [ROOT]. Imports inside functions count as well. Exit code 1 and a line per fault.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

MAY_IMPORT: dict[str, set[str]] = {
    "hardware": set(),
    "files": set(),
    "kernels": {"hardware"},
    "comm": {"hardware", "kernels"},
    "text": {"files"},
    "models": {"kernels", "files"},
    "parallel": {"comm", "models", "kernels"},
    "graph": {"hardware", "kernels", "comm"},
    "cache": {"models", "kernels"},
    "engine": {"cache", "graph", "parallel", "models", "text", "files", "comm", "kernels", "hardware"},
    "serve": {"engine", "text", "files"},
    "train": {"models", "parallel", "graph", "text", "files", "comm", "kernels", "hardware"},
    "rl": {"engine", "train", "cache", "graph", "parallel", "models", "text", "files", "comm", "kernels", "hardware"},
    "plan": {"hardware", "models", "parallel", "graph", "cache", "engine", "train", "text", "files", "comm", "kernels"},
}
MAY_IMPORT["bench"] = {*MAY_IMPORT}
ALL_FLOORS = {*MAY_IMPORT, "cli"}
MAX_LINES = 450
MAX_FILES = 25
LONGER_WITH_REASON: dict[str, str] = {}


def imported_modules(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted module) of every import in a file, wherever it stands."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            found.append((node.lineno, "." * node.level))
    return found


def faults_of(file: Path, package: Path) -> list[str]:
    """What is wrong with one file of the package."""
    text = file.read_text()
    shown = file.relative_to(package.parent)
    faults = []
    lines = text.count("\n")
    if lines > MAX_LINES and str(shown) not in LONGER_WITH_REASON:
        faults.append(f"{shown}: {lines} lines, at most {MAX_LINES} (split it, or give a reason in tools/floors.py)")
    inside = file.relative_to(package).parts
    floor = inside[0] if len(inside) > 1 else None
    if floor is not None and floor not in ALL_FLOORS:
        return [*faults, f"{shown}: {floor!r} is no floor of the house"]
    allowed = ALL_FLOORS if floor in (None, "cli") else MAY_IMPORT[str(floor)] | {str(floor)}
    seen: set[tuple[int, str]] = set()
    for line, module in imported_modules(ast.parse(text)):
        if module.startswith("."):
            faults.append(f"{shown}:{line}: relative import; write the full path, so that the floor shows")
        parts = module.split(".")
        if parts[0] != package.name or len(parts) < 2 or parts[1] not in ALL_FLOORS:
            continue
        if parts[1] not in allowed and (line, parts[1]) not in seen:
            seen.add((line, parts[1]))
            faults.append(f"{shown}:{line}: {floor} may not import {parts[1]}")
    return faults


def crowded(files: list[Path], root: Path) -> list[str]:
    """The folders with too many files side by side."""
    counts = Counter(file.parent for file in files)
    return [
        f"{folder.relative_to(root)}: {count} files side by side, at most {MAX_FILES}"
        for folder, count in sorted(counts.items())
        if count > MAX_FILES
    ]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    package = root / "strata"
    files = sorted(package.rglob("*.py"))
    faults = [fault for file in files for fault in faults_of(file, package)]
    tests = [file for file in (root / "tests").rglob("*.py") if "clients" not in file.parts]
    faults += crowded([*files, *tests], root)
    for fault in faults:
        print(fault)
    print(f"floors: {len(files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
