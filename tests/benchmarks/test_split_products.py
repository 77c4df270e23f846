"""`benchmarks.split_products` without a GPU: plain products in place of kernels, and times by a rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import split_products
from benchmarks.split_products import measure, written
from strata.hardware.replay import Timing
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.linear.packed.split_product import SplitTile
from strata.kernels.quant.packed import PackedWeight, dense, pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES

HOPPER = DeviceLimits("any", (9, 0), SHARED_BYTES, 132)


def plain(
    values: Tensor, scales: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, tile: SplitTile
) -> Tensor:
    assert values.shape[0] == 136
    return (values.float() * scales @ dense(weight).t()).to(dtype)


def timed(calls: Sequence[partial[Any]], **_: Any) -> Timing:
    """Of a tile the less the more columns it has, of a layer one for each call."""
    calls[0]()
    first = calls[0].args[0]
    return Timing(((300 - first.columns if isinstance(first, SplitTile) else len(calls)) * 1e-6,))


def test_the_fastest_tiles_of_a_layer_are_told_beside_the_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_products, "split_product", plain)
    monkeypatch.setattr(split_products, "time_replayed", timed)
    monkeypatch.setattr(DeviceLimits, "of", lambda _: HOPPER)
    monkeypatch.setattr(type(round_rows), "bind", lambda own, _: own.reference)
    shapes = {"wide": (10240, 128), "long": (4096, 512)}
    held = {name: [pack(torch.randn(*shape), SCHEMES["int8"])] * 3 for name, shape in shapes.items()}
    *lines, layer = measure(held, 136)
    assert {line["product"] for line in lines} == set(shapes)
    assert all(line["us"] == 300 - line["tile"]["columns"] and line["error"] < 4e-3 for line in lines)
    for name in shapes:
        own = [line for line in lines if line["product"] == name]
        assert [line["chosen"] for line in own] == [True] + [False] * (len(own) - 1)
        least = min(own, key=lambda line: line["us"])
        assert layer["fastest"][name] == written(SplitTile(**least["tile"]))
    assert layer["chosen"]["wide"] == "SplitTile(192, 256, 1, 8, 4)"
    assert layer["chosen"]["long"] == "SplitTile(192, 64, 2, 4, 6)"
    assert layer["fastest"]["long"] == "SplitTile(128, 128, 2, 8, 6)"
    assert layer["sums"] == {"chosen": 300 - 256 + 236, "fastest": 300 - 256 + 172}
    assert layer["us"] == 3
