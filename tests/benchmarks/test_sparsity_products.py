"""`benchmarks.sparsity.products`: what a library refuses is a line, and times of all products are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.sparsity.products import DENSE, attempt, totals


def test_what_is_refused_has_the_text_of_its_error() -> None:
    def refused() -> Tensor:
        raise RuntimeError("cuSPARSELT not supported on your machine.\nmore")

    wanted = torch.ones(2, 3)
    assert attempt(lambda: refused, wanted, lambda call: 1.0) == {
        "error": "RuntimeError: cuSPARSELT not supported on your machine."
    }
    assert attempt(lambda: lambda: torch.ones(3, 2), wanted, lambda call: 1.0)["error"].endswith("[3, 2], not [2, 3]")
    made = attempt(lambda: lambda: 1.5 * wanted, wanted, lambda call: 2e-6)
    assert made == {"us": 2.0, "off": 0.5}


def test_only_ways_that_made_every_product_are_added_up() -> None:
    lines = [{"way": DENSE, "us": 30.0}, {"way": "2:4", "us": 20.0}, {"way": "half", "us": 1.0}]
    lines += [{"way": DENSE, "us": 10.0}, {"way": "2:4", "us": 12.0}, {"way": "half", "error": "no"}]
    assert list(totals(lines, 2)) == [
        {"product": "all", "way": DENSE, "us": 40.0, "over_bf16": 1.0},
        {"product": "all", "way": "2:4", "us": 32.0, "over_bf16": 1.25},
    ]
