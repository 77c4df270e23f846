"""How a process starts another one that runs a module of this package."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the package's folder
_PACKAGE = __name__.partition(".")[0]


def command_of(module: str) -> list[str]:
    """What runs a module. -P: the current folder must not come first in the import path, its modules may have common
    names."""
    return [sys.executable, "-P", "-m", module]


def with_package(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which a process finds this package, also if it is not installed: `python -m strata` in
    a checkout finds it in the current folder, which -P takes from the import path. Of several, it is this one."""
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = next((place for place, path in enumerate(paths) if (Path(path) / _PACKAGE).is_dir()), len(paths))
    installed = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if ROOT in (Path(path).resolve() for path in (paths[first : first + 1] or installed)):
        return dict(variables)
    return dict(variables) | {"PYTHONPATH": os.pathsep.join([*paths[:first], str(ROOT), *paths[first:]])}
