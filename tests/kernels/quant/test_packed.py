"""Packed weights and 2:4 sparsity against counts by hand, a search through all values of a kind, and torch."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor

from strata.kernels.quant.quantized import (
    QuantizedWeight,
    Scheme,
    dense,
    join,
    joinable,
    pack,
    round_activations,
    shard_of,
    to_nearest,
)
from strata.kernels.quant.schemes import SCHEMES, SPARSITIES, scheme_of, sparsity_of
from strata.kernels.quant.two_of_four import compress, expand, is_two_of_four, smallest_two_of_four

KINDS = {
    "int8": [float(one) for one in range(-127, 128)],
    "int4": [float(one) for one in range(-8, 8)],
    "e2m1": [sign * one for one in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0) for sign in (1, -1)],
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0).tolist(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_rounded_to_the_nearest_and_ties_to_even(kind: str) -> None:
    torch.manual_seed(0)
    known = torch.tensor(sorted(set(KINDS[kind])))
    scaled = torch.cat([torch.randn(400) * known.max() / 2, (known[1:] + known[:-1]) / 2])
    nearest = to_nearest(scaled, kind)
    assert set(nearest.tolist()) <= set(known.tolist())
    assert torch.equal((nearest - scaled).abs(), (known - scaled[:, None]).abs().amin(1))
    if kind == "e2m1":
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0])
        assert to_nearest(ties, kind).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -4.0]


def test_int4_by_hand() -> None:
    weight = pack(torch.tensor([[7.5, -7.5, 1.0, 0.4], [0.0, 0.0, 0.0, 3.75]]), Scheme("int4", 1, 2))
    assert weight.scales.tolist() == [[1.0, pytest.approx(1 / 7.5)], [pytest.approx(0, abs=1e-30), 0.5]]
    # 7.5 is cut to 7 and -7.5 goes to -8: codes 15 and 0; 1.0 and 0.4 by 1 / 7.5: 7.5 is cut to 7, and 3.
    assert weight.values.tolist() == [[0x0F, 0xBF], [0x88, 0xF8]]
    assert dense(weight)[0].tolist() == [7.0, -8.0, pytest.approx(7 / 7.5), pytest.approx(3 / 7.5)]
    assert dense(weight)[1].tolist() == [0.0, 0.0, 0.0, 3.5]


def test_zeros_scales_of_rows_and_order_by_hand() -> None:
    values = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)  # 1, 2, 3, 4
    scales, zeros = torch.tensor([[2.0, 10.0]]), torch.tensor([[1, 5]], dtype=torch.uint8)
    order = torch.tensor([3, 1, 0, 2], dtype=torch.int32)
    weight = QuantizedWeight.of(Scheme("int4", 1, 2), values, scales, zeros, torch.tensor([[0.5]]), order)
    # (1 - 1) 2, (2 - 1) 2, (3 - 5) 10, (4 - 5) 10, halved, are columns 3, 1, 0 and 2.
    assert dense(weight).tolist() == [[-10.0, 1.0, -5.0, 0.0]]
    x = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    unordered = weight._replace(order=None)
    assert torch.equal(x @ dense(weight).t(), x[:, order.long()] @ dense(unordered).t())


def test_powers_of_two_of_mxfp4_by_hand() -> None:
    groups = torch.zeros(1, 64)
    groups[0, 0], groups[0, 1], groups[0, 32] = 5.0, 0.3, -0.75
    weight = pack(groups, SCHEMES["mxfp4"])
    # 5 is between 2^2 and 2^3, 0.75 between 2^-1 and 2^0: what is 2^2 in E2M1 is that power.
    assert weight.scales.tolist() == [[127, 127 - 3]]
    assert dense(weight)[0, [0, 1, 32]].tolist() == [4.0, 0.5, -0.75]


@pytest.mark.parametrize("name", SCHEMES)
def test_no_value_is_further_than_half_a_step(name: str) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 192) * torch.rand(70, 1) * 5
    packed, scheme = pack(weight, SCHEMES[name]), SCHEMES[name]
    assert packed.shape == weight.shape
    rows, columns = scheme.rows or 70, scheme.columns or 192
    # Of the largest in a group: half a step next to it, and for powers of two what lies beyond 6 of 8.
    most = {"e4m3": 16 / 448, "int8": 0.5 / 127, "int4": 0.5 / 7.5, "e2m1": 1 / 6}[scheme.values]
    most = {"mxfp4": 0.25, "nvfp4": 1 / 6 + 0.07}.get(name, most)
    for row in range(0, 70, rows):
        for column in range(0, 192, columns):
            box = slice(row, row + rows), slice(column, column + columns)
            group = weight[box]
            assert (dense(packed)[box] - group).abs().max() <= group.abs().max() * most * 1.001


@pytest.mark.parametrize("name", SCHEMES)
def test_parts_of_any_grid_are_joined_to_the_whole(name: str) -> None:
    torch.manual_seed(2)
    packed = pack(torch.randn(200, 384), SCHEMES[name])
    whole = dense(packed)
    for cuts in ((0, 72, 136, 200), (0, 128, 200), (0, 128, 150, 200)):
        pieces = [shard_of(packed, bounds, (0, 384)) for bounds in pairwise(cuts)]
        assert all(joinable(pieces[0], piece) for piece in pieces)
        assert torch.equal(dense(join(pieces)), whole)
    for low, high in ((0, 192), (96, 192), (360, 384)):
        assert torch.equal(dense(shard_of(packed, (10, 74), (low, high))), whole[10:74, low:high])


def test_what_cannot_be_divided_is_refused() -> None:
    weight = pack(torch.randn(8, 64), SCHEMES["mxfp4"])
    with pytest.raises(ValueError, match="columns 3 to 64 divide a byte"):
        shard_of(weight, (0, 8), (3, 64))
    ordered = weight._replace(order=torch.arange(64))
    with pytest.raises(ValueError, match="order of its own"):
        shard_of(ordered, (0, 8), (0, 32))
    with pytest.raises(ValueError, match="odd number"):
        pack(torch.randn(8, 63), SCHEMES["int4"])
    with pytest.raises(ValueError, match="'fp7' is not known; accepted are 'fp8', 'fp8_block'"):
        scheme_of("fp7")


def test_activations_are_rounded_by_rows_or_blocks() -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 3, 200, dtype=torch.bfloat16)
    plain = x.float()
    for name, width in (("fp8", 200), ("int8", 200), ("fp8_block", 128)):
        seen = round_activations(x, SCHEMES[name])
        for low in range(0, 200, width):
            group = plain[..., low : low + width]
            scale = group.abs().amax(-1, keepdim=True) / (127 if name == "int8" else 448)
            scaled = group * (1 / scale)
            steps = scaled.round() if name == "int8" else scaled.to(torch.float8_e4m3fn).float()
            torch.testing.assert_close(seen[..., low : low + width], steps * scale, rtol=1e-6, atol=0)
    assert torch.equal(round_activations(x, SCHEMES["int4"]), plain)


SCHEME = SPARSITIES["2:4"]


def sparse(out: int, width: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(out, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return drawn.masked_fill(smallest_two_of_four(drawn.abs()), 0.0)


def test_the_two_least_of_four_by_hand() -> None:
    scores = torch.tensor([[4.0, 1.0, 3.0, 2.0, 5.0, 5.0, 5.0, 5.0], [0.0, 9.0, 0.0, 8.0, 1.0, 2.0, 3.0, 4.0]])
    wanted = [[0, 1, 0, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 1, 0, 0]]
    assert smallest_two_of_four(scores).int().tolist() == wanted


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
        part = shard_of(packed, rows, columns)
        assert torch.equal(dense(part, torch.bfloat16), one[slice(*rows), slice(*columns)])
    with pytest.raises(ValueError, match="columns 0 to 12 divide eight"):
        shard_of(packed, (0, 6), (0, 12))
