"""2:4 sparsity: which weights stay, how they are compressed, and what parts and joins of them stand for."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from strata.kernels.quant.packed import dense, join, pack, part_of
from strata.kernels.quant.schemes import SPARSITIES, sparsity_of
from strata.kernels.quant.two_of_four import compress, expand, is_two_of_four, least_two_of_four

SCHEME = SPARSITIES["2:4"]


def sparse(out: int, width: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(out, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return drawn.masked_fill(least_two_of_four(drawn.abs()), 0.0)


def test_the_two_least_of_four_by_hand() -> None:
    scores = torch.tensor([[4.0, 1.0, 3.0, 2.0, 5.0, 5.0, 5.0, 5.0], [0.0, 9.0, 0.0, 8.0, 1.0, 2.0, 3.0, 4.0]])
    wanted = [[0, 1, 0, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 1, 0, 0]]
    assert least_two_of_four(scores).int().tolist() == wanted


def test_every_pattern_of_two_fours_comes_back() -> None:
    kept = [set(places) for count in range(3) for places in combinations(range(4), count)]
    rows = [[float(1 + c) if c in a else 0.0 for c in range(4)] + [-float(1 + c) if c in b else 0.0 for c in range(4)]
            for a in kept for b in kept]  # fmt: skip
    weight = torch.tensor(rows)
    values, places = compress(weight)
    assert values.shape == (len(rows), 4)
    assert (places.dtype, places.shape) == (torch.uint8, (len(rows), 1))
    assert torch.equal(expand(values, places), weight)
    one = kept.index({1, 3}) * len(kept) + kept.index({0, 1})
    # Places 1 and 3, then 0 and 1, the lowest bits first.
    assert (values[one].tolist(), places[one].tolist()) == ([2.0, 4.0, -1.0, -2.0], [1 | 3 << 2 | 0 << 4 | 1 << 6])


def test_values_and_places_are_those_of_torch() -> None:
    from torch.sparse import _semi_structured_conversions as conversions

    weight = sparse(64, 128)
    values, meta = conversions.sparse_semi_structured_from_dense_cutlass(weight)
    found, places = compress(weight)
    assert torch.equal(found, values)
    order = conversions._calculate_meta_reordering_scatter_offsets(64, 8, torch.int16, weight.device)
    assert torch.equal(places.view(torch.int16).flatten(), meta.flatten()[order])


def test_what_is_not_sparse_is_refused() -> None:
    assert is_two_of_four(sparse(3, 16))
    assert not is_two_of_four(torch.ones(3, 16))
    assert not is_two_of_four(torch.zeros(3, 6))
    with pytest.raises(ValueError, match="3 of four weights in a row are not zero"):
        pack(torch.tensor([[1.0, 2.0, 0.0, 3.0] + [0.0] * 4]), SCHEME)
    with pytest.raises(ValueError, match="width 12 is not a multiple of 8"):
        pack(torch.zeros(2, 12), SCHEME)
    with pytest.raises(ValueError, match="sparsity = '1:2' is not known; accepted is '2:4'"):
        sparsity_of("1:2")


def test_parts_and_joined_weights() -> None:
    one, other = sparse(6, 48), sparse(4, 48, seed=1)
    packed = pack(one, SCHEME)
    assert packed.shape == (6, 48)
    assert packed.nbytes == 6 * (24 * 2 + 6)
    assert torch.equal(dense(packed, torch.bfloat16), one)
    assert torch.equal(dense(join([packed, pack(other, SCHEME)])), torch.cat([one, other]).float())
    for rows, columns in (((1, 4), (0, 48)), ((0, 6), (16, 40)), ((2, 3), (24, 48))):
        part = part_of(packed, rows, columns)
        assert torch.equal(dense(part, torch.bfloat16), one[slice(*rows), slice(*columns)])
    with pytest.raises(ValueError, match="columns 0 to 12 divide eight"):
        part_of(packed, (0, 6), (0, 12))
