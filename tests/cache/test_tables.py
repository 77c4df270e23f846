"""The host buffer of a step against the formulas of Batch and PagedKV, and pool copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.cache.block_tables import MAX_CHANGES, BlockTables
from strata.cache.pool import KVPool, PoolShape
from strata.cache.staging import Staging
from strata.cache.tables import BufferShape, StepBuffer
from strata.kernels.state.kept_keys import ELSEWHERE, KeptKeys

PAGE = 4


def buffer(tokens: int, sequences: int, draws: int) -> StepBuffer:
    shape = BufferShape(tokens, sequences, draws)
    staging = Staging(shape.size, torch.device("cpu"))
    staging.host.fill_(-77)
    return StepBuffer(shape, staging, staging.target(shape.size))


def tables() -> BlockTables:
    made = BlockTables(3, 4, torch.device("cpu"))
    made.update(0, 0, [5, 2])
    made.update(2, 0, [7])
    made.update(2, 1, [9, 1])
    return made


def test_places_follow_from_slots_starts_and_counts() -> None:
    made, held = buffer(7, 2, 2), tables()
    made.place(held, PAGE, np.array([2, 0], np.int32), np.array([6, 0], np.int32), np.array([2, 5], np.int32))
    host = made.host
    assert host["offsets"].tolist() == [0, 2, 7]
    assert host["lengths"].tolist() == [8, 5]
    assert host["positions"].tolist() == [6, 7, 0, 1, 2, 3, 4]
    assert held.on_device[made.tensors["table_rows"], :3].tolist() == [[7, 9, 1], [5, 2, 0]]
    # Position 6 of the first sequence lies in its page 1, which is page 9 of the pool, at offset 2.
    assert host["slot_mapping"].tolist() == [9 * PAGE + 2, 9 * PAGE + 3, 20, 21, 22, 23, 2 * PAGE]


def test_tokens_of_other_ranks_are_told_from_padding() -> None:
    """Three ranks divide pages of 3 * 4 tokens; the second keeps positions 1, 4, 7 and 10 of a page."""
    made, held = buffer(9, 3, 2), tables()
    starts, counts = np.array([10, 0], np.int32), np.array([4, 3], np.int32)
    made.place(held, PAGE, np.array([2, 0], np.int32), starts, counts, KeptKeys(3, 1))
    first = [7 * PAGE + 3, ELSEWHERE, ELSEWHERE, 9 * PAGE]  # positions 10 to 13
    assert made.host["slot_mapping"].tolist() == [*first, ELSEWHERE, 5 * PAGE, ELSEWHERE, -1, -1]
    assert made.host["lengths"].tolist() == [14, 3, 0]


def test_parts_of_a_step_have_their_starts_in_the_buffer() -> None:
    """Decodes, whose rows begin where they end, and prompts, of which one has a single token; then padding."""
    counts, held = np.array([1, 1, 5, 1], np.int32), tables()
    for size, recorded, bounds in ((4, False, [2, 4]), (6, True, [2, 5])):
        made = buffer(8 if size == 4 else 20, size, 2)
        made.place(held, PAGE, np.array([2, 0, 1, 0], np.int32), np.array([6, 3, 0, 2], np.int32), counts)
        parts = made.divide(counts, recorded=recorded)
        assert (parts.decodes, parts.virtual, parts.begin) == (None if recorded else 2, None, False)
        made.send()
        assert parts.decode_lengths.tolist() == [7, 4, 0, 0, 0, 0][:size]
        assert parts.starts.tolist() == [1, 2, 2, 7, 8, 20][:size]
        assert parts.bounds.tolist() == bounds
        assert parts.starts.data_ptr() == made.tensors["starts"].data_ptr()


def test_the_host_knows_whether_all_prompts_of_a_step_begin() -> None:
    """Whatever stands before the decodes in front of them; of a recorded step another may be replayed."""
    counts, slots, held = np.array([1, 1, 5, 2], np.int32), np.array([2, 0, 1, 0], np.int32), tables()
    for starts, recorded, begin in (
        ([6, 0, 0, 0], False, True),
        ([6, 0, 0, 1], False, False),
        ([6, 0, 0, 0], True, False),
    ):
        made = buffer(20, 6, 2)
        made.place(held, PAGE, slots, np.array(starts, np.int32), counts)
        assert made.divide(counts, recorded=recorded).begin == begin


def test_a_fresh_step_has_prompts_alone() -> None:
    """Also those of one token that come first."""
    shape = BufferShape(20, 4, 2, 3, fresh=True)
    staging = Staging(shape.size, torch.device("cpu"))
    made, counts = StepBuffer(shape, staging, staging.target(shape.size)), np.array([1, 5], np.int32)
    made.place(tables(), PAGE, np.array([2, 0], np.int32), np.array([0, 0], np.int32), counts)
    parts = made.divide(counts, recorded=True)
    made.send()
    assert (parts.decodes, parts.begin) == (0, True)
    assert parts.decode_lengths.tolist() == [0, 0, 0, 0]
    assert parts.starts.tolist() == [0, 1, 6, 20]
    assert parts.bounds.tolist() == [0, 3]


def test_what_a_bucket_holds_beyond_the_batch_is_padding() -> None:
    made, held = buffer(4, 4, 4), tables()
    made.place(held, PAGE, np.array([0], np.int32), np.array([3], np.int32), np.array([1], np.int32))
    host = made.host
    assert host["offsets"].tolist() == [0, 1, 2, 3, 4]
    assert host["lengths"].tolist() == [4, 0, 0, 0]
    assert host["slot_mapping"].tolist() == [5 * PAGE + 3, -1, -1, -1]
    assert held.on_device[made.tensors["table_rows"], :2].tolist() == [[5, 2], [0, 0], [0, 0], [0, 0]]
    assert host["sources"][1:].tolist() == [-1] * 3


def test_the_fields_are_views_of_one_buffer() -> None:
    made = buffer(3, 1, 1)
    for value, (name, array) in enumerate(made.host.items()):
        array[...] = value
        assert bool((made.tensors[name] == value).all())
    assert made.tensors["seeds"].view(torch.int64).shape == (1,)


def apart(slots: int, most_pages: int) -> BlockTables:
    """Tables whose device's side is other memory, as on CUDA."""
    made = BlockTables(slots, most_pages, torch.device("cpu"))
    made.on_device, made._shared = torch.zeros(slots + 1, most_pages, dtype=torch.int32), False
    return made


def test_the_device_gets_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(Staging, "send", lambda self, target: sent.append(len(target)))
    made = apart(6, 3 * MAX_CHANGES)
    made.send()
    assert not sent
    rng = np.random.default_rng(0)
    for _ in range(30):
        changes = 0
        for slot in rng.permutation(6)[: rng.integers(1, 7)]:
            count = int(rng.choice([1, 1, 1, 2, 40, 2 * MAX_CHANGES + 5]))
            first = int(rng.integers(0, 3 * MAX_CHANGES - count + 1))
            made.update(int(slot), first, rng.integers(0, 10**6, count).tolist())
            changes += count
        made.send()
        assert np.array_equal(made.on_device.numpy(), made.rows)
        assert sum(sent) == 3 * changes
        sent.clear()
    assert not made.rows[made.padding].any()


def test_copied_pages_hold_what_their_source_held_before() -> None:
    shape = PoolShape(layers=2, page_size=PAGE, kv_heads=1, head_dim=2, dtype=torch.float32)
    pool = KVPool(shape, 5, torch.device("cpu"))
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn_like(tensor))
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    pool.copy_pages([(0, 3), (3, 4)])
    for tensor, old in zip((*pool.keys, *pool.values), before, strict=True):
        assert torch.equal(tensor[3], old[0])
        assert torch.equal(tensor[4], old[3])
        assert torch.equal(tensor[:3], old[:3])
    assert sum(tensor.nbytes for tensor in (*pool.keys, *pool.values)) == 5 * shape.page_bytes
