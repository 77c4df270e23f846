"""What a step reads and writes beside its activations: pages in 8 bits, block tables, ids on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from strata.cache.pool import KVPool, PoolShape
from strata.hardware.roofline import Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.sampling.sampling import NO_ID
from strata.kernels.state.gather_tables import gather_tables, newest_tokens
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.quantized_rows import round_rows, widen_rows

KINDS = [torch.float8_e4m3fn, torch.int8]
HEADS, KV_HEADS, DIM, PAGE_SIZE = 6, 2, 16, 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_by_a_power_of_two_of_their_own(kind: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(50, 3, 64) * torch.logspace(-3, 3, 50)[:, None, None]).to(dtype)
    values, exponents = round_rows(x, kind)
    most = 448.0 if kind == torch.float8_e4m3fn else 127.0
    largest, powers = x.float().abs().amax(-1), torch.exp2(exponents.float() - 127)
    # The least that the largest fits with: with half of it, it would not.
    assert (largest <= most * powers).all()
    assert (largest > most * powers / 2).all()
    wide = widen_rows(values, exponents, torch.float32)
    step = (
        powers[..., None] / 2 if kind == torch.int8 else torch.maximum(x.float().abs() / 16, powers[..., None] / 1024)
    )
    assert ((wide - x.float()).abs() <= step).all()
    if dtype == torch.bfloat16:  # exactly what float32 has
        assert torch.equal(widen_rows(values, exponents, dtype).float(), wide)
    again = round_rows(wide, kind)
    assert torch.equal(widen_rows(*again, torch.float32), wide)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_the_ends_of_the_range(kind: torch.dtype) -> None:
    most = 448.0 if kind == torch.float8_e4m3fn else 127.0
    x = torch.tensor([[most, 0.0], [most * 1.001, 0.0], [0.0, 0.0], [1e-45, 0.0], [3e38, 1.0]])
    values, exponents = round_rows(x, kind)
    assert exponents[:3].tolist() == [127, 128, 1]
    wide = widen_rows(values, exponents, torch.float32)
    assert wide[0].tolist() == [most, 0.0]
    assert wide[2].tolist() == [0.0, 0.0]
    assert wide.isfinite().all()
    assert wide[4, 0] == pytest.approx(3e38, rel=0.07)
    for bad in (torch.nan, torch.inf, -torch.inf):
        values, exponents = round_rows(torch.tensor([[most, bad], [most, 0.0]]), kind)
        assert exponents.tolist() == [255, 127]
        assert values[0].tolist() == values[1].tolist()
        assert widen_rows(values, exponents, torch.float32).isnan().all(-1).tolist() == [True, False]


def pools(kind: torch.dtype, lengths: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[KVPool, PagedKV]:
    """Pages in falling order; what was never written is poison."""
    most = -(-max(lengths) // PAGE_SIZE)
    shape = PoolShape(2, PAGE_SIZE, KV_HEADS, DIM, torch.float32, quantized=kind)
    pool = KVPool(shape, most * len(lengths), torch.device("cpu"))
    for poisoned in (pool.all_keys, pool.all_values):
        poisoned.view(torch.uint8).fill_(0x7F)
    for layer in (*pool.key_exponents, *pool.value_exponents):
        layer.fill_(255)
    tables = torch.arange(most * len(lengths), dtype=torch.int32).flip(0).view(most, -1).T.contiguous()
    slots = [
        int(tables[s, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE
        for s, length in enumerate(lengths)
        for at in range(length)
    ]
    sizes, where = torch.tensor(lengths, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    exponents = pool.key_exponents, pool.value_exponents
    return pool, PagedKV(pool.keys, pool.values, tables, sizes, where, None, None, None, *exponents)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_reader_sees_what_was_written(kind: torch.dtype, window: int | None, sinks: bool) -> None:
    torch.manual_seed(1)
    lengths, news = (13, 1, 9), (3, 1, 9)
    total = sum(lengths)
    k, v = (torch.randn(total, KV_HEADS, DIM) for _ in range(2))
    _, pages = pools(kind, lengths, (0, 13, 14, 23))
    held_k, held_v = kv_write(k, v, pages, 1)
    for given, held in ((k, held_k), (v, held_v)):
        assert torch.equal(held, widen_rows(*round_rows(given, kind), torch.float32))
    rows = [
        start + at
        for start, length, new in zip((0, 13, 14), lengths, news, strict=True)
        for at in range(length - new, length)
    ]
    q = torch.randn(len(rows), HEADS, DIM)
    offsets = torch.tensor([0, 3, 4, 13], dtype=torch.int32)
    spec, own = AttentionSpec(1, DIM**-0.5, window), torch.randn(HEADS) if sinks else None
    # Whole sequences without pages, of what was held.
    starts = torch.tensor([0, 13, 14, 23], dtype=torch.int32)
    every = torch.zeros(total, HEADS, DIM)
    every[rows] = q
    expected = attention.reference(every, held_k, held_v, Sequences(starts, 13), spec, own)[rows]
    batch = Sequences(offsets, 9, pages)
    for run in (
        attention.reference,
        attention.bind("cpu"),
        attention.bind("cpu", deterministic=True),
    ):
        found = run(q, held_k[rows], held_v[rows], batch, spec, own)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_writes_nothing_and_copies_take_exponents_along(kind: torch.dtype) -> None:
    pool, pages = pools(kind, (6,), (0, 6))
    before = [one.clone().view(torch.uint8) for one in (pool.all_keys, pool.all_values, *pool.key_exponents)]
    nowhere = dataclasses.replace(pages, slot_mapping=torch.full((6,), -1, dtype=torch.int32))
    k, v = torch.randn(2, 6, KV_HEADS, DIM)
    kv_write(k, v, nowhere, 0)
    after = [one.view(torch.uint8) for one in (pool.all_keys, pool.all_values, *pool.key_exponents)]
    assert all(map(torch.equal, before, after))
    kv_write(k, v, pages, 0)
    pool.copy_pages([(1, 0)])
    assert torch.equal(_page(pages, 1), _page(pages, 0))
    assert _page(pages, 1).isfinite().all()


def _page(pages: PagedKV, number: int) -> Tensor:
    return torch.cat(pages.rows(0, torch.tensor([number]), torch.float32))


def test_a_page_has_a_byte_for_each_value_and_head() -> None:
    assert PoolShape(3, 16, 8, 128, torch.bfloat16, quantized=torch.int8).page_bytes == 2 * 3 * 16 * 8 * 129


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_new_page_is_read_now_and_kept_and_padding_enters_nothing() -> None:
    tables = torch.tensor([[5, 2, 0], [7, 0, 0], [9, 1, 4], [0, 0, 0]], dtype=torch.int32)
    # Sequence 1 begins its second page, which is page 8 of the pool; sequence 2 goes on in its third.
    rows, offsets, lengths = _int32(2, 1, 3), _int32(0, 1, 2, 3), _int32(10, 5, 0)
    found = gather_tables(tables, rows, offsets, lengths, _int32(4 * 4 + 1, 8 * 4, -1), 4)
    assert found.tolist() == [[9, 1, 4], [7, 8, 0], [0, 0, 0]]
    assert tables.tolist() == [[5, 2, 0], [7, 8, 0], [9, 1, 4], [0, 0, 0]]
    assert found.dtype == torch.int32


def test_of_several_tokens_the_last_has_its_page_entered() -> None:
    tables = torch.tensor([[3, 0, 0], [6, 7, 0]], dtype=torch.int32)
    # Tokens 4 to 8 of one sequence, then one token of length 0 to which all padding belongs.
    slots = _int32(5 * 4, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 9 * 4, -1, -1)
    found = gather_tables(tables, _int32(0, 1), _int32(0, 5, 7), _int32(9, 0), slots, 4)
    assert found.tolist() == [[3, 0, 9], [6, 7, 0]]


def test_cost_counts_four_numbers_a_sequence_and_each_page_twice() -> None:
    tables = torch.empty((9, 100), dtype=torch.int32, device="meta")
    row = torch.empty(2, dtype=torch.int32, device="meta")
    cost = gather_tables.cost(tables, row, row, row, row, 16, workload=Workload((1, 1), (33, 16)))
    assert (cost.flops, cost.read, cost.written) == (0, 4 * 8 + 4 * (3 + 1), 4 * (3 + 1))


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_source_wins_over_the_token_and_a_missing_id_reads_zero() -> None:
    newest = _ids(70, 71, NO_ID, 73)
    read = newest_tokens(_ids(5, 6, 7, 8, 9), _ids(-1, 3, 0, 2, -1), newest)
    assert read.tolist() == [5, 73, 70, 0, 9]
    assert read.dtype == torch.int32
    assert newest.tolist() == [70, 71, NO_ID, 73]


def test_cost_counts_three_reads_and_a_write_of_four_bytes_a_token() -> None:
    tokens = torch.empty(10, dtype=torch.int32, device="meta")
    cost = newest_tokens.cost(
        tokens, tokens, torch.empty(300, dtype=torch.int32, device="meta"), workload=Workload((10,), (10,))
    )
    assert (cost.flops, cost.read, cost.written) == (0, 120, 40)
