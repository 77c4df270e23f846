"""The Triton kernels of attention to kept keys in Triton's interpreter, against the reference: run by
`test_kept_attention`."""

from __future__ import annotations

from dataclasses import replace

import torch

from strata.comm.join_heads import joined
from strata.kernels.attention import decode_cuda
from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.decode_tile import DecodeTile
from strata.kernels.attention.divided import kept_cuda
from strata.kernels.attention.divided.kept import kept_attention
from strata.kernels.attention.spec import AttentionSpec, KeptCall
from strata.kernels.collective.joined_heads import join_packed, pack_heads
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.state.kept_keys import KeptKeys
from tests.kernels.attention.kept_case import LENGTHS, NEW, batch_of
from tests.kernels.attention.test_attention import Case
from tests.kernels.interpreter import prepare_interpreter

SPEC = AttentionSpec(0, 0.3)


def _same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for one, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


def prompts_and_mixed_steps(kept: KeptKeys) -> None:
    case = Case.random(LENGTHS, heads=4, kv_heads=2, head_dim=20)
    q, k, v, batch = batch_of(case, NEW, kept)
    _same(kept_cuda.attend(KeptCall(q, k, v, batch, SPEC, kept)), kept_attention.reference(q, k, v, batch, SPEC, kept))
    # The first of a step decode, the others are prompts.
    order = [2, 1, 0, 3, 4]
    sorted_case = Case(*([of_all[at] for at in order] for of_all in (case.q, case.k, case.v)))
    q, k, v, batch = batch_of(sorted_case, [NEW[at] for at in order], kept)
    wanted = kept_attention.reference(q, k, v, batch, SPEC, kept)
    for decodes in (2, None):  # None: recorded, where only the device knows
        starts = batch.offsets[:-1].clone()
        starts[:2] = batch.offsets[1:3]
        lengths = batch.pages.lengths.clone()
        lengths[2:] = 0
        parts = BatchParts(lengths, starts, torch.tensor([2, 5], dtype=torch.int32), decodes)
        divided = batch._replace(pages=replace(batch.pages, parts=parts))
        _same(kept_cuda.attend(KeptCall(q, k, v, divided, SPEC, kept)), wanted)


def decoding(kept: KeptKeys) -> None:
    case = Case.random([270, 5, 1], heads=4, kv_heads=2, head_dim=20)
    q, k, v, batch = batch_of(case, [1, 1, 1], kept)
    wanted = kept_attention.reference(q, k, v, batch, SPEC, kept)
    _same(kept_cuda.attend(KeptCall(q, k, v, batch, SPEC, kept)), wanted)
    for splits, apart in ((1, False), (4, False), (4, True)):
        tile = DecodeTile(keys=16, warps=4, stages=2, split=32, splits=splits, apart=apart)
        out, sums = torch.empty(3, 4, 20), torch.empty(3, 4)
        given = q.flatten(1), 4, 20, batch.pages, SPEC
        decode_cuda.decode(*given, tile=tile, out=out, sums=sums, kept=kept)
        _same((out, sums), wanted)


def joining(ranks: int, own: int, dim: int) -> None:
    """Each rank gets what all have packed for it."""
    mixed, sums = torch.randn(ranks, 3, ranks * own, dim), torch.randn(ranks, 3, ranks * own) * 5
    sums[1:, 0] = -torch.inf  # only the first has seen a key
    sums[:, 2, 0] = -torch.inf  # and here nobody
    packed = torch.stack([pack_heads(*one, ranks) for one in zip(mixed, sums, strict=True)])
    wanted = joined(mixed, sums)
    assert not wanted[2, 0].any()
    found = [join_packed(packed[:, rank].contiguous(), dim, torch.float32) for rank in range(ranks)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    limits = DeviceLimits("interpreter", capability=(8, 0), shared_bytes=0, processors=0)
    DeviceLimits.of = staticmethod(lambda device: limits)  # type: ignore[method-assign]
    prepare_interpreter()
    for one in (KeptKeys(2, 0), KeptKeys(2, 1), KeptKeys(3, 2), KeptKeys()):
        prompts_and_mixed_steps(one)
        decoding(one)
    for sizes in ((2, 4, 16), (3, 1, 20)):
        joining(*sizes)
    print("equal")
