"""The device database says what makers say, and keeps dense and sparse, promised and measured apart."""

from __future__ import annotations

import pytest

from strata.hardware.specs import DEVICES, device, recognize


def test_measured_figures_are_preferred_and_promised_ones_stay() -> None:
    h200 = device("h200")
    assert h200.ceiling("compute", "bfloat16").value == 800e12
    assert h200.ceiling("compute", "bfloat16", measured=False).value == pytest.approx(989.4e12)
    assert h200.ceiling("bandwidth").value == pytest.approx(4.28e12)
    assert h200.ceiling("bandwidth", measured=False).value == 4.8e12


@pytest.mark.parametrize("key", DEVICES)
def test_figures_are_complete_and_measured_below_promised(key: str) -> None:
    known = device(key)
    assert {"memory", "bandwidth", "host", "compute"} <= {figure.quantity for figure in known.figures}
    for figure in known.figures:
        assert figure.source
        assert figure.date.startswith("20")
        assert (figure.dtype is not None) == (figure.quantity == "compute")
        assert (figure.direction is not None) == (figure.quantity in ("bandwidth", "link", "host"))
        if figure.measured:
            assert figure.value <= known.ceiling(figure.quantity, figure.dtype, measured=False).value


def test_sparsity_doubles_what_datasheets_print() -> None:
    # The headline figures of the datasheets, in TFLOP/s with 2:4 sparsity.
    for key, dtype, headline in [
        ("h100", "bfloat16", 1979),
        ("h200", "float8", 3958),
        ("a100", "bfloat16", 624),
        ("b200", "float8", 9000),
        ("l40s", "float8", 1466),
        ("rtx4090", "bfloat16", 330.4),
    ]:
        sparse = [f.value for f in device(key).figures if f.sparse and f.dtype == dtype]
        assert sparse == [pytest.approx(headline * 1e12, rel=1e-3)]
        assert device(key).ceiling("compute", dtype, measured=False).value == pytest.approx(headline * 5e11, rel=1e-3)


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(ValueError, match="'h300' is unknown; known are h200, h100, a100"):
        device("h300")
    with pytest.raises(ValueError, match=r"no compute in float8 is recorded for a100; known: bfloat16"):
        device("a100").ceiling("compute", "float8")


def test_products_are_recognized_by_the_name_that_drivers_give() -> None:
    assert recognize("NVIDIA H200") is device("h200")
    assert recognize("NVIDIA H200 NVL") is None  # another board with other figures
    assert recognize("Intel(R) Xeon(R)") is None
