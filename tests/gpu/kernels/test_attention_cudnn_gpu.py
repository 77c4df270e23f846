"""cuDNN's attention for prompts: exact, eagerly and for any batch in one CUDA graph, whatever pages held before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from strata.kernels.attention import mixed as attention_mixed
from strata.kernels.attention.attention import attention
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.cudnn_prompts import plan_for, why_no_plan
from strata.kernels.attention.decode_triton import decode_attention_kernel
from strata.kernels.attention.prompt_keys import gather_prompt_keys, reference
from strata.kernels.attention.query_chunks import (
    KEY_BLOCK,
    MAX_PROMPTS,
    MAX_TOKENS,
    Rows,
    as_query_chunks,
    gathered_keys,
    keys_in_blocks,
    pure_prefill_rows,
    query_chunks,
)
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences
from strata.kernels.attention.varlen_triton import attention_kernel
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.state.paged import PagedKV
from tests.gpu.kernels.test_attention_mixed_gpu import PAGE, STEPS, arguments, as_captured, assert_close, exact, padded
from tests.gpu.tensors import captured
from tests.kernels.attention.test_query_chunks import Step, random_pure_prefill, random_step, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned", "_library")]

SHAPES = [(32, 8, 128), (14, 2, 64), (16, 8, 128)]
# Tokens, sequences, and pages of the longest sequence of the CUDA graph that all batches run in.
TOKENS, SEQUENCES, MAX_PAGES, POOL = 4096, 56, 1024, 3000


@pytest.fixture(scope="module")
def _library() -> None:
    reason = why_no_plan(DeviceLimits.of(torch.device("cuda", 0)), torch.bfloat16, 128, PAGE)
    if reason is not None:
        pytest.skip(reason)


def divided(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with query chunks, as the inputs of a captured step make them."""
    q, k, v, batch, spec = given
    pages, parts = batch.pages, batch.pages.parts
    row = pages.keys[0].stride(1)
    rows = Rows(q.stride(0), q.shape[1] * q.shape[2], row, row)
    division = query_chunks(batch.offsets, pages.lengths, parts.bounds, rows)
    parts = replace(parts, query_chunks=as_query_chunks(division, rows))
    return q, k, v, batch._replace(pages=replace(pages, parts=parts)), spec


def whole_blocks(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """With tables of whole blocks of keys, as the engine's are, whose other entries are no pages."""
    *vectors, batch, spec = given
    tables = torch.full((len(batch.pages.tables), MAX_PAGES), 1 << 30, dtype=torch.int32, device="cuda")
    for sequence, total in enumerate(batch.pages.lengths.tolist()):
        used = -(-total // PAGE)
        tables[sequence, :used] = batch.pages.tables[sequence, :used]
    return *vectors, batch._replace(pages=replace(batch.pages, tables=tables)), spec


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_every_row(step: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    """Pages of nobody, and what lies behind a sequence in its last page, are not finite."""
    eager = whole_blocks(arguments(step, shape))
    given = as_captured(eager)
    wanted = exact(given)
    called = divided(eager)
    decodes = eager[3].pages.parts.decodes
    assert attention_mixed.kernels(AttentionCall(*called))[-1] == "(cuDNN)"
    assert (decode_attention_kernel in attention_mixed.kernels(AttentionCall(*called))) == (decodes > 0)
    assert_close(attention_mixed.attend(AttentionCall(*called)), wanted)
    for more in ((1, 1), (7, 133)):
        called = divided(padded(given, *more))
        assert attention_mixed.kernels(AttentionCall(*called))[-1] == "(cuDNN)"
        assert_close(attention_mixed.attend(AttentionCall(*called))[: len(wanted)], wanted)


def test_layers_with_windows_run_the_kernel_over_pages() -> None:
    given = divided(whole_blocks(as_captured(arguments(STEPS["everything"], (16, 8, 128), 300))))
    assert attention_mixed.kernels(AttentionCall(*given))[-1] is attention_kernel
    assert_close(attention_mixed.attend(AttentionCall(*given)), exact(given))


def test_one_recording_serves_any_batches() -> None:
    """Random steps, one after the other, in the same CUDA graph; the pages hold what the steps before left in them."""
    heads, kv_heads, width = shape = (16, 8, 128)
    keys, values = torch.full((2, POOL, PAGE, kv_heads, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    rotated = torch.zeros(TOKENS, heads + kv_heads, width, dtype=torch.bfloat16, device="cuda")
    whole = torch.zeros(3 * SEQUENCES + 3, dtype=torch.int32, device="cuda")
    offsets, lengths, decode_lengths, bounds = whole.split([SEQUENCES + 1, SEQUENCES, SEQUENCES, 2])
    tables = torch.zeros(SEQUENCES, MAX_PAGES, dtype=torch.int32, device="cuda")
    offsets.fill_(TOKENS)
    *_, batch, spec = as_captured(arguments([(0, 5)], shape))
    parts = replace(batch.pages.parts, decode_lengths=decode_lengths, starts=offsets[:-1], bounds=bounds)
    pages = replace(batch.pages, keys=(keys,), values=(values,), tables=tables, lengths=lengths, parts=parts)
    q, k = rotated.split((heads, kv_heads), 1)
    own = (q, k, k, batch._replace(offsets=offsets, longest=TOKENS, pages=pages), spec)
    graph, found = captured(lambda: attention_mixed.attend(AttentionCall(*divided(own))))
    draw = random.Random(torch.initial_seed())
    for number in range(25):
        step = random_step(draw, 14, TOKENS) if number else Step((), (), 0)
        while sum(-(-total // PAGE) for total in step.totals) > POOL:
            step = random_step(draw, 14, TOKENS)
        count, rows = len(step.new), sum(step.new)
        placed = tensors(step, SEQUENCES, TOKENS, MAX_PAGES, PAGE)
        order = torch.randperm(POOL)
        slots = []
        for sequence, total in enumerate(step.totals):
            used = -(-total // PAGE)
            pages_of = order[placed["tables"][sequence, :used].long()]
            placed["tables"][sequence, :used] = pages_of.int()
            slots.append((pages_of[:, None] * PAGE + torch.arange(PAGE)).flatten()[:total])
        every = torch.cat([*slots, torch.zeros(0, dtype=torch.long)]).cuda()
        for pool in (keys, values):
            pool.flatten(0, 1)[every] = torch.randn(len(every), kv_heads, width, device="cuda").bfloat16()
        rotated.copy_(torch.randn(rotated.shape, device="cuda"))
        offsets.copy_(placed["offsets"])
        lengths.copy_(placed["lengths"])
        bounds.copy_(placed["bounds"])
        tables.copy_(placed["tables"])
        decode_lengths.zero_()[: step.decodes] = lengths[: step.decodes]
        graph.replay()
        if not rows:
            continue
        part = replace(pages, tables=tables[:count], lengths=lengths[:count])
        wanted = exact((q[:rows], k, k, own[3]._replace(offsets=offsets[: count + 1], pages=part), spec))
        assert_close(found[:rows], wanted)
        keys[order[: POOL // 3].cuda()] = torch.nan  # of sequences that had them before
        values[order[POOL // 2 :].cuda()] = torch.nan


class PurePrefillStep:
    """What a CUDA graph of so many rows holds of steps whose prompts have all their keys in it.

    What is behind the rows of a step's query chunks, in all pages, and behind the last row is not finite. apart:
    keys and values have tensors of their own, as what pools in 8 bits hold of them.
    """

    def __init__(self, size: int, shape: tuple[int, int, int], *, apart: bool = False) -> None:
        heads, kv_heads, width = shape
        behind = size + KEY_BLOCK
        rotated = torch.full((behind, heads + kv_heads, width), torch.nan, dtype=torch.bfloat16, device="cuda")
        product = torch.full((behind, heads + 2 * kv_heads, width), torch.nan, dtype=torch.bfloat16, device="cuda")
        self.size = size
        self._vectors: tuple[torch.Tensor, ...] = rotated[:size], product[:size]
        self.q, self.k = self._vectors[0].split((heads, kv_heads), 1)
        self.v = self._vectors[1][:, heads + kv_heads :]
        if apart:
            held = torch.full((2, behind, kv_heads, width), torch.nan, dtype=torch.bfloat16, device="cuda")
            self.k, self.v = held[:, :size]
            self._vectors = self._vectors[0], self.k, self.v
        self.spec = AttentionSpec(0, width**-0.5)
        strides = self.k.stride(0), self.v.stride(0)
        self.rows = Rows(self.q.stride(0), heads * width, *strides, pure_prefill=True)
        self.offsets, self.lengths = torch.full((2, MAX_PROMPTS + 2), size, dtype=torch.int32, device="cuda")
        self.lengths = self.lengths[:-1].zero_()
        self._bounds = torch.zeros(2, dtype=torch.int32, device="cuda")
        pools = torch.full((2, 3, PAGE, kv_heads, width), torch.nan, dtype=torch.bfloat16, device="cuda")
        tables = torch.full((MAX_PROMPTS + 1, MAX_PAGES), 1 << 30, dtype=torch.int32, device="cuda")
        self._pages = PagedKV((pools[0],), (pools[1],), tables, self.lengths, self.lengths)

    def place(self, new: tuple[int, ...]) -> None:
        for vectors in self._vectors:
            vectors.fill_(torch.nan)[: pure_prefill_rows(new)] = torch.randn(
                pure_prefill_rows(new), *vectors.shape[1:]
            ).cuda()
        ends = torch.tensor((0, *new)).cumsum(0)
        self.offsets.fill_(self.size)[: len(ends)] = ends
        self.lengths.zero_()[: len(new)] = torch.tensor(new)
        self._bounds[1] = len(new) + 1

    def arguments(self) -> tuple[Any, ...]:
        """Those of `attention`, divided as the inputs of a captured step are."""
        division = query_chunks(self.offsets, self.lengths, self._bounds, self.rows)
        chunks = as_query_chunks(division, self.rows)
        parts = BatchSplit(torch.zeros_like(self.lengths), self.offsets[:-1], self._bounds, 0, chunks)
        batch = Sequences(self.offsets, self.size, replace(self._pages, parts=parts))
        return self.q, self.k, self.v, batch, self.spec

    def exact(self, new: tuple[int, ...]) -> torch.Tensor:
        """The reference in float64 of the rows of prompts."""
        vectors = (one[: sum(new)].double() for one in (self.q, self.k, self.v))
        ends = Sequences(self.offsets[: len(new) + 1], max(new))
        found: torch.Tensor = attention.reference(*vectors, ends, self.spec)
        return found

    def assert_right(self, found: torch.Tensor, new: tuple[int, ...]) -> None:
        assert_close(found[: sum(new)], self.exact(new))
        assert found[: pure_prefill_rows(new)].isfinite().all()  # the values of the next layer follow from them


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "new",
    [(2048,), (1,), (3001,), (2047, 1), (1, 1, 1300), (900, 1024, 17), (128,) * 16, (255,) * 16, (1025, 127, 129, 640)],
    ids=str,
)
def test_fresh_prompts(new: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    """With rows left, and with just as many as the last block of keys needs, which may lie apart."""
    for size, apart in (
        (pure_prefill_rows(new), False),
        (pure_prefill_rows(new) + 300, False),
        (pure_prefill_rows(new), True),
    ):
        step = PurePrefillStep(size, shape, apart=apart)
        step.place(new)
        given = step.arguments()
        assert attention_mixed.supports(AttentionCall(*given))
        assert attention_mixed.kernels(AttentionCall(*given)) == ("(cuDNN)",)
        step.assert_right(attention_mixed.attend(AttentionCall(*given)), new)


def test_vectors_that_lie_otherwise_are_read_from_pages() -> None:
    """As those of a model whose keys and values are products of their own; the kernel over pages takes them."""
    step = [
        (0, 700),
        (
            0,
            1,
        ),
        (0, 900),
    ]
    eager = whole_blocks(arguments(step, (16, 8, 128)))
    q, k, v, batch, spec = eager
    rows = Rows(q.stride(0), 16 * 128, k.stride(0), v.stride(0), pure_prefill=True)
    pages = batch.pages
    division = query_chunks(batch.offsets, pages.lengths, pages.parts.bounds, rows)
    parts = replace(pages.parts, query_chunks=as_query_chunks(division, rows))
    given = (q, k, v.contiguous(), batch._replace(pages=replace(pages, parts=parts)), spec)
    assert_close(attention_mixed.attend(AttentionCall(*given)), exact(eager))


def test_one_recording_serves_any_fresh_prompts() -> None:
    step = PurePrefillStep(MAX_TOKENS, (16, 8, 128))
    graph, found = captured(lambda: attention_mixed.attend(AttentionCall(*step.arguments())))
    draw = random.Random(torch.initial_seed())
    for number in range(20):
        new = random_pure_prefill(draw, MAX_PROMPTS, MAX_TOKENS) if number else (MAX_TOKENS,)
        step.place(new)
        found.fill_(torch.nan)
        graph.replay()
        step.assert_right(found, new)


@pytest.mark.parametrize("pure_prefill", [False, True])
def test_the_division_is_the_reference_s(pure_prefill: bool) -> None:
    draw = random.Random(torch.initial_seed())
    for _ in range(30):
        step = random_step(draw, MAX_PROMPTS, MAX_TOKENS)
        rows = Rows(3072, 2048, 1024, 4096, pure_prefill=pure_prefill)
        if pure_prefill:
            new = random_pure_prefill(draw, MAX_PROMPTS, MAX_TOKENS)
            step = Step((0,) * len(new), new, 0)
        given = tensors(step, len(step.new) + 1, MAX_TOKENS, MAX_PAGES, PAGE)
        of_step = [given[name] for name in ("offsets", "lengths", "bounds")]
        wanted = query_chunks(*of_step, rows)
        found = query_chunks(*(tensor.cuda() for tensor in of_step), rows)
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("shape", [(2, 64), (3, 64), (8, 128), (32, 128)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_gathered_keys_are_the_reference_s(page_size: int, shape: tuple[int, int]) -> None:
    """Rows behind the last block of the last prompt stay as they were."""
    draw, longest = random.Random(torch.initial_seed()), 16 * MAX_PAGES
    row = shape[0] * shape[1]
    rows = Rows(3 * row, row, row, row)
    for _ in range(5):
        step = random_step(draw, MAX_PROMPTS, MAX_TOKENS)
        if keys_in_blocks(step.totals[step.decodes :]) > gathered_keys(longest):
            continue
        given = tensors(step, len(step.new) + 1, MAX_TOKENS, longest // page_size, page_size)
        count = max(1, sum(-(-total // page_size) for total in step.totals))
        keys, values = torch.randn(2, count, page_size, *shape, device="cuda").bfloat16()
        there = {name: tensor.cuda() for name, tensor in given.items()}
        pages = PagedKV((keys,), (values,), there["tables"], there["lengths"], there["lengths"])
        division = query_chunks(there["offsets"], there["lengths"], there["bounds"], rows)
        chunks = as_query_chunks(division, rows)
        wanted = reference(pages, 0, chunks, longest)
        last = int(chunks.prompts[0].max()) * KEY_BLOCK
        for one, other in zip(gather_prompt_keys(pages, 0, chunks, longest), wanted, strict=True):
            assert one.shape == other.shape
            assert torch.equal(one[:last], other[:last])


def test_layers_share_a_plan() -> None:
    before = plan_for.cache_info().misses
    given = divided(whole_blocks(as_captured(arguments(STEPS["fresh alike"], (16, 8, 128)))))
    for _ in range(3):
        attention_mixed.attend(AttentionCall(*given))
    assert plan_for.cache_info().misses <= before + 1
