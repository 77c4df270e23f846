"""What one device lends another: calls by hand-counted rooflines, figures in the ratio of makers' promises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.cli.main import app
from strata.cost.loan import Loan
from strata.hardware.figures import Cuda
from strata.hardware.measured import write
from strata.hardware.prediction import Call
from strata.hardware.specs import device

H100 = Loan(device("h200"), device("h100"))
# A memory of 4.8 TB/s and one of 3.35.
RATIO = 3.35 / 4.8


def test_what_was_borrowed_is_not_called_measured() -> None:
    shown = CliRunner().invoke(app, ["graph", "0.6B", "--hardware", "h100-nvl"], catch_exceptions=False).stdout
    assert "from calls and ceilings borrowed from NVIDIA H200, " in shown
    assert "3.48 TB/s (memory, read + written), borrowed: as on h200: " in shown
    told = CliRunner().invoke(app, ["graph", "0.6B", "--hardware", "h100-nvl", "--json"], catch_exceptions=False).stdout
    assert json.loads(told)["predicted_from"]["measured"] == 0


def test_only_a_device_with_the_same_multiprocessors_borrows(tmp_path: Path) -> None:
    assert Loan.to(device("h100")) == H100
    assert Loan.to(device("h100-nvl")) is not None  # 132 as well
    for key in ("h200", "h100-pcie", "a100", "b200", "mi300x", "epyc-9654"):
        assert Loan.to(device(key)) is None, key
    other = replace(device("h100"), cuda=Cuda((10, 0), 227 * 1024, 132))
    assert Loan.to(other) is None
    assert Loan.to(device("h100"), tmp_path) is None  # nobody has calls
    write("NVIDIA H100 80GB HBM3", "a benchmark", {}, tmp_path)
    assert Loan.to(device("h100"), tmp_path) is None  # it has a file of its own
    lent = Loan.to(device("h200"), tmp_path)
    assert lent is not None
    assert lent.lender.key == "h100"


def test_beyond_the_start_of_a_kernel_calls_keep_their_utilization() -> None:
    kernel = 1.15e-6  # of the H200 in a graph
    rows, out, width = 1, 4096, 4096  # memory takes longest
    products: list[Call] = [
        ("product", "bfloat16", (rows, out, width), 10e-6),
        ("product", "bfloat16", (8192, out, width), 400e-6),  # products do
        ("product", "float4", (1, out, width), 10e-6),  # of which neither has a peak
        ("another", "bfloat16", (1,), 10e-6),
    ]
    # As quick as memory is, so that nothing is beyond it, and one that takes half a microsecond more.
    copies: list[Call] = [("traffic", "bfloat16", (48_000_000,), 10e-6), ("traffic", "bfloat16", (4_800_000,), 1.5e-6)]
    norms: list[Call] = [("traffic", "bfloat16", (1000,), 2e-6)]
    found = H100.calls({"linear": products, "rms_norm": norms, "copy": copies, "other": products[3:]})
    assert found == {
        "linear": [
            ("product", "bfloat16", (rows, out, width), pytest.approx(kernel + (10e-6 - kernel) / RATIO)),
            ("product", "bfloat16", (8192, out, width), pytest.approx(400e-6)),
        ],
        "rms_norm": [("traffic", "bfloat16", (1000,), pytest.approx(kernel + (2e-6 - kernel) / RATIO))],
        "copy": [
            ("traffic", "bfloat16", (48_000_000,), pytest.approx(10e-6 / RATIO)),
            ("traffic", "bfloat16", (4_800_000,), pytest.approx(0.5e-6 + 1e-6 / RATIO)),
        ],
    }


def test_sums_over_ranks_are_lent_between_links_that_are_as_fast() -> None:
    sums: list[Call] = [("nccl", "bfloat16", (2, 1024), 9e-6)]
    assert H100.calls({"all_reduce": sums}) == {"all_reduce": sums}
    nvl = Loan(device("h200"), device("h100-nvl"))  # 300 GB/s for 450
    assert nvl.calls({"all_reduce": sums}) == {}
    assert "nothing of messages" in str(nvl)
    assert "nothing of messages" not in str(H100)


def test_ceilings_are_lent_where_nothing_was_measured() -> None:
    promised = tuple(one for one in device("h100").figures if not one.measured)
    lent = Loan(device("h200"), replace(device("h100"), figures=promised)).device()
    assert lent.ceiling("bandwidth").value == pytest.approx(4.28e12 * RATIO)
    assert lent.ceiling("compute", "bfloat16").value == 800e12
    assert lent.ceiling("sustained", "bfloat16").value == 694e12
    assert lent.ceiling("step").value == device("h200").ceiling("step").value
    assert lent.ceiling("bandwidth").source.startswith("as on h200: ")
    assert {one.quantity for one in lent.figures if one.borrowed} == {
        *("bandwidth", "compute", "sustained", "launch", "kernel", "step")
    }
    assert lent.ceiling("memory").value == 80e9
    assert lent.ceiling("l2").value == 50 << 20  # that of the H200 is its own
    own = H100.device()  # of which all but its steps was measured
    assert {one.quantity for one in own.figures if one.borrowed} == {"step"}
    assert own.ceiling("bandwidth") == device("h100").ceiling("bandwidth")
    nvl = Loan(device("h200"), device("h100-nvl")).device()
    assert nvl.ceiling("compute", "bfloat16").value == pytest.approx(800e12 * 835.5 / 989.4)
