"""The Triton kernels of attention with sinks in Triton's interpreter, against the reference: run by `test_sinks`."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from strata.cache.pool import PoolShape
from strata.engine.recorded_steps import fresh_rows_of
from strata.kernels.attention import cuda, decode_cuda, fixed
from strata.kernels.attention.attention import attention
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.decode_tile import DecodeTile
from strata.kernels.attention.prompt_keys import gather_prompt_keys, reference
from strata.kernels.attention.spec import AttentionCall, AttentionSpec
from strata.kernels.attention.virtual_sequences import (
    KEY_BLOCK,
    as_virtual_sequences,
    launched,
    virtual_sequences,
)
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.rounded_triton import write_rounded
from tests.kernels.attention.divisions import random_step
from tests.kernels.attention.test_attention import Case
from tests.kernels.attention.test_decode_attention import copied, step
from tests.kernels.attention.test_prompt_keys import LONGEST, ROWS, pages_of
from tests.kernels.interpreter import prepare_interpreter

SINKS = torch.tensor([0.0, 30.0, -30.0, 2.0])
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def _same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, **NEAR)


def prompts_and_mixed_steps() -> None:
    case = Case.random([20, 1, 9], heads=4, kv_heads=2, head_dim=20)
    for window in (None, 9):
        spec = AttentionSpec(0, 0.3, window)
        for given in (case.batch([7, 1, 9]), case.packed()):
            wanted = attention.reference(*given, spec, SINKS)
            for attend in (cuda.attend, fixed.attend):
                _same(attend(AttentionCall(*given, spec, SINKS)), wanted)


def decoding() -> None:
    case = Case.random([270, 5], heads=4, kv_heads=2, head_dim=20)
    q, k, v, batch = case.batch([1, 1])
    for window in (None, 30):
        spec = AttentionSpec(0, 0.3, window)
        wanted = attention.reference(q, k, v, batch, spec, SINKS)
        _same(fixed.attend(AttentionCall(q, k, v, batch, spec, SINKS)), wanted)
        for splits, apart in ((1, False), (4, False), (4, True), (7, True)):
            tile = DecodeTile(keys=16, warps=4, stages=2, split=32, splits=splits, apart=apart)
            _same(decode_cuda.decode(q.flatten(1), 4, 20, batch.pages, spec, tile=tile, sinks=SINKS), wanted)


def decoding_from_the_product() -> None:
    given, pages = step([1, 0, 16], 4, 2, 16, True, torch.float32)
    for window in (None, 3):
        spec, alone = AttentionSpec(1, 0.3, window), copied(pages)
        product, *others, batch, heads = given
        wanted = decode_attention.reference(product, *others, batch._replace(pages=alone), heads, spec, SINKS)
        unfinished = decode_cuda.Unfinished(*others[:2], heads.eps, *others[2:])
        held = pages.lengths > 0
        for apart in (False, True):
            tile = DecodeTile(keys=16, warps=4, stages=2, split=16, splits=2, apart=apart)
            found = decode_cuda.decode(product, 4, 16, copied(pages), spec, unfinished, tile, sinks=SINKS)
            _same(found[held], wanted[held])


def pools_in_8_bits(kind: torch.dtype) -> None:
    given, plain = step([1, 0, 16, 9], 4, 2, 16, True, torch.float32)
    product, *others, batch, heads = given
    made = PoolShape(2, plain.page_size, 2, 16, torch.float32, rounded=kind)
    cached = [torch.randint(-127, 128, pool.shape).to(kind) for pool in (*plain.keys[:2], *plain.values[:2])]
    powers = torch.randint(118, 123, (4, len(cached[0]), 2, plain.page_size)).to(torch.uint8)
    assert made.rounded == kind
    own = fresh_rows_of(4, made)

    def pages() -> PagedKV:
        keys, values = (tuple(one.clone() for one in cached[at : at + 2]) for at in (0, 2))
        exponents = (tuple(one.clone() for one in powers[at : at + 2]) for at in (0, 2))
        held = replace(plain, keys=keys, values=values)
        return replace(held, **dict(zip(("key_exponents", "value_exponents"), exponents, strict=True)))

    for window in (None, 3):
        spec, expected, found = AttentionSpec(1, 0.3, window), pages(), pages()
        wanted = decode_attention.reference(product, *others, batch._replace(pages=expected), heads, spec, SINKS)
        unfinished = decode_cuda.Unfinished(*others[:2], heads.eps, *others[2:])
        tile = DecodeTile(keys=16, warps=4, stages=2, split=16, splits=2, apart=kind == torch.int8)
        result = decode_cuda.decode(product, 4, 16, found, spec, unfinished, tile, sinks=SINKS)
        held = plain.lengths > 0
        _same(result[held], wanted[held])
        # What was written is the same, bit for bit; layer 0 is as it was.
        for name in ("keys", "values", "key_exponents", "value_exponents"):
            assert all(map(torch.equal, getattr(found, name), getattr(expected, name))), name
        q, k, v = torch.randn(4, 4, 16), *torch.randn(2, 4, 2, 16)
        k[1, 0, 3] = torch.nan
        both = kv_write.reference(k, v, expected, 1), write_rounded(k, v, found, 1)
        # Where cuDNN is told that they lie in fresh steps.
        assert [one.stride(0) for one in both[1]] == [own.keys, own.values]
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        for name in ("keys", "values", "key_exponents", "value_exponents"):
            assert all(map(torch.equal, getattr(found, name), getattr(expected, name))), name
        batch = batch._replace(pages=expected)
        wanted = attention.reference(q, k, v, batch, spec, SINKS)
        queries = q.flatten(1)
        for one in (
            decode_cuda.decode(queries, 4, 16, expected, spec, tile=tile, sinks=SINKS),
            fixed.attend(AttentionCall(q, k, v, batch, spec, SINKS)),
        ):
            torch.testing.assert_close(one[held], wanted[held], **NEAR, equal_nan=True)
        out = torch.zeros_like(q)
        cuda.prefill(out, q, k, v, batch.offsets, batch, spec, sinks=SINKS)
        torch.testing.assert_close(out[held], wanted[held], **NEAR, equal_nan=True)


def gathered_prompts() -> None:
    for seed in range(6):
        step_of, page_size = random_step(random.Random(seed), 5, 3000), (16, 64, 256)[seed % 3]
        pages, given = pages_of(step_of, page_size)
        virtual = []
        for rows in (ROWS, ROWS._replace(fresh=True)):
            of_step = given["offsets"], given["lengths"], given["bounds"], rows
            wanted = virtual_sequences.reference(*of_step)
            if not rows.fresh or not any(step_of.cached):
                assert torch.equal(launched(*of_step), wanted)
            virtual.append(as_virtual_sequences(wanted, rows))
        found = gather_prompt_keys(pages, 0, virtual[0], LONGEST)
        last = int(virtual[0].prompts[0].max()) * KEY_BLOCK
        for one, expected in zip(found, reference(pages, 0, virtual[0], LONGEST), strict=True):
            assert one[:last].equal(expected[:last])


if __name__ == "__main__":
    limits = DeviceLimits("interpreter", capability=(8, 0), shared_bytes=0, processors=0)
    DeviceLimits.of = staticmethod(lambda device: limits)  # type: ignore[method-assign]
    prepare_interpreter()
    torch.manual_seed(0)
    prompts_and_mixed_steps()
    decoding()
    decoding_from_the_product()
    gathered_prompts()
    for one in (torch.int8, torch.float8_e4m3fn):
        pools_in_8_bits(one)
    print("equal")
