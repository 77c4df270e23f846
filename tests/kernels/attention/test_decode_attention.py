"""Attention of a decode step is what plain PyTorch makes of each sequence alone; its cost is counted by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.decode_tile import DecodeTile, decode_tile
from strata.kernels.attention.spec import AttentionSpec, HeadsSpec, Sequences
from strata.kernels.state.paged import PagedKV
from tests.kernels.attention.cases import copied, decode_step
from tests.kernels.launches.noted import empty as meta
from tests.kernels.linear.assembly import float16_halves, run

PAGE = 4


def twin(
    given: tuple[Any, ...], pages: PagedKV, scale: float, window: int | None, sinks: Tensor | None = None
) -> list[Tensor | None]:
    """Sequence after sequence and head after head, in float64 once the new keys are rounded; writes into the pages."""
    product, q_weight, k_weight, cos, sin, _, (_, heads, kv_heads, eps) = given
    dim, results = cos.shape[-1], []
    for row, (length, slot) in enumerate(zip(pages.lengths.tolist(), pages.slot_mapping.tolist(), strict=True)):
        if not length:
            results.append(None)
            continue

        def finished(x: Tensor, weight: Tensor | None, row: int = row) -> Tensor:
            wide = x.float()
            if weight is not None:
                wide = (wide / (wide.square().mean() + eps).sqrt()).to(x.dtype).float() * weight.float()
                wide = wide.to(x.dtype).float()
            c, s = cos[row, 0, : dim // 2], sin[row, 0, dim // 2 :]
            first, second = wide.chunk(2)
            return torch.cat((first * c - second * s, second * c + first * s)).to(x.dtype)

        q, k, v = product[row].view(-1, dim).split((heads, kv_heads, kv_heads))
        for head in range(kv_heads):
            pages.keys[1][slot // PAGE, slot % PAGE, head] = finished(k[head], k_weight)
            pages.values[1][slot // PAGE, slot % PAGE, head] = v[head]
        out = []
        for head in range(heads):
            positions = range(0 if window is None else max(0, length - window), length)
            places = [(int(pages.tables[row, p // PAGE]), p % PAGE) for p in positions]
            key, value = (
                torch.stack([pool[1][page, place, head * kv_heads // heads] for page, place in places]).double()
                for pool in (pages.keys, pages.values)
            )
            scores = key @ finished(q[head], q_weight).double() * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            out.append(scores.softmax(0)[: len(value)] @ value)
        results.append(torch.stack(out))
    return results


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 6), (3, 3, 16), (7, 1, 8)])
@pytest.mark.parametrize("way", ["reference", "bound"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_each_sequence_is_what_it_is_alone(
    with_sinks: bool, way: str, heads: int, kv_heads: int, head_dim: int, normed: bool, window: int | None
) -> None:
    given, pages = decode_step([1, 9, 4, 0, 5, 16, 0], heads, kv_heads, head_dim, normed, torch.float32)
    alone = copied(pages)
    attend = decode_attention.reference if way == "reference" else decode_attention.bind("cpu")
    sinks = torch.randn(heads) * 10 if with_sinks else None
    found = attend(*given, AttentionSpec(1, 0.3, window), sinks)
    assert found.shape == (7, heads, head_dim)
    assert found.isfinite().all()
    for row, expected in enumerate(twin(given, alone, 0.3, window, sinks)):
        if expected is not None:
            torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip((*pages.keys, *pages.values), (*alone.keys, *alone.values), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_in_bf16_new_keys_are_rounded_before_they_are_scored() -> None:
    given, pages = decode_step([1, 9, 4], 4, 2, 16, True, torch.bfloat16)
    alone = copied(pages)
    found = decode_attention(*given, AttentionSpec(1, 0.3))
    assert found.dtype == torch.bfloat16
    expected = torch.stack([row for row in twin(given, alone, 0.3, None) if row is not None])
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("window", "seen"), [(None, 5 + 1 + 30), (4, 4 + 1 + 4)])
@pytest.mark.parametrize("normed", [False, True])
def test_cost_is_the_hand_count(normed: bool, window: int | None, seen: int) -> None:
    """Three tokens of 4 query heads and 2 KV heads of 16 elements, two bytes an element."""
    weight, angles, index = (
        meta(16) if normed else None,
        meta(3, 1, 16, dtype=torch.float32),
        meta(3, dtype=torch.int32),
    )
    pages = PagedKV((meta(9, 16, 2, 16),), (meta(9, 16, 2, 16),), index[:, None], index, index)
    step, heads = Sequences(meta(4, dtype=torch.int32), 1, pages), HeadsSpec(0, 4, 2, 1e-5)
    given = (meta(3, 8 * 16), weight, weight, angles, angles, step, heads, AttentionSpec(0, 1.0, window))
    token, row = 2 * 2 * 16 * 2, 4 * 16 * 2  # key and value of a token, queries of a token
    weights = 2 * 16 * 2 if normed else 0
    assert decode_attention.cost(*given, workload=Workload((1, 1, 1), (5, 1, 30))) == Cost(
        flops=3 * 6 * 16 * (7 if normed else 3) + 4 * 4 * 16 * seen,
        # The product, half of cosines and sines, slots, and the keys and values that earlier steps have left.
        read=3 * (row + token) + 3 * 16 * 4 + 3 * 4 + weights + (seen - 3) * token,
        written=3 * (row + token),
        weights=weights,
        cached=seen * token,
    )
    workload = Workload((1, 1, 1), (5, 1, 30))
    more = decode_attention.cost(*given, meta(4), workload=workload) - decode_attention.cost(*given, workload=workload)
    assert more == Cost(read=4 * 2, weights=4 * 2), "a number a head, of sinks"
    result = decode_attention.meta(*given)
    assert result.is_meta
    assert (result.shape, result.dtype) == ((3, 4, 16), torch.bfloat16)


def test_tiles_divide_every_sequence() -> None:
    for group in (1, 4, 16, 32):
        for head_dim in (64, 128, 256):
            for sequences in (1, 8, 9, 64, 512, 4096):
                for most, some in itertools.product((1, 64, 1000, 40960), (False, True)):
                    tile = decode_tile(8 * group, 8, head_dim, torch.bfloat16, sequences, most, some=some)
                    assert tile.splits * tile.split < most + tile.split or tile.splits == 1
                    assert tile.splits <= 64
                    # Those that end at once leave their places to more splits of the others, in the same tiles.
                    every = decode_tile(8 * group, 8, head_dim, torch.bfloat16, sequences, most)
                    assert every.splits <= tile.splits
                    assert tile == replace(every, splits=tile.splits)
    with pytest.raises(ValueError, match="whole blocks"):
        DecodeTile(keys=64, warps=4, stages=3, split=96, splits=1)
    with pytest.raises(ValueError, match="joins at most 64 splits"):
        DecodeTile(keys=64, warps=4, stages=3, split=64, splits=65, apart=True)


def signed(word: int) -> list[int]:
    return [byte - 256 if byte > 127 else byte for byte in word.to_bytes(4, "little")]


def test_assembly_makes_numbers_of_int8_by_halves_and_by_pairs() -> None:
    decode_rounded = pytest.importorskip("strata.kernels.attention.decode_quantized")

    def text_of(name: str) -> str:
        found = getattr(decode_rounded, name)
        return str(getattr(found, "value", found))

    drawn = random.Random(3)
    for _ in range(70):
        first, second = (drawn.getrandbits(32) for _ in "ab")
        low, high = run(text_of("_INT8_HALVES"), first, 2)
        assert float16_halves(low) + float16_halves(high) == signed(first)
        for place in range(4):
            (pair,) = run(text_of(f"_INT8_{place}"), first, 1, second)
            assert float16_halves(pair) == [signed(first)[place], signed(second)[place]]
