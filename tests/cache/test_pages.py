"""Page reference counts against a plain model: a count and a flag for each page, and a list of idle pages. A prefix
goes on where its last window is whole. The host buffer of a step against the formulas of Batch and PagedKV, and pool
copies."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata.cache import window_pages
from strata.cache.block_tables import MAX_CHANGES, BlockTables
from strata.cache.groups import PageGroup, divide_pages
from strata.cache.pages import PageAllocator
from strata.cache.pool import KVPool, PoolShape
from strata.cache.prefix import PrefixTree
from strata.cache.staging import Staging
from strata.cache.tables import BufferShape, StepBuffer
from strata.cache.window_pages import WindowPages, WindowTable
from strata.kernels.state.dcp_shard import ELSEWHERE, DcpShard


class Books(RuleBasedStateMachine):
    @initialize(pages=st.integers(1, 20))
    def start(self, pages: int) -> None:
        self.pages = PageAllocator(pages, 4)
        self.held: list[int] = []
        self.cached: list[int] = []
        self.idle: list[int] = []

    @rule(after=st.integers(0, 20))
    def allocate(self, after: int) -> None:
        taken = {*self.held, *self.cached}
        hint = after if after < self.pages.num_pages else None
        if len(taken) == self.pages.num_pages:
            with pytest.raises(IndexError):
                self.pages.allocate(hint)
            return
        page = self.pages.allocate(hint)
        assert page not in taken
        if hint is not None and hint + 1 < self.pages.num_pages and hint + 1 not in taken:
            assert page == hint + 1
        self.held.append(page)

    @precondition(lambda self: self.held or self.cached)
    @rule(which=st.integers(0, 100))
    def share(self, which: int) -> None:
        page = [*self.held, *self.cached][which % (len(self.held) + len(self.cached))]
        self.pages.share(page)
        self.held.append(page)
        if page in self.idle:
            self.idle.remove(page)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        page = self.held.pop(which % len(self.held))
        self.pages.release(page)
        if page in self.cached and page not in self.held:
            self.idle.append(page)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def cache(self, which: int) -> None:
        page = self.held[which % len(self.held)]
        if page in self.cached:
            with pytest.raises(ValueError, match="cached"):
                self.pages.cache(page)
            return
        self.pages.cache(page)
        self.cached.append(page)

    @precondition(lambda self: self.idle)
    @rule()
    def uncache(self) -> None:
        page = self.pages.oldest_idle()
        assert page == self.idle.pop(0)
        self.pages.uncache(page)
        self.cached.remove(page)

    @rule(page=st.integers(0, 19))
    def touch(self, page: int) -> None:
        page %= self.pages.num_pages
        self.pages.touch(page)
        if page in self.idle:
            self.idle.remove(page)
            self.idle.append(page)

    @rule(page=st.integers(0, 19))
    def let_go_of_what_nobody_holds(self, page: int) -> None:
        page %= self.pages.num_pages
        if page not in self.held:
            with pytest.raises(ValueError, match="released"):
                self.pages.release(page)
            if page not in self.cached:
                with pytest.raises(ValueError, match="shared"):
                    self.pages.share(page)
                with pytest.raises(ValueError, match="cached"):
                    self.pages.cache(page)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pages"):
            return
        holders = Counter([*self.held, *self.cached])
        assert self.pages.free == self.pages.num_pages - len(holders)
        assert self.pages.idle_pages() == tuple(self.idle)
        assert self.pages.idle == len(self.idle)
        assert self.pages.usage == pytest.approx(len(set(self.held)) / self.pages.num_pages)
        for page in range(self.pages.num_pages):
            assert self.pages.is_shared(page) == (holders[page] > 1)
        self.pages.check(self.held, self.cached)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_one_sequence_gets_a_fresh_pool_in_order() -> None:
    pages = PageAllocator(21, 16)
    order = [pages.allocate()]
    while pages.free:
        order.append(pages.allocate(after=order[-1]))
    assert order == list(range(21))


def test_sequences_that_grow_at_once_get_runs_of_neighbours() -> None:
    pages = PageAllocator(64, 16)
    grown: list[list[int]] = [[], [], [], []]
    while pages.free:
        for sequence in grown:
            sequence.append(pages.allocate(after=sequence[-1] if sequence else None))
    for sequence in grown:
        breaks = sum(after != before + 1 for before, after in pairwise(sequence))
        assert breaks <= len(sequence) / 8 - 1


def test_a_sequence_grows_into_what_is_freed_beside_it() -> None:
    pages = PageAllocator(32, 16)
    held = [pages.allocate(after=page - 1 if page else None) for page in range(32)]
    for page in held[10:20]:
        pages.release(page)
    page = 9
    for expected in range(10, 20):
        page = pages.allocate(after=page)
        assert page == expected


def test_check_finds_a_lost_and_an_unknown_holder() -> None:
    pages = PageAllocator(4, 16)
    page = pages.allocate()
    pages.check([page], [])
    with pytest.raises(AssertionError, match="references"):
        pages.check([], [])
    with pytest.raises(AssertionError, match="references"):
        pages.check([page, page], [])
    with pytest.raises(AssertionError, match="cached"):
        pages.check([], [page])


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(pages, size)


PAGE = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_pages, "KEY_BLOCK", 4)


class WindowBooks:
    """Sequences over a tree with one window of 6 tokens: a token at a page's begin reads two pages before it."""

    def __init__(self, pages: int) -> None:
        self.window = WindowPages(pages, PAGE, 6)
        self.pages = PageAllocator(40, PAGE)
        self.tree = PrefixTree(self.pages, [self.window])

    def run(self, tokens: list[int]) -> int:
        """A sequence finds what it can, computes the rest page by page and ends; how many pages it found."""
        path = self.tree.match(tokens)
        self.window.hold(path)
        found, table = len(path), self.window.begin(path)
        while len(path) * PAGE < len(tokens):
            path.append(self.pages.allocate())
            self.window.trim(table, (len(path) - 1) * PAGE)
            self.window.extend(table, len(path))
            self.tree.insert(tokens, path[: len(tokens) // PAGE])
            self._attach(path, table)
        self._attach(self.tree.release(tokens, path), table)
        self.window.drop(table)
        self.window.check([], self.tree)
        return found

    def _attach(self, path: list[int], table: WindowTable) -> None:
        for place in range(table.first, len(path)):
            if path[place] in self.tree:
                self.window.attach(path[place], table, place)


def test_a_hit_ends_at_the_deepest_page_behind_which_the_window_is_kept() -> None:
    books = WindowBooks(30)
    prompt = list(range(40))
    assert books.run(prompt) == 0
    assert books.run(prompt) == 9  # a token is left to compute
    path = books.tree.match([*prompt, 99])
    assert len(path) == 10
    for page in reversed(path):
        books.pages.release(page)
    books.window.detach(path[7])
    # Token 36 reads from 31 on, which lies in page 7; token 28 reads pages 5 and 6.
    assert books.window.covered(path, 9) == 7
    assert books.run([*prompt[:30], 99, 98]) == 7
    # The sequence that found 7 pages has computed pages 7 to 9 again, and the tree keeps their windows now.
    assert books.run(prompt) == 7
    assert books.run(prompt) == 9


def test_windows_are_given_up_while_pages_of_all_tokens_stay() -> None:
    books = WindowBooks(5)
    prompt = list(range(40))
    assert books.run(prompt) == 0
    assert len(books.tree) == 10
    other = list(range(50, 90))
    books.run(other)
    assert len(books.tree) == 20
    assert books.run(other) == 9
    assert books.run(prompt) == 0
    assert books.window.books.free + books.window.books.idle == 5


def test_memory_is_divided_so_that_no_window_has_more_than_is_of_use() -> None:
    shape = PoolShape(4, PAGE, 2, 8, torch.float32)
    groups = [PageGroup((0, 1, 2, 3), None, shape), PageGroup((4, 5, 6, 7), 8, shape)]
    assert divide_pages(groups, 100 * shape.page_bytes, [None, 1000]) == (50, 50)
    assert divide_pages(groups, 100 * shape.page_bytes, [None, 20]) == (80, 20)
    assert divide_pages(groups[1:], 100 * shape.page_bytes, [20]) == (100,)


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
    made.place(held, PAGE, np.array([2, 0], np.int32), starts, counts, DcpShard(3, 1))
    first = [7 * PAGE + 3, ELSEWHERE, ELSEWHERE, 9 * PAGE]  # positions 10 to 13
    assert made.host["slot_mapping"].tolist() == [*first, ELSEWHERE, 5 * PAGE, ELSEWHERE, -1, -1]
    assert made.host["lengths"].tolist() == [14, 3, 0]


def test_parts_of_a_step_have_their_starts_in_the_buffer() -> None:
    """Decodes, whose rows begin where they end, and prompts, of which one has a single token; then padding."""
    counts, held = np.array([1, 1, 5, 1], np.int32), tables()
    for size, captured, bounds in ((4, False, [2, 4]), (6, True, [2, 5])):
        made = buffer(8 if size == 4 else 20, size, 2)
        made.place(held, PAGE, np.array([2, 0, 1, 0], np.int32), np.array([6, 3, 0, 2], np.int32), counts)
        parts = made.divide(counts, captured=captured)
        assert (parts.decodes, parts.query_chunks, parts.begin) == (None if captured else 2, None, False)
        made.send()
        assert parts.decode_lengths.tolist() == [7, 4, 0, 0, 0, 0][:size]
        assert parts.starts.tolist() == [1, 2, 2, 7, 8, 20][:size]
        assert parts.bounds.tolist() == bounds
        assert parts.starts.data_ptr() == made.tensors["starts"].data_ptr()


def test_the_host_knows_whether_all_prompts_of_a_step_begin() -> None:
    """Whatever stands before the decodes in front of them; of a captured step another may be replayed."""
    counts, slots, held = np.array([1, 1, 5, 2], np.int32), np.array([2, 0, 1, 0], np.int32), tables()
    for starts, captured, begin in (
        ([6, 0, 0, 0], False, True),
        ([6, 0, 0, 1], False, False),
        ([6, 0, 0, 0], True, False),
    ):
        made = buffer(20, 6, 2)
        made.place(held, PAGE, slots, np.array(starts, np.int32), counts)
        assert made.divide(counts, captured=captured).begin == begin


def test_a_fresh_step_has_prompts_alone() -> None:
    """Also those of one token that come first."""
    shape = BufferShape(20, 4, 2, 3, pure_prefill=True)
    staging = Staging(shape.size, torch.device("cpu"))
    made, counts = StepBuffer(shape, staging, staging.target(shape.size)), np.array([1, 5], np.int32)
    made.place(tables(), PAGE, np.array([2, 0], np.int32), np.array([0, 0], np.int32), counts)
    parts = made.divide(counts, captured=True)
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


def apart(slots: int, page_limit: int) -> BlockTables:
    """Tables whose device's side is other memory, as on CUDA."""
    made = BlockTables(slots, page_limit, torch.device("cpu"))
    made.on_device, made._shared = torch.zeros(slots + 1, page_limit, dtype=torch.int32), False
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
