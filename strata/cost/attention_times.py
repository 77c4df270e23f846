"""How long attention over pages takes, from the programs that its kernels are divided into.

The constants were fitted to whole steps of Qwen3-0.6B, half of the cases of `benchmarks/results/h200_predictions.jsonl`
(the other half is held out in `tests/plan/test_predictions.py`), and to single calls of 8, 32, 128 and 256 decodes
(`h200_kernels.jsonl`); those of one and of 64 took up to a third less there than in steps. `behind` is the median of
decode steps of 0.6B (one sequence) and 8B (one and two) over 700 and 2,900 tokens; `softmax` was fitted to heads of 64,
prompts of 1B on an H100 in the same half of the cases (`h100_predictions.jsonl`). `repeated` is twice `bandwidth`: no
call was measured over keys that sequences share, and it was fitted to TPOT of served loads alone (docs/plan.md).
`program` of groups of four heads was fitted to half of the decodes of 8B (`h200_predictions_larger.jsonl`), `key` and
`overlaps` were chosen beside all of these and 1B's, and `beside` beside all small steps with prompts there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.decode_tile import DecodeTile, decode_tile

Prompts = Literal["pure_prefill", "pages", "tiles"]
# Queries of a tile of cuDNN's, rows of one of the kernel over pages, whose programs fit on a processor in pairs.
_LIBRARY_QUERIES = 128
_TILE_ROWS = 128
_TILE_PROGRAMS = 2
# That the constants were measured with.
_HEAD_DIM = 128
_FEW_WARPS = 2


@dataclass(frozen=True)
class Attends:
    """What runs the attention of a step. sequences: that get the programs of a decode, padding included. most: keys of
    the longest sequence there may be. prompts: by cuDNN over a step's own keys ("pure_prefill") or "pages", or by the
    kernel over pages in "tiles"; None: all sequences decode.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sequences: int
    most: int
    prompts: Prompts | None


@dataclass(frozen=True)
class GroupTimes:
    """Seconds of a decode's programs, by how many query heads a KV head has: `program` for each program of a processor
    that finds keys, `key` for each of the longest split where programs have too few warps to hide it. overlaps: such
    keys take no time beside that in which keys and values come from memory, only what they take longer.
    """

    program: float
    key: float
    overlaps: bool


@dataclass(frozen=True)
class AttentionTimes:
    """Seconds of one layer's attention on a device with so many `processors`.

    A decode takes `decode`, `join` for each split of the longest sequence and query head of a KV head (of 128), or
    `behind` for the kernel behind that joins all at once, the way of keys and values at `bandwidth`, and the times of
    `groups`, by the query heads of a KV head from which they hold. In a step with prompts every sequence of the
    captured size gets programs: each of a processor takes `empty`, all together `beside` at least, beside the longest
    split. Prompts take a start and a time for each key that a tile of queries sees, by what attends for them; of a
    key's time the share `softmax` is the same whatever the size of heads, the rest grows with it. Keys and values that
    another sequence of the step has read before come at `repeated`.
    """

    processors: int
    decode: float
    join: float
    behind: float
    bandwidth: float
    groups: dict[int, GroupTimes]
    empty: float
    beside: float
    softmax: float
    prompts: dict[Prompts, tuple[float, float]]
    repeated: float

    def seconds(self, cost: Cost, workload: Workload, attends: Attends) -> float | None:
        """None for a cost that is not of such attention: of a state, or of latents."""
        keys = sum(workload.total)
        of_key = 2 * attends.kv_heads * attends.head_dim * attends.dtype.itemsize
        if not (cost.flops and 0 < cost.cached <= keys * of_key) or cost.cached % of_key:
            return None
        held = cost.cached / (keys * of_key)  # less than all where there is a window
        if attends.prompts is None:
            return self.decode + sum(self._decodes(workload.total, held, attends))
        # The library knows no windows.
        kind = attends.prompts if held == 1 else "tiles"
        start, each = self.prompts[kind]
        steps = list(zip(workload.new, workload.total, strict=True))
        prompts = [(new, total) for new, total in steps if new > 1]
        pairs = sum(new * (total - new) + new * (new + 1) // 2 for new, total in steps)
        seen = min(1.0, cost.flops / (4 * attends.heads * attends.head_dim * pairs))
        size = self.softmax + (1 - self.softmax) * attends.head_dim / _HEAD_DIM
        found = start + each * size * seen * self._longest(prompts, attends, kind)
        if kind == "pure_prefill" or not attends.sequences:
            return found
        programs = attends.sequences * attends.kv_heads * _tile(attends).splits
        decodes = [total for new, total in steps if new == 1]
        shared, longest = self._decodes(decodes, held, attends)
        return found + shared + max(longest, self.beside, self.empty * programs / self.processors)

    def saved(self, distinct: float, repeated: float, cache: float) -> float:
        """Seconds that decodes take less than `seconds` says, where several sequences read the same keys and values:
        so many bytes of them `distinct`, which are read once at least, and `repeated` beyond that. cache: bytes of the
        L2 cache; of what is larger, it holds a share for those who read it again."""
        if not repeated:
            return 0.0
        return repeated * min(1.0, cache / distinct) * max(0.0, 1 / self.bandwidth - 1 / self.repeated)

    def with_memory(self, ratio: float) -> AttentionTimes:
        """By the same processors and their cache, beside memory of so many times the bandwidth."""
        return replace(self, bandwidth=self.bandwidth * ratio)

    def _decodes(self, keys: Sequence[int], held: float, attends: Attends) -> tuple[float, float]:
        """Beside their start: of all programs, and of the longest where that is not hidden. keys: of each, of which so
        large a share is `held`."""
        if not keys:
            return 0.0, 0.0
        tile = _tile(attends)
        most, splits, used = max(keys) * held, len(keys), 1
        longest = min(most, tile.split)
        if most > tile.split:
            longest = _split(most, tile)
            used = math.ceil(most / longest)
            splits = sum(math.ceil(each * held / _split(each * held, tile)) or 1 for each in keys)
        nbytes = 2 * attends.kv_heads * attends.head_dim * attends.dtype.itemsize * sum(keys) * held
        group, size = attends.heads // attends.kv_heads, attends.head_dim / _HEAD_DIM
        times = self.groups[max(least for least in self.groups if least <= group)]
        moved = nbytes / self.bandwidth
        found = moved + times.program * splits * attends.kv_heads / self.processors
        if tile.has_kernel_behind:
            found += self.behind
        elif used > 1:
            found += self.join * group * size * used
        if tile.warps > _FEW_WARPS:
            return found, 0.0
        alone = times.key * size * longest
        return found, max(0.0, alone - moved) if times.overlaps else alone

    def _longest(self, prompts: Sequence[tuple[int, int]], attends: Attends, kind: Prompts) -> float:
        """The keys that programs on one processor see one after another, where those of the last prompt start first,
        and of each prompt those that see most."""
        if kind == "tiles":
            queries = max(1, _TILE_ROWS // (attends.heads // attends.kv_heads))
            copies, places = attends.kv_heads, _TILE_PROGRAMS * self.processors
        else:
            queries, copies, places = _LIBRARY_QUERIES, attends.heads, self.processors
        before = end = least = 0.0
        programs = 0
        for new, total in reversed(prompts):
            tiles, whole = -(-new // queries), new // queries
            seen = tiles * (total - new) + queries * whole * (whole + 1) // 2 + new * (tiles - whole)
            end = max(end, before + total)
            before += seen * copies / places
            programs += tiles * copies
            least = total - new + min(new, queries)
        # Where there are more programs than places, they end at different times: by the shortest at most.
        return max(end, before + least / 2 if programs > places else before)


# By the name that drivers report.
TIMES = {
    "NVIDIA H200": AttentionTimes(
        processors=132,
        decode=6.0e-6,
        join=0.055e-6,
        behind=0.9e-6,
        bandwidth=4.53e12,
        groups={1: GroupTimes(0.81e-6, 0.0231e-6, overlaps=False), 4: GroupTimes(2.3e-6, 0.06e-6, overlaps=True)},
        empty=0.64e-6,
        beside=16.0e-6,
        softmax=0.3,
        prompts={"pure_prefill": (27.5e-6, 12.5e-9), "pages": (16.3e-6, 15.75e-9), "tiles": (2.7e-6, 42.2e-9)},
        repeated=9.06e12,
    )
}


def _tile(attends: Attends) -> DecodeTile:
    shape = attends.heads, attends.kv_heads, attends.head_dim, attends.dtype
    return decode_tile(*shape, attends.sequences, attends.most, some=attends.prompts is not None)


def _split(keys: float, tile: DecodeTile) -> int:
    """Keys of each of its splits but the last."""
    if keys <= tile.split * tile.splits:
        return tile.split
    return math.ceil(keys / tile.splits / tile.keys) * tile.keys
