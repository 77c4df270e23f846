"""Attention of a decode step is what plain PyTorch makes of each sequence alone; its cost is counted by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.decode_tile import DecodeTile, decode_tile
from strata.kernels.attention.spec import AttentionSpec, HeadsSpec, Sequences
from strata.kernels.rotary.rope import rope_angles
from strata.kernels.state.paged import PagedKV

PAGE, PAGES, LAYERS = 4, 12, 2


def step(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> tuple[tuple[object, ...], PagedKV]:
    """The arguments but for the last, and their pages: full of NaN where no token was written before."""
    order, at = torch.randperm(PAGES).int(), 0
    tables = torch.zeros(len(lengths), 4, dtype=torch.int32)
    shape = (PAGES, PAGE, kv_heads, head_dim)
    keys, values = (tuple(torch.full(shape, torch.nan, dtype=dtype) for _ in range(LAYERS)) for _ in "kv")
    slots = []
    for row, length in enumerate(lengths):
        count = -(-length // PAGE)
        tables[row, :count] = order[at : at + count]
        at += count
        places = (tables[row, :count, None] * PAGE + torch.arange(PAGE)).flatten()[:length].tolist()
        slots.append(places[-1] if places else -1)
        for pool in (keys[1], values[1]):
            pool.flatten(0, 1)[places[:-1]] = torch.randn(max(0, length - 1), kv_heads, head_dim).to(dtype)
    lengths_and_slots = (torch.tensor(x, dtype=torch.int32) for x in (lengths, slots))
    pages = PagedKV(keys, values, tables, *lengths_and_slots)
    product = torch.randn(len(lengths), (heads + 2 * kv_heads) * head_dim + 5).to(dtype)[:, 5:]
    weights = [torch.randn(head_dim).to(dtype) if normed else None for _ in "qk"]
    angles = rope_angles((pages.lengths - 1).clamp(min=0), torch.randn(20, head_dim))
    offsets = torch.arange(len(lengths) + 1, dtype=torch.int32)
    return (product, *weights, *angles, Sequences(offsets, 1, pages), HeadsSpec(1, heads, kv_heads, 1e-5)), pages


def twin(given: tuple[object, ...], pages: PagedKV, scale: float, window: int | None) -> list[Tensor | None]:
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
            out.append((key @ finished(q[head], q_weight).double() * scale).softmax(0) @ value)
        results.append(torch.stack(out))
    return results


def copied(pages: PagedKV) -> PagedKV:
    keys, values = (tuple(pool.clone() for pool in pools) for pools in (pages.keys, pages.values))
    return PagedKV(keys, values, pages.tables, pages.lengths, pages.slot_mapping)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 6), (3, 3, 16), (7, 1, 8)])
@pytest.mark.parametrize("way", ["reference", "bound"])
def test_each_sequence_is_what_it_is_alone(
    way: str, heads: int, kv_heads: int, head_dim: int, normed: bool, window: int | None
) -> None:
    given, pages = step([1, 9, 4, 0, 5, 16, 0], heads, kv_heads, head_dim, normed, torch.float32)
    alone = copied(pages)
    run = decode_attention.reference if way == "reference" else decode_attention.bind("cpu")
    found = run(*given, AttentionSpec(1, 0.3, window))
    assert found.shape == (7, heads, head_dim)
    assert found.isfinite().all()
    for row, expected in enumerate(twin(given, alone, 0.3, window)):
        if expected is not None:
            torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip((*pages.keys, *pages.values), (*alone.keys, *alone.values), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_in_bf16_new_keys_are_rounded_before_they_are_scored() -> None:
    given, pages = step([1, 9, 4], 4, 2, 16, True, torch.bfloat16)
    alone = copied(pages)
    found = decode_attention(*given, AttentionSpec(1, 0.3))
    assert found.dtype == torch.bfloat16
    expected = torch.stack([row for row in twin(given, alone, 0.3, None) if row is not None])
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


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
