"""Resident blocks and waves, counted by hand from CUDA's tables of compute capability 9.0 and 8.9."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.hardware.figures import Cuda
from strata.hardware.specs import device

pytest.importorskip("triton")

from strata.kernels.compiling.launched import occupancy


def cuda(name: str) -> Cuda:
    found = device(name).cuda
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "registers", "shared", "warps", "blocks", "expected"),
    [
        # 65,536 registers hold 16 warps of 4,096 (128 a thread): two blocks of 8; 264 of them on 132 multiprocessors.
        ("h200", 128, 0, 8, 264, (2, 16 / 64, "registers", 1.0)),
        # 129 a thread are 4,128, given as 4,352: 15 warps, of which quarters hold 12: one block of 8.
        ("h200", 129, 0, 8, 264, (1, 8 / 64, "registers", 2.0)),
        # 32 registers: 64 warps; 16 blocks of 4 warps by threads.
        ("h100", 32, 0, 4, 1056, (16, 1.0, "threads", 0.5)),
        # 228 KiB hold four blocks of 56 KiB and the system's 1 KiB, and no four of one byte more.
        ("h200", 32, 56 * 1024, 4, 132, (4, 16 / 64, "shared memory", 0.25)),
        ("h200", 32, 56 * 1024 + 1, 4, 132, (3, 12 / 64, "shared memory", 1 / 3)),
        # The largest of all, 227 KiB.
        ("h200", 168, 227 * 1024, 8, 1, (1, 8 / 64, "registers", 1 / 132)),
        ("h200", 16, 0, 1, 32 * 132, (32, 32 / 64, "blocks", 1.0)),
        # An L4 holds 1,536 threads and 24 blocks, of 58 multiprocessors.
        ("l4", 16, 0, 1, 58, (24, 24 / 48, "blocks", 1 / 24)),
        ("l4", 40, 0, 4, 58, (12, 1.0, "threads", 1 / 12)),
    ],
)
def test_by_hand(
    name: str, registers: int, shared: int, warps: int, blocks: int, expected: tuple[int, float, str, float]
) -> None:
    found = occupancy(cuda(name), registers, shared, warps, blocks)
    assert (found.resident, found.warps, found.limit) == expected[:3]
    assert found.waves == pytest.approx(expected[3])


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="no block of 32 warps with 128 registers"):
        occupancy(cuda("h200"), 128, 0, 32, 1)
    with pytest.raises(ValueError, match="232449 shared bytes fits"):
        occupancy(cuda("h200"), 32, 227 * 1024 + 1, 4, 1)
    assert occupancy(replace(cuda("h200"), processors=1), 32, 0, 4, 16).waves == 1.0
