"""The kernels that add up over ranks, run by processes that share memory, against sums in the order of the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.kernels.norm.norm import rms_norm

pytest.importorskip("triton")

from .ranks import CALLS, DTYPES, GROUPS, SENT_COLUMNS, SHAPES, norm_inputs, numbers, sent_inputs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each rank of each group has left what it got."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.kernels.collective.ranks", str(folder)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.parametrize(("ranks", "dtype"), GROUPS)
def test_ranks_in_any_order_get_the_bits_of_the_reference(ranks: int, dtype: str, found: Path) -> None:
    kind = DTYPES[dtype]
    for rank in range(ranks):
        told = json.loads((found / f"{ranks}-{dtype}" / f"{rank}.json").read_text())
        for call in range(CALLS):
            for name, shapes in SHAPES.items():
                whole = torch.zeros(shapes[call % 2])
                for peer in range(ranks):
                    whole += numbers(peer, call, shapes[call % 2], kind).float()
                got = [torch.tensor(values, dtype=kind) for values in told[f"{name} {call}"]]
                if name == "gather_rows":
                    parts = [numbers(peer, call, shapes[call % 2], kind) for peer in range(ranks)]
                    assert torch.equal(got[0], torch.cat(parts)), (name, call, rank)
                elif name in ("gather_columns", "gather_keys"):
                    parts = [numbers(peer, call, shapes[call % 2], kind) for peer in range(ranks)]
                    assert torch.equal(got[0], torch.cat(parts, 1)), (name, call, rank)
                elif name == "scatter_sums":
                    assert torch.equal(got[0], whole.to(kind).chunk(ranks)[rank]), (name, call, rank)
                elif name.endswith("norm"):
                    residual, weight = norm_inputs(shapes[call % 2], kind)
                    total = whole.to(kind) + residual
                    assert torch.equal(got[0], total)
                    assert_near(got[1], rms_norm.reference(total, weight, 1e-5))
                else:
                    assert torch.equal(got[0], whole.to(kind)), (name, call, rank)


@pytest.mark.parametrize(("ranks", "dtype"), GROUPS)
def test_products_that_are_sent_are_added_up_and_normed(ranks: int, dtype: str, found: Path) -> None:
    """Between other messages; each rank has found the bits of a product that is stored and then sent."""
    norm_weight = numbers(51, 0, (1, SENT_COLUMNS), torch.half)[0]
    for rank in range(ranks):
        told = json.loads((found / f"{ranks}-{dtype}" / f"{rank}.json").read_text())
        for call in range(CALLS):
            given = [sent_inputs(peer, call) for peer in range(ranks)]
            residual = given[0][3].double()
            total = sum((x.double() @ weight.double().T for _, x, weight, _ in given), residual)
            got_total, got_normed = (torch.tensor(values, dtype=torch.double) for values in told[f"sent {call}"])
            torch.testing.assert_close(got_total, total, rtol=4e-3, atol=4e-3 * ranks)
            normed = rms_norm.reference(got_total, norm_weight.double(), 1e-5)
            torch.testing.assert_close(got_normed, normed, rtol=2e-3, atol=1e-3)


def test_rounded_parts_have_the_bits_of_their_references(found: Path) -> None:
    assert json.loads((found / "parts.json").read_text()) == [True] * 6


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-3 if found.dtype == torch.float16 else 1e-5, atol=1e-5)
