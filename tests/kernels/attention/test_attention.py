"""Attention on CPU, with sinks and without: every path against float64, the implementations against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention import cudnn_prompts
from strata.kernels.attention import train as attention_train
from strata.kernels.attention.attention import attention
from strata.kernels.attention.cpu import planned
from strata.kernels.attention.cpu_plan import PADDING_BYTES, SPAN_MULTIPLE, TILE_BYTES, schedule
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences
from strata.kernels.state.paged import PagedKV
from tests.kernels.attention.cases import PAGE, Case, decode_step

LENGTHS, NEW = [40, 1, 17, 33, 80], [1, 1, 17, 20, 80]
SINKS = torch.tensor([0.5, -40.0, 3.0, 60.0, -1.0, 0.0])


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 9, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 20), (6, 1, 24)])
def test_every_query_of_every_path(heads, kv_heads, head_dim, window, sinks):
    """Of a mixed batch over pages and of packed sequences, against each query in float64."""
    case = Case.random(LENGTHS, heads, kv_heads, head_dim)
    run = {i.name: attention.of_arguments(i.run) for i in attention.implementations if i.device == "cpu"}
    run["reference"] = attention.reference
    for arguments, layer, new, names in (
        (case.batch(NEW, layers=2), 1, NEW, ("reference", "tiled", "batch-invariant tiles")),
        (case.packed(), 0, LENGTHS, ("reference", "packed", "batch-invariant tiles")),
    ):
        wanted = case.wanted(new, window, sinks=sinks, scale=0.3)
        for name in names:
            out = run[name](*arguments, AttentionSpec(layer, 0.3, window), sinks)
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6, msg=name)
    masked = attention_train._masked(*case.packed()[:3], case.packed()[3].offsets, 0.3, window, sinks)
    torch.testing.assert_close(masked.double(), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("sinks", [None, torch.randn(8)], ids=["plain", "sinks"])
@pytest.mark.parametrize(
    ("totals", "new", "window"),
    [
        ([150 + 7 * (i % 5) for i in range(32)], [1] * 32, None),  # one group
        ([20, 900, 30, 700, 45, 33], [1] * 6, None),  # lengths that do not fit together
        ([20, 900, 30, 700, 45, 33], [1] * 6, 64),
        ([1300, 5, 700], [1100, 1, 700], None),  # prompts longer than a tile of queries, one continued
        ([1300, 5, 700], [1100, 1, 700], 100),
    ],
)
def test_tiled_equals_reference(dtype, consecutive, totals, new, window, sinks):
    case = Case.random(totals, heads=8, kv_heads=2, head_dim=32, dtype=dtype)
    arguments = *case.batch(new, consecutive=consecutive), AttentionSpec(0, 32**-0.5, window)
    arguments = arguments if sinks is None else (*arguments, sinks.to(dtype))
    out = attention.bind("cpu")(*arguments)
    atol = 2e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out, attention.reference(*arguments), rtol=0, atol=atol)


def test_views_of_a_merged_projection_are_accepted():
    case = Case.random([30, 12], heads=4, kv_heads=2, head_dim=16)
    q, k, v, batch = case.batch([8, 12])
    merged = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    views = [x.unflatten(-1, (-1, 16)) for x in merged.split([64, 32, 32], 1)]
    for deterministic in (False, True):
        run = attention.bind("cpu", deterministic=deterministic)
        spec = AttentionSpec(0, 0.25)
        assert torch.equal(run(*views, batch, spec), run(q, k, v, batch, spec))


def test_a_plan_made_once_gives_the_same_result():
    case = Case.random([200, 31, 64, 90], heads=4, kv_heads=2, head_dim=16)
    q, k, v, batch = case.batch([1, 31, 1, 40])
    with_plan = batch._replace(pages=planned(batch.pages, batch.offsets, batch.pages.keys[0].dtype, {None, 30}))
    assert set(with_plan.pages.plan.schedules) == {None, 30}
    run = attention.bind("cpu")
    for window in (None, 30, 50):
        spec = AttentionSpec(0, 0.25, window)
        assert torch.equal(run(q, k, v, with_plan, spec), run(q, k, v, batch, spec))


def test_padding_rows_are_finite_and_harmless():
    case = Case.random([50, 40], heads=4, kv_heads=2, head_dim=16)
    (q, k, v, batch), spec = case.batch([1, 1]), AttentionSpec(0, 0.25)
    alone, pages = attention.reference(q, k, v, batch, spec), batch.pages
    padded = replace(
        pages,
        lengths=torch.tensor([50, 40, 0, 0], dtype=torch.int32),
        tables=torch.cat([pages.tables, torch.zeros(2, pages.tables.shape[1], dtype=torch.int32)]),
    )
    q, k, v = (torch.cat([x, x]) for x in (q, k, v))
    offsets = torch.arange(5, dtype=torch.int32)
    for run in (attention.reference, attention.bind("cpu"), attention.bind("cpu", deterministic=True)):
        out = run(q, k, v, Sequences(offsets, 1, padded), spec)
        torch.testing.assert_close(out[:2], alone, rtol=0, atol=1e-6)
        assert out.isfinite().all()


@pytest.mark.parametrize("sinks", [(), (SINKS[:4].clamp(-4, 4),)], ids=["plain", "sinks"])
def test_gradients_of_packed_sequences(sinks):
    case = Case.random([7, 1, 9], heads=4, kv_heads=2, head_dim=4)
    q, k, v, batch = case.packed()
    for window in (None, 5):
        spec, grads = AttentionSpec(0, 0.35, window), []
        for run in (attention.reference, attention.bind("cpu", differentiable=True)):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, *sinks)]
            out = run(*leaves[:3], batch, spec, *leaves[3:])
            grads.append(torch.autograd.grad(out.square().sum(), leaves))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        doubles = [x.double().requires_grad_() for x in (q, k, v, *sinks)]
        for run in (attention.reference, attention) if window is None else (attention.reference,):
            check = lambda *x, run=run, spec=spec: run(*x[:3], batch, spec, *x[3:])  # noqa: E731
            assert torch.autograd.gradcheck(check, doubles)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 32), (4, 2, 64), (7, 1, 24), (3, 3, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
def test_deterministic_bits_do_not_depend_on_batch_chunks_or_pages(heads, kv_heads, head_dim, dtype, window):
    lengths = [300, 1, 45, 129, 17]
    case = Case.random(lengths, heads, kv_heads, head_dim, dtype)
    bound, spec = attention.bind("cpu", deterministic=True), AttentionSpec(0, head_dim**-0.5, window)
    sinks = None if window is None else torch.randn(heads).to(dtype)

    def run(*arguments):
        return bound(*arguments, spec, sinks)

    def paged(new, totals, **how):
        return run(*case.batch(new, totals, **how)).split(new)

    whole = run(*case.packed()).split(lengths)
    for ours, theirs in zip(paged(lengths, lengths), whole, strict=True):
        assert torch.equal(ours, theirs)  # from pages as from the batch itself
    alone = Case(case.q[:1], case.k[:1], case.v[:1])
    assert torch.equal(run(*alone.packed()), whole[0])
    for sizes in ([1] * 20, [7, 100, 21], [128, 1, 127], [299, 1]):  # any chunks, among company of any size
        done = 0
        for size in sizes:
            done += size
            others = [max(1, min(total, done)) for total in lengths[1:]]
            chunk = paged([size, 1, *(1 for _ in others[1:])], [done, *others], seed=done)
            assert torch.equal(chunk[0], whole[0][done - size : done])
            assert torch.equal(chunk[3][0], whole[3][others[2] - 1])


def test_groups_are_bounded_and_similar():
    lengths = [16 * (i % 40) + 8 for i in range(200)]
    tables = torch.zeros(200, 64, dtype=torch.int32)
    work = schedule(list(range(201)), lengths, tables, PAGE, token_bytes=1024, dtype=torch.float32, window=None)
    assert not work.chunks
    assert not work.padded
    seen = []
    for group in work.groups:
        rows = range(200)[group.rows] if isinstance(group.rows, slice) else group.rows.tolist()
        seen += rows
        used = sum(lengths[row] for row in rows)
        staged = len(group.slots) if isinstance(group.slots, torch.Tensor) else group.slots.stop - group.slots.start
        assert staged * 1024 <= TILE_BYTES
        assert (staged - used) * 1024 <= PADDING_BYTES + SPAN_MULTIPLE * len(rows) * 1024
    assert sorted(seen) == list(range(200))


def test_keys_of_consecutive_pages_are_not_copied():
    tables = torch.arange(5, 15, dtype=torch.int32)[None]
    work = schedule([0, 1], [150], tables, PAGE, token_bytes=256, dtype=torch.float32, window=None)
    assert work.groups[0].slots == slice(5 * PAGE, 5 * PAGE + 150)


def test_cost_is_the_hand_count():
    def cost(workload, window, pages=None, kv_dtype=torch.bfloat16):
        tokens = workload.tokens
        q = torch.empty(tokens, 8, 16, dtype=torch.bfloat16, device="meta")
        k = torch.empty(tokens, 2, 16, dtype=kv_dtype, device="meta")
        offsets = torch.empty(len(workload.new) + 1, dtype=torch.int32, device="meta")
        step = Sequences(offsets, max(workload.new), pages)
        return attention.cost(q, k, k, step, AttentionSpec(0, 0.25, window), workload=workload)

    row = 8 * 16 * 2  # bytes of a token's queries
    key = 2 * 2 * 16 * 2  # bytes of a token's key and value
    # A prompt of 4 sees 1 + 2 + 3 + 4 keys; a decoding query at position 9 sees 10.
    assert cost(Workload((4, 1), (4, 10)), None) == Cost(
        flops=4 * 8 * 16 * (10 + 10), read=5 * row + 14 * key, written=5 * row, cached=14 * key
    )
    # With a window of 3: 1 + 2 + 3 + 3, and 3; the decoding query reads 3 keys.
    assert cost(Workload((4, 1), (4, 10)), 3) == Cost(
        flops=4 * 8 * 16 * (9 + 3), read=5 * row + 7 * key, written=5 * row, cached=7 * key
    )
    # Positions 6 to 9 with a window of 3 read the keys 4 to 9.
    assert cost(Workload((4,), (10,)), 3) == Cost(
        flops=4 * 8 * 16 * 12, read=4 * row + 6 * key, written=4 * row, cached=6 * key
    )
    # A window longer than everything changes nothing.
    assert cost(Workload((4, 1), (4, 10)), 99) == cost(Workload((4, 1), (4, 10)), None)
    # The pools decide what a key takes.
    pool = torch.empty(9, PAGE, 2, 16, dtype=torch.float32, device="meta")
    tables = torch.empty(1, 1, dtype=torch.int32, device="meta")
    pages = PagedKV((pool,), (pool,), tables, tables[0], tables[0])
    assert cost(Workload((1,), (10,)), None, pages).read == row + 10 * 2 * key
    # A number a head, where there are sinks; of decode steps, too.
    given, workload = (*Case.random([40], 6, 2, 20).batch([1]), AttentionSpec(0, 0.3, 9)), Workload((1,), (40,))
    own = attention.cost(*given, SINKS, workload=workload) - attention.cost(*given, workload=workload)
    assert own == Cost(read=6 * 4, weights=6 * 4)


def test_meta_has_the_shape_of_the_queries():
    q = torch.empty(5, 8, 16, dtype=torch.bfloat16, device="meta")
    k = torch.empty(5, 2, 16, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    out = attention(q, k, k, Sequences(offsets, 5), AttentionSpec(0, 0.25))
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "meta")


def test_libraries_that_know_no_sinks_leave_them_to_others() -> None:
    q, k, v, batch = Case.random([512, 512], heads=6, kv_heads=2, head_dim=16, dtype=torch.bfloat16).packed()
    spec = AttentionSpec(0, 0.3)
    assert attention_train.dense_supports(AttentionCall(q, k, v, batch, spec))
    assert not attention_train.dense_supports(AttentionCall(q, k, v, batch, spec, SINKS))
    assert not attention_train.supports(AttentionCall(q, k, v, batch, spec, SINKS))
    _, pages = decode_step([1, 9], 6, 2, 16, False, torch.bfloat16)
    assert cudnn_prompts.takes(pages, spec, None)
    assert not cudnn_prompts.takes(pages, spec, SINKS)
