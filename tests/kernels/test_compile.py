"""Every Triton kernel compiles for Hopper without a GPU: it fits, uses tensor cores, spills no more than allowed."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.mark import ParameterSet

import strata.kernels
from strata.kernels.device_limits import SHARED_BYTES
from tests.kernels import launches
from tests.kernels.compiled_for import CompileCase, compile_for

pytest.importorskip("triton")


def modules(package: ModuleType) -> list[ModuleType]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(module.name) for module in found]


CASES: list[CompileCase] = [
    case for module in modules(launches) if hasattr(module, "compile_cases") for case in module.compile_cases()
]


def short_and_long() -> list[ParameterSet]:
    """Of each kernel three cases, from its first to its last by name; all others take long."""
    by_kernel: dict[Any, list[CompileCase]] = defaultdict(list)
    for case in sorted(CASES, key=lambda case: case.name):
        by_kernel[case.kernel].append(case)
    return [
        pytest.param(
            case, id=case.name, marks=[] if index in (0, len(some) // 2, len(some) - 1) else [pytest.mark.long]
        )
        for some in by_kernel.values()
        for index, case in enumerate(some)
    ]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("case", short_and_long())
def test_kernel_fits_a_hopper_multiprocessor(case: CompileCase) -> None:
    resources = compile_for(case)
    assert resources.spills <= case.spilled_bytes
    assert 0 < resources.registers <= (case.max_registers or 255)
    assert resources.shared_bytes <= SHARED_BYTES
    for instruction in case.must_contain:
        assert instruction in resources.ptx
    if "cos" in case.signature and case.constants.get("EARLY"):
        assert_only_what_depends_on_the_kernel_ahead_waits_for_it(case, resources.ptx)


def assert_only_what_depends_on_the_kernel_ahead_waits_for_it(case: CompileCase, ptx: str) -> None:
    """Of attention of decode steps that starts early: before, keys and values are prefetched and nothing is written."""
    constants: Mapping[str, Any] = case.constants
    before, _ = ptx.split("griddepcontrol.wait")
    assert "st.global" not in before
    assert "atom" not in before
    blocks = constants["BLOCK_N"] * constants["HEAD_PAD"] * 2 // (16 * 32 * case.num_warps)
    assert before.count("prefetch.global.L2") == 2 * max(1, blocks // 8)


def test_spills_are_seen() -> None:
    wide = next(case for case in CASES if case.name == "linear bf16 128x256x64")
    crowded = CompileCase(wide.name, wide.kernel, wide.signature, wide.constants, 4, 3)
    assert compile_for(crowded).spills > 0


def test_every_kernel_has_a_case() -> None:
    """A kernel is what no other function of Triton's calls: those compile with the kernels that they are parts of."""
    from triton import JITFunction

    own = modules(strata.kernels)
    kernels = [one for module in own for one in vars(module).values() if isinstance(one, JITFunction)]
    called = {name for one in kernels for name in one.fn.__code__.co_names}
    compiled = {case.kernel.fn.__name__ for case in CASES}
    assert {one.fn.__name__ for one in kernels} - called <= compiled
