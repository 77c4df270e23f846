"""The Triton kernels of attention in Triton's interpreter, against the references: run by `test_interpreted`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from strata.cache.pool import PoolShape
from strata.comm.join_heads import joined
from strata.engine.captured_steps import pure_prefill_rows_of
from strata.kernels.attention import batch_invariant, cuda, decode_cuda
from strata.kernels.attention.attention import attention
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.dcp.dcp import attend as attend_kept
from strata.kernels.attention.dcp.dcp import dcp_attention
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.decode_tile import DecodeTile
from strata.kernels.attention.prompt_keys import gather_prompt_keys, reference
from strata.kernels.attention.query_chunks import (
    KEY_BLOCK,
    as_query_chunks,
    launched,
    query_chunks,
)
from strata.kernels.attention.sparse import decodes, prompts
from strata.kernels.attention.sparse.decodes import page_sparse_attention
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, DcpCall, SparseCall
from strata.kernels.attention.varlen_triton import Tile
from strata.kernels.collective.joined_heads import pack_heads, unpack_heads
from strata.kernels.state.dcp_shard import DcpShard
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.quantized_triton import write_quantized
from tests.kernels.attention.cases import KEPT_LENGTHS, KEPT_NEW, Case, copied, decode_step, kept_batch
from tests.kernels.attention.test_prompt_keys import LONGEST, ROWS, pages_of
from tests.kernels.attention.test_query_chunks import random_step
from tests.kernels.attention.test_sparse import BLOCKS, PAGES, SINKS, SPEC, with_bounds

OWN_SINKS = torch.tensor([0.0, 30.0, -30.0, 2.0])
NEAR = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}


def near(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, **NEAR)


def tile_of(splits: int, apart: bool, split: int = 16) -> DecodeTile:
    return DecodeTile(keys=16, warps=4, stages=2, split=split, splits=splits, apart=apart)


@pytest.mark.parametrize("window", [None, 9])
def test_prompts_and_mixed_steps(window: int | None) -> None:
    case, spec = Case.random([20, 1, 9], heads=4, kv_heads=2, head_dim=20), AttentionSpec(0, 0.3, window)
    for given in (case.batch([7, 1, 9]), case.packed()):
        for attend in (cuda.attend, batch_invariant.attend):
            near(attend(AttentionCall(*given, spec, OWN_SINKS)), attention.reference(*given, spec, OWN_SINKS))


@pytest.mark.parametrize("window", [None, 30])
def test_decoding(window: int | None) -> None:
    q, k, v, batch = Case.random([270, 5], heads=4, kv_heads=2, head_dim=20).batch([1, 1])
    spec = AttentionSpec(0, 0.3, window)
    wanted = attention.reference(q, k, v, batch, spec, OWN_SINKS)
    near(batch_invariant.attend(AttentionCall(q, k, v, batch, spec, OWN_SINKS)), wanted)
    for splits, apart in ((1, False), (4, False), (4, True), (7, True)):
        given = q.flatten(1), 4, 20, batch.pages, spec
        near(decode_cuda.decode(*given, tile=tile_of(splits, apart, 32), sinks=OWN_SINKS), wanted)


@pytest.mark.parametrize("window", [None, 3])
def test_decoding_from_the_product(window: int | None) -> None:
    (product, *others, batch, heads), pages = decode_step([1, 0, 16], 4, 2, 16, True, torch.float32)
    spec, alone = AttentionSpec(1, 0.3, window), copied(pages)
    wanted = decode_attention.reference(product, *others, batch._replace(pages=alone), heads, spec, OWN_SINKS)
    unfinished = decode_cuda.Unfinished(*others[:2], heads.eps, *others[2:])
    held = pages.lengths > 0
    for apart in (False, True):
        given = product, 4, 16, copied(pages), spec, unfinished, tile_of(2, apart)
        near(decode_cuda.decode(*given, sinks=OWN_SINKS)[held], wanted[held])


FIELDS = ("keys", "values", "key_exponents", "value_exponents")


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [None, 3])
def test_pools_in_8_bits(kind: torch.dtype, window: int | None) -> None:
    (product, *others, batch, heads), plain = decode_step([1, 0, 16, 9], 4, 2, 16, True, torch.float32)
    own = pure_prefill_rows_of(4, PoolShape(2, plain.page_size, 2, 16, torch.float32, quantized=kind))
    cached = [torch.randint(-127, 128, pool.shape).to(kind) for pool in (*plain.keys, *plain.values)]
    powers = torch.randint(118, 123, (4, len(cached[0]), 2, plain.page_size)).to(torch.uint8)

    def pages() -> PagedKV:
        pools = [tuple(one.clone() for one in of[at : at + 2]) for of in (cached, powers) for at in (0, 2)]
        return replace(plain, **dict(zip(FIELDS, pools, strict=True)))

    def assert_written_alike() -> None:
        for name in FIELDS:
            assert all(map(torch.equal, getattr(found, name), getattr(expected, name))), name

    spec, expected, found, held = AttentionSpec(1, 0.3, window), pages(), pages(), plain.lengths > 0
    wanted = decode_attention.reference(product, *others, batch._replace(pages=expected), heads, spec, OWN_SINKS)
    unfinished = decode_cuda.Unfinished(*others[:2], heads.eps, *others[2:])
    tile = tile_of(2, kind == torch.int8)
    near(decode_cuda.decode(product, 4, 16, found, spec, unfinished, tile, sinks=OWN_SINKS)[held], wanted[held])
    assert_written_alike()  # bit for bit; layer 0 is as it was
    q, k, v = torch.randn(4, 4, 16), *torch.randn(2, 4, 2, 16)
    k[1, 0, 3] = torch.nan
    both = kv_write.reference(k, v, expected, 1), write_quantized(k, v, found, 1)
    # Where cuDNN is told that they lie in fresh steps.
    assert [one.stride(0) for one in both[1]] == [own.keys, own.values]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert_written_alike()
    batch = batch._replace(pages=expected)
    wanted, out = attention.reference(q, k, v, batch, spec, OWN_SINKS), torch.zeros_like(q)
    cuda.prefill(out, q, k, v, batch.offsets, batch, spec, sinks=OWN_SINKS)
    for one in (
        decode_cuda.decode(q.flatten(1), 4, 16, expected, spec, tile=tile, sinks=OWN_SINKS),
        batch_invariant.attend(AttentionCall(q, k, v, batch, spec, OWN_SINKS)),
        out,
    ):
        near(one[held], wanted[held])


@pytest.mark.parametrize("seed", range(6))
def test_gathered_prompts(seed: int) -> None:
    step_of, page_size = random_step(random.Random(seed), 5, 3000), (16, 64, 256)[seed % 3]
    pages, given = pages_of(step_of, page_size)
    chunks = []
    for rows in (ROWS, ROWS._replace(pure_prefill=True)):
        of_step = given["offsets"], given["lengths"], given["bounds"], rows
        wanted = query_chunks.reference(*of_step)
        if not rows.pure_prefill or not any(step_of.cached):
            assert torch.equal(launched(*of_step), wanted)
        chunks.append(as_query_chunks(wanted, rows))
    found = gather_prompt_keys(pages, 0, chunks[0], LONGEST)
    last = int(chunks[0].prompts[0].max()) * KEY_BLOCK
    for one, expected in zip(found, reference(pages, 0, chunks[0], LONGEST), strict=True):
        assert one[:last].equal(expected[:last])


KEPT_SPEC = AttentionSpec(0, 0.3)
every_rank = pytest.mark.parametrize("kept", [DcpShard(2, 0), DcpShard(2, 1), DcpShard(3, 2), DcpShard()], ids=str)


def with_parts(batch: Any, decodes: int, known: int | None) -> Any:
    """Of a batch whose first sequences decode, known: None if only the device knows how many."""
    starts, lengths = batch.offsets[:-1].clone(), batch.pages.lengths.clone()
    starts[:decodes] = batch.offsets[1 : decodes + 1]
    lengths[decodes:] = 0
    parts = BatchSplit(lengths, starts, torch.tensor([decodes, len(lengths)], dtype=torch.int32), known)
    return batch._replace(pages=replace(batch.pages, parts=parts))


@every_rank
def test_kept_keys_of_prompts_and_mixed_steps(kept: DcpShard) -> None:
    case = Case.random(KEPT_LENGTHS, heads=4, kv_heads=2, head_dim=20)
    order = [2, 1, 0, 3, 4]  # the first of a step decode, the others are prompts
    in_order = Case(*([of_all[at] for at in order] for of_all in (case.q, case.k, case.v)))
    given = *kept_batch(case, KEPT_NEW, kept), KEPT_SPEC, kept
    near(attend_kept(DcpCall(*given)), dcp_attention.reference(*given))
    q, k, v, batch = kept_batch(in_order, [KEPT_NEW[at] for at in order], kept)
    wanted = dcp_attention.reference(q, k, v, batch, KEPT_SPEC, kept)
    for known in (2, None):
        near(attend_kept(DcpCall(q, k, v, with_parts(batch, 2, known), KEPT_SPEC, kept)), wanted)


@every_rank
def test_kept_keys_of_decodes(kept: DcpShard) -> None:
    q, k, v, batch = kept_batch(Case.random([270, 5, 1], heads=4, kv_heads=2, head_dim=20), [1, 1, 1], kept)
    wanted = dcp_attention.reference(q, k, v, batch, KEPT_SPEC, kept)
    near(attend_kept(DcpCall(q, k, v, batch, KEPT_SPEC, kept)), wanted)
    for splits, apart in ((1, False), (4, False), (4, True)):
        out, sums = torch.empty(3, 4, 20), torch.empty(3, 4)
        given = q.flatten(1), 4, 20, batch.pages, KEPT_SPEC
        decode_cuda.decode(*given, tile=tile_of(splits, apart, 32), out=out, sums=sums, kept=kept)
        near((out, sums), wanted)


@pytest.mark.parametrize(("ranks", "own", "dim"), [(2, 4, 16), (3, 1, 20)])
def test_each_rank_gets_what_all_have_packed_for_it(ranks: int, own: int, dim: int) -> None:
    mixed, sums = torch.randn(ranks, 3, ranks * own, dim), torch.randn(ranks, 3, ranks * own) * 5
    sums[1:, 0] = -torch.inf  # only the first has seen a key
    sums[:, 2, 0] = -torch.inf  # and here nobody
    packed = torch.stack([pack_heads(*one, ranks) for one in zip(mixed, sums, strict=True)])
    wanted = joined(mixed, sums)
    assert not wanted[2, 0].any()
    found = [unpack_heads(packed[:, rank].contiguous(), dim, torch.float32) for rank in range(ranks)]
    near(torch.cat(found, 1), wanted)


def prompts_with_decodes() -> tuple[Any, ...]:
    q, k, v, batch = Case.random([70, 5, 66, 101], heads=6, kv_heads=2, head_dim=12).batch([1, 5, 18, 21], layers=2)
    return (q, k, v, batch), (q, k, v, with_parts(batch, 1, 1)), BLOCKS, SINKS


def prompts_of(lengths: list[int], new: list[int], heads: int, kv_heads: int, **changes: Any) -> tuple[Any, ...]:
    given = Case.random(lengths, heads=heads, kv_heads=kv_heads, head_dim=16).batch(new, layers=2)
    return given, given, BLOCKS._replace(share=0.4, **changes), None


SPARSE_PROMPTS = {
    "step with decodes": prompts_with_decodes(),
    "stretches of several pages": prompts_of([1, 150], [1, 40], 2, 1, stride=32, block=32),
    # A tile of scores ends within a block of queries, which sees keys that the tile's programs have not reached.
    "tiles of queries across blocks": prompts_of([80], [60], 3, 1),
}


@pytest.mark.parametrize("name", SPARSE_PROMPTS)
def test_block_sparse_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, alike, choice, sinks = SPARSE_PROMPTS[name]
    monkeypatch.setattr(prompts, "pooled_tile", lambda head_dim, dtype: Tile(32, 16, 4, 1))
    wanted = block_sparse_attention.reference(*given, SPEC, choice, sinks)
    near(prompts.attend(SparseCall(*alike, SPEC, choice, sinks)), wanted)


@pytest.mark.parametrize("captured", [False, True])
def test_decodes_over_chosen_pages(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second sequence no key has a positive score; or in a step with a prompt, of which only the device knows
    how many decode. Programs score pages more than once."""
    for name, value in (("_MIN_PLACES", 8), ("SCORED_PAGES", 2), ("_SCORE_PROGRAMS", 8)):
        monkeypatch.setattr(decodes, name, value)
    case = Case.random([40, 90, 25] if captured else [40, 100], heads=6, kv_heads=2, head_dim=12)
    if not captured:
        case.q[1].abs_()
        case.k[1].sub_(6)
    *vectors, batch = given = with_bounds(case.batch([1, 1, 7] if captured else [1, 1], layers=2))
    own = batch._replace(pages=replace(batch.pages, bounds=tuple(one.clone() for one in batch.pages.bounds)))
    own = with_parts(own, 2, None) if captured else own
    wanted = page_sparse_attention.reference(*given, SPEC, PAGES, SINKS)
    near(decodes.attend(SparseCall(*vectors, own, SPEC, PAGES, SINKS)), wanted)
    for ours, theirs in zip(own.pages.bounds, batch.pages.bounds, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
