"""What an installation gets: bounds that hold, one Triton, and a package that is found from anywhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lowest import dependencies, lower_bound

ROOT = Path(__file__).resolve().parent.parent
DEPENDENCIES = dependencies(ROOT / "pyproject.toml")
OPTIONAL = {"aiconfigurator-core"}  # which no test needs


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    named = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in named}


@pytest.mark.parametrize("dependency", DEPENDENCIES, ids=lambda one: one.name)
def test_a_dependency_has_a_lower_bound_which_the_tested_version_satisfies(dependency: Requirement) -> None:
    assert lower_bound(dependency) is not None
    name = canonicalize_name(dependency.name)
    if name not in OPTIONAL:
        (tested,) = constraints()[name].specifier
        assert tested.operator == "=="
        assert tested.version in dependency.specifier


def test_the_makefile_names_no_version_that_constraints_do() -> None:
    """What a fresh machine gets is said in one place."""
    made = (ROOT / "Makefile").read_text()
    named = set(constraints()) - {"openai"}  # another version of its client is tested beside
    assert not [name for name in named if f"{name}==" in made]


def test_an_editable_install_is_found_behind_a_folder_of_its_name(tmp_path: Path) -> None:
    """As of somebody who stands above a clone that is named strata: a folder without Python is no package."""
    pytest.importorskip("setuptools")
    clone = tmp_path / "strata"
    package = clone / "strata"
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (clone / name).write_text((ROOT / name).read_text())
    (package / "__init__.py").write_text("LLM = 'found'\n")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=clone, capture_output=True, text=True, check=True
    )
    site = tmp_path / "site"
    zipfile.ZipFile(tmp_path / built.stdout.split()[-1]).extractall(site)
    use = f"import site; site.addsitedir({str(site)!r}); import strata; print(strata.LLM)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", use], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "found\n"
