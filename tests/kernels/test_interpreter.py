"""What the interpreter computes instead of a GPU has what tests of kernels rely on, whatever library numpy has."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.interpreter import product


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bits_of_a_row_depend_on_neither_its_place_nor_the_others(dtype: type) -> None:
    rng = np.random.default_rng(0)
    b, row = rng.standard_normal((24, 17)).astype(np.float16), rng.standard_normal(24).astype(np.float16)
    alone = product(row[None], b, dtype)
    assert np.abs(alone - row.astype(np.float64) @ b.astype(np.float64)).max() < 1e-5
    for rows in (2, 3, 16, 19):
        for at in range(rows):
            a = rng.standard_normal((rows, 24)).astype(np.float16)
            a[at] = row
            assert product(a, b, dtype)[at].tobytes() == alone.tobytes()


def test_products_of_a_batch_are_those_of_its_parts() -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 3, 5, 5))
    assert np.array_equal(product(a, b, np.float64), [product(*one, np.float64) for one in zip(a, b, strict=True)])
