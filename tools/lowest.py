"""Prints the lowest versions that pyproject.toml allows, a line each as pip takes them for constraints.

Usage: python tools/lowest.py [PYPROJECT]. Of what the package needs and of its extras but `dev`, whose tools are for
this repository alone. `make test-lowest` installs them and runs a part of the tests. Exit code 1 and a line for each
dependency without a lower bound.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def dependencies(pyproject: Path, without: str | None = None) -> list[Requirement]:
    """All that the package and its extras name, but for each other, and without one of the extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in extras if name != without)]
    named = [Requirement(line) for group in groups for line in group]
    return [one for one in named if one.name != project["name"]]


def lower_bound(dependency: Requirement) -> str | None:
    """The version from which on it may be; None if there is none such."""
    return next((one.version for one in dependency.specifier if one.operator in (">=", "~=", "==")), None)


def main() -> int:
    pyproject = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "pyproject.toml"
    found = dependencies(pyproject, without="dev")
    without = [one.name for one in found if lower_bound(one) is None]
    for name in without:
        print(f"{name} has no lower bound; write {name}>=VERSION", file=sys.stderr)
    for one in found:
        marker = f"; {one.marker}" if one.marker is not None else ""
        print(f"{one.name}=={lower_bound(one)}{marker}")
    return 1 if without else 0


if __name__ == "__main__":
    sys.exit(main())
