"""Into which tiles and splits the keys of decoding sequences are divided."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.kernels.grid_sizes import next_power_of_2

MAX_SPLITS = 64


@dataclass(frozen=True)
class DecodeTile:
    """How the keys of a sequence are divided.

    keys: of a block; warps, stages: of a program and of its pipeline. split: the fewest keys that are worth a program
    of their own, a multiple of `keys`. splits: into how many a sequence may be divided; longer ones have larger splits.
    early: whether the fused kernel is launched before the kernel ahead has ended (programmatic dependent launch).
    apart: whether splits are joined by a kernel behind, if there are several, not by the last of their programs.
    """

    keys: int
    warps: int
    stages: int
    split: int
    splits: int
    early: bool = True
    apart: bool = False

    def __post_init__(self) -> None:
        if self.split % self.keys or self.splits < 1:
            raise ValueError(f"a split holds whole blocks and a sequence at least one split: {self}")
        if self.apart and self.splits > MAX_SPLITS:
            raise ValueError(f"a kernel behind joins at most {MAX_SPLITS} splits: {self}")

    @property
    def has_kernel_behind(self) -> bool:
        return self.apart and self.splits > 1


# Query heads to a KV head from which fewer splits pay: each leaves more to join, and fewer are joined at a time. Whole
# steps of 8B (four) and 0.6B (two) on an H200, pools in 16 bits.
_WIDE_GROUP = 4
# Programs enough for every multiprocessor, more than once: of wide groups sequences, KV heads and splits, as many as
# find a place at once; else sequences and splits for each KV head. Where only some of the sequences decode, programs of
# the others take no place, and the latter holds for wide groups, too: four of 16,000 keys beside a prompt of 8B had 4
# splits each otherwise, by prediction 7.2 ms of a step, and take 3.5.
_WIDE_PROGRAMS, _PROGRAMS = 528, 512
# Of up to so many sequences splits are joined by a kernel behind: it costs a launch, and of more the programs that join
# keep each other's processors busy.
_WIDE_APART, _APART = 4, 2
# Even where there are many sequences, one may be much longer than the others.
_MIN_SPLITS = 4
# For up to so many sequences: the fewest keys of a split, keys of a block, warps, stages, early. Measured in whole
# steps on an H200: few sequences have many short splits, of many none is divided if it is not long, because a split
# costs a join. An early start pays where the kernel ahead leaves room.
_PLAIN = (
    (2, (64, 64, 4, 2, True)),
    (4, (128, 32, 2, 3, True)),
    (12, (128, 64, 4, 3, True)),
    (40, (256, 32, 2, 3, False)),
    (100, (768, 64, 2, 2, True)),
    (1 << 30, (1024, 64, 4, 3, True)),
)
_WIDE = tuple((limit, (128, 32, 2, 3, True) if limit == 12 else sizes) for limit, sizes in _PLAIN)
# The same of pools in 8 bits that are multiplied in float16, of the kernel alone on an H200: with half the bytes for as
# many instructions a key, few warps share what a block takes beside its keys.
_ROUNDED = (
    (2, (128, 64, 4, 2, True)),
    (12, (256, 64, 2, 3, True)),
    (40, (512, 64, 2, 2, False)),
    (100, (1536, 64, 2, 4, True)),
    (1 << 30, (1024, 32, 1, 3, True)),
)


def multiplies_in_float16(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether decodes over pools in 8 bits are multiplied in float16 (`decode_quantized.py`): the kernel's own rule."""
    return dtype == torch.bfloat16 and head_dim == next_power_of_2(head_dim) and head_dim >= 64


def decode_tile(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    sequences: int,
    most: int,
    *,
    rounded: bool = False,
    some: bool = False,
) -> DecodeTile:
    """The tile for so many sequences of at most `most` keys.

    rounded: of pools in 8 bits. some: only some of the sequences decode, which the device alone knows, and the programs
    of the others end at once.
    """
    group = heads // kv_heads
    in_float16 = rounded and multiplies_in_float16(head_dim, dtype)
    wide = group >= _WIDE_GROUP and not rounded
    rule = _ROUNDED if in_float16 else _WIDE if wide else _PLAIN
    split, keys, warps, stages, early = next(sizes for limit, sizes in rule if sequences <= limit)
    if rounded and not in_float16:
        warps = 4  # fewer have no room for keys and values in 8 bits beside what they become
    own = max(1, sequences)
    wanted = _WIDE_PROGRAMS // (own * kv_heads) if wide and not some else _PROGRAMS // own
    splits = min(MAX_SPLITS, max(_MIN_SPLITS, wanted), max(1, -(-most // split)))
    if dtype == torch.float32:
        return DecodeTile(keys=16, warps=8, stages=2, split=split, splits=splits)
    if head_dim > 128:
        keys, warps, stages = 32, 8 if group > 16 else 4, 3
    elif group >= 16:
        keys, warps, stages = 32, 4, 3
    return DecodeTile(keys, warps, stages, split, splits, early, sequences <= (_WIDE_APART if wide else _APART))


def shape_constants(group: int, head_dim: int, tile: DecodeTile) -> dict[str, int]:
    """The constants of the kernel that follow from heads and tile."""
    group_pad = next_power_of_2(group)
    head_pad = max(16, next_power_of_2(head_dim))  # a matrix instruction sums over 16 columns at least
    return {
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "ROWS": max(16, group_pad),
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "BLOCK_N": tile.keys,
        # As many as registers hold.
        "JOINED": 0 if tile.apart else min(16, max(1, 1024 * tile.warps // (group_pad * head_pad))),
    }
