"""Builds the tensors of a step on the host, in one buffer that travels to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strata.cache.block_tables import BlockTables
from strata.cache.pool import KVPool
from strata.cache.staging import Staging
from strata.cache.state_pool import StatePool
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.cpu import planned
from strata.kernels.attention.spec import Sequences
from strata.kernels.state.dcp_shard import ALL_KEYS, ELSEWHERE, DcpShard
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch

Int32Array = NDArray[np.int32]


class Share(NamedTuple):
    """What one of several ranks runs of a step that they divide: i is `counts[i]` tokens of a sequence from `starts[i]`
    on, whose slot is `slots[i]`; [pieces] int32 each."""

    slots: Int32Array
    starts: Int32Array
    counts: Int32Array


@dataclass(frozen=True)
class BufferShape:
    """How many of each a step buffer holds. `draws`: rows that are sampled.

    prompts: of a captured step, most sequences that are no decodes, for which cuDNN attends; None: any number.
    pure_prefill: of one, all are prompts without tokens from before it, so cuDNN reads its own keys and values instead
    of pages. ranks: how many divide the tokens of the step, each with as many rows; it writes the keys and values of
    all. groups: of layers with block tables of their own. tags: some sequence brings an adapter or a version of the
    weights.
    """

    tokens: int
    sequences: int
    draws: int
    prompts: int | None = None
    pure_prefill: bool = False
    ranks: int = 1
    groups: int = 1
    tags: bool = False

    def sizes(self) -> dict[str, int]:
        """Elements of each field in the order of the buffer."""
        return {
            "seeds": 2 * self.draws,  # read as int64, so they come first, where the buffer is aligned
            "tokens": self.tokens,
            "sources": self.tokens,
            "positions": self.tokens,
            "slot_mapping": self.tokens * self.ranks,
            **{group_mapping(group): self.tokens for group in range(1, self.groups)},
            "offsets": self.sequences + 1,
            "starts": self.sequences,
            "decode_lengths": self.sequences,
            "bounds": 2,
            "lengths": self.sequences,
            "table_rows": self.sequences,
            "tags": 2 * self.sequences if self.tags else 0,
            "rows": self.draws,
            "chosen": self.draws if self.ranks > 1 else 0,
            "draw_slots": self.draws,
            "temperatures": self.draws,
            "steps": self.draws,
            "top_k": self.draws,
            "top_p": self.draws,
            "min_p": self.draws,
        }

    @property
    def size(self) -> int:
        return sum(self.sizes().values())


def group_mapping(group: int) -> str:
    """The name of the slot mapping of a group of layers; that of the first has none of its own."""
    return f"slot_mapping {group}" if group else "slot_mapping"


class GroupTables(NamedTuple):
    """What layers of a group behind the first read in a step: their pool, the block tables of the step's sequences
    [sequences, page_limit] int32, and the windows of these layers."""

    pool: KVPool
    tables: Tensor
    windows: tuple[int | None, ...]


class StepBuffer:
    """The named fields of a step as views of one int32 buffer, on the host and on the device.

    tokens: [tokens] ids known to the host.
    sources: [tokens] slot whose newest id, which only the device knows, stands in for the token; -1 for none.
    positions, slot_mapping, offsets, lengths: see `Batch` and `PagedKV`.
    table_rows: [sequences] which rows of the block tables, and of fixed states, are theirs.
    tags: [2 * sequences], see `Batch`; of a step without, none.
    starts, decode_lengths, bounds: see `BatchSplit`; only `divide` fills them.
    rows: [draws] row of the hidden states that is sampled. chosen: [draws], of a step that ranks divide; see
        `strata.graph.ranks.shard_tokens`.
    draw_slots: [draws] slot that receives the id.
    temperatures, top_p, min_p: [draws] the bits of a float32 each. top_k: [draws], 0 for no limit.
    seeds: [2 * draws] an int64 each.
    steps: [draws] how many ids the sequence drew before.
    """

    def __init__(self, shape: BufferShape, staging: Staging, target: Tensor) -> None:
        """`staging` holds at least `shape.size` elements, and they travel to `target`, made by `Staging.target`."""
        self.shape = shape
        sizes = shape.sizes()
        self._staging, self._device = staging, target
        self.tensors: dict[str, Tensor] = dict(
            zip(sizes, self._device.split_with_sizes([*sizes.values()]), strict=True)
        )
        array: Int32Array = staging.host.numpy()
        ends = accumulate(sizes.values())
        self.host: dict[str, Int32Array] = {
            name: array[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)
        }

    def place(
        self,
        tables: BlockTables,
        page_size: int,
        slots: Int32Array,
        starts: Int32Array,
        counts: Int32Array,
        kept: DcpShard = ALL_KEYS,
    ) -> None:
        """Begin a step: fill all that follows from where sequences lie; i runs `counts[i]` tokens from `starts[i]` on.
        page_size: tokens of a page that are here, of those that `kept` says; the others are not written.

        Blocks until the step before has left the host's side. What the buffer holds beyond them (CUDA graph buckets)
        becomes padding: sequences of length 0, with a token each in a buffer for decodes, else the first with all.
        """
        self._staging.wait()
        host, sequences, tokens = self.host, len(slots), int(counts.sum())
        offsets = host["offsets"]
        offsets[0] = 0
        np.cumsum(counts, out=offsets[1 : sequences + 1])
        host["lengths"][:sequences] = starts + counts
        host["table_rows"][:sequences] = slots
        host["positions"][:tokens], host["slot_mapping"][:tokens] = _placed(
            tables, page_size, slots, starts, counts, offsets[:sequences], kept
        )
        if sequences < self.shape.sequences:
            host["table_rows"][sequences:] = tables.padding
            self._pad(sequences, tokens)

    def place_group(
        self,
        group: int,
        tables: BlockTables,
        page_size: int,
        slots: Int32Array,
        starts: Int32Array,
        counts: Int32Array,
    ) -> None:
        """What `place` did, for the slot mapping of a group behind the first."""
        mapping, tokens = self.host[group_mapping(group)], int(counts.sum())
        ends = np.cumsum(counts, dtype=np.int32)
        mapping[:tokens] = _placed(tables, page_size, slots, starts, counts, ends - counts)[1]
        mapping[tokens:] = -1

    def place_written(self, tables: BlockTables, page_size: int, shares: Sequence[Share]) -> None:
        """Let the step, which ranks divide, write the keys and values of all shares, not of the one placed alone."""
        mapping = self.host["slot_mapping"].reshape(len(shares), -1)
        mapping.fill(-1)
        for slots, share in zip(mapping, shares, strict=True):
            ends = np.cumsum(share.counts, dtype=np.int32)
            slots[: ends[-1] if len(ends) else 0] = _placed(tables, page_size, *share, ends - share.counts)[1]

    def _pad(self, sequences: int, tokens: int) -> None:
        host = self.host
        host["offsets"][sequences + 1 :] = self.shape.tokens
        if self.shape.tokens == self.shape.sequences:
            host["offsets"][sequences + 1 :] = tokens + np.arange(1, self.shape.sequences - sequences + 1)
        host["lengths"][sequences:] = 0
        for name in ("positions", "tokens"):
            host[name][tokens:] = 0
        for name in ("slot_mapping", "sources"):
            host[name][tokens:] = -1

    def divide(self, counts: Int32Array, *, captured: bool) -> BatchSplit:
        """Which of the sequences placed decode: those of one token that come first, none in a pure prefill step.
        counts: tokens of each.

        captured: for a captured step, whose grids hold any number of decodes.
        """
        more = np.flatnonzero(counts != 1)
        decodes = int(more[0]) if len(more) else len(counts)
        if self.shape.pure_prefill:
            decodes, captured = 0, False
        host = self.host
        host["starts"][:] = host["offsets"][:-1]
        host["starts"][:decodes] = host["offsets"][1 : decodes + 1]
        host["decode_lengths"][:decodes] = host["lengths"][:decodes]
        host["decode_lengths"][decodes:] = 0
        host["bounds"][:] = decodes, min(len(counts) + 1, self.shape.sequences)
        decode_lengths, starts, bounds = (self.tensors[name] for name in ("decode_lengths", "starts", "bounds"))
        if captured:
            return BatchSplit(decode_lengths, starts, bounds)
        begin = bool((host["lengths"][decodes : len(counts)] == counts[decodes:]).all())
        return BatchSplit(decode_lengths, starts, bounds, decodes, begin=begin)

    def pad_draws(self, draws: int, slot: int) -> None:
        """Beyond the first `draws`, padding rows draw greedily, without filters, from row 0 into `slot`."""
        self.host["draw_slots"][draws:] = slot
        self.host["seeds"][2 * draws :] = 0
        for name in ("rows", "chosen", "temperatures", "steps", "top_k", "min_p"):
            self.host[name][draws:] = 0
        self.host["top_p"][draws:].view(np.float32).fill(1)

    def send(self) -> None:
        """Copy the host's side to the device, which nothing waits for."""
        self._staging.send(self._device)

    def batch(
        self,
        pool: KVPool,
        tables: Tensor,
        tokens: Tensor,
        longest: int,
        windows: Iterable[int | None],
        parts: BatchSplit | None = None,
        groups: Sequence[GroupTables] = (),
        states: StatePool | None = None,
    ) -> Batch:
        """The device's side as a model's argument.

        tables: the block tables of this step's sequences. tokens: the ids, joined with those that only the
        device knows. windows: those of the model's attention layers, for which a CPU plans its attention once for all
        layers. parts: see `PagedKV`. groups: those behind the first. states: where layers keep fixed ones.
        """
        t = self.tensors
        pages = self._pages(pool, tables, t["slot_mapping"], windows, parts)
        others = tuple(
            Sequences(t["offsets"], longest, self._pages(one.pool, one.tables, t[group_mapping(g)], one.windows, parts))
            for g, one in enumerate(groups, 1)
        )
        fixed = None if states is None else RecurrentStates(states.tensors, t["table_rows"])
        tags = t["tags"].view(-1, 2) if self.shape.tags else None
        return Batch(tokens, t["positions"], t["offsets"], longest, pages, others, fixed, tags)

    def _pages(
        self, pool: KVPool, tables: Tensor, mapping: Tensor, windows: Iterable[int | None], parts: BatchSplit | None
    ) -> PagedKV:
        on_cpu = mapping.device.type == "cpu"
        index = mapping.long() if on_cpu and not bool((mapping < 0).any()) else None
        others = pool.key_exponents, pool.value_exponents, pool.bounds
        pages = PagedKV(pool.keys, pool.values, tables, self.tensors["lengths"], mapping, None, index, parts, *others)
        if not (on_cpu and pool.shape.layers):
            return pages
        return planned(pages, self.tensors["offsets"], pool.shape.dtype, windows)


def _placed(
    tables: BlockTables,
    page_size: int,
    slots: Int32Array,
    starts: Int32Array,
    counts: Int32Array,
    offsets: Int32Array,
    kept: DcpShard = ALL_KEYS,
) -> tuple[Int32Array, Int32Array]:
    """Position of each token, and where its key and value go. offsets: of each sequence the first token's row."""
    sequences, tokens = len(slots), int(counts.sum())
    if tokens == sequences:  # all decode
        owner, position = np.arange(sequences), starts
    else:
        owner = np.repeat(np.arange(sequences), counts)
        position = np.arange(tokens, dtype=np.int32) - (offsets - starts)[owner]
    page, offset = np.divmod(position, page_size * kept.ranks)
    place, rank = np.divmod(offset, kept.ranks)
    return position, np.where(rank == kept.rank, tables.rows[slots[owner], page] * page_size + place, ELSEWHERE)
