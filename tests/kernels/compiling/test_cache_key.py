"""Keys of kernels in Triton's cache: another process, which asks for them in another order, finds the same."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import permutations
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

SOURCE = """
from strata.kernels.triton_import import jit, tl

WIDTH = tl.constexpr({width})


@jit
def innermost(x):
    return x * WIDTH


@jit
def inner(x):
    return innermost(x) + 1


@jit
def first(x, n: tl.constexpr):
    tl.store(x, inner(tl.load(x)))


@jit
def second(x, n: tl.constexpr):
    tl.store(x, inner(tl.load(x)) + n)
"""


def loaded(folder: Path, width: int = 3) -> ModuleType:
    """As a process has it that has asked for no key yet."""
    path = folder / f"kernels_of_a_test_{width}.py"
    path.write_text(SOURCE.replace("{width}", str(width)))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_order_of_asking_does_not_matter_and_constants_do(tmp_path: Path) -> None:
    found = set()
    for order in permutations(("first", "second", "inner", "innermost")):
        module = loaded(tmp_path)
        keys = {name: getattr(module, name).cache_key for name in order}
        found.add(tuple(sorted(keys.items())))
    (keys,) = found
    assert len({key for _, key in keys}) == 4
    other = loaded(tmp_path, width=4)
    assert {name: getattr(other, name).cache_key for name, _ in keys}.items().isdisjoint(keys)
