"""What finishes heads and writes the state of sequences, and what a captured step reads of it."""

from __future__ import annotations

from functools import partial

import torch

from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.rotary import rope_grad
from strata.kernels.rotary.rope import partial_rope, rope, rope_angles, tail_rope
from strata.kernels.state.gather_tables import gather_tables, newest_tokens
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.latent_write import latent_write
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from tests.kernels.compiled_for import CompileCase

from .attention import pages
from .noted import BF16, EPS, FP32, empty, ints, noted

TOKENS = 1000
HEADS, KV_HEADS = 40, 8


def finished_heads(head_dim: int, norm: bool) -> list[CompileCase]:
    weight, angles = (empty(head_dim) if norm else None), empty(TOKENS, 1, head_dim, dtype=FP32)
    product, held = empty(TOKENS, (HEADS + 2 * KV_HEADS) * head_dim), pages(BF16, head_dim, 16, 3)
    finish = qk_rope_kv_write.bind("cuda")
    given = product, weight, weight, angles, angles, held, HeadsSpec(0, HEADS, KV_HEADS, EPS)
    return noted(f"of {head_dim}" + ", normalized" * norm, lambda: finish(*given))


def heads_with_gradients(head_dim: int) -> list[CompileCase]:
    product, angles = empty(TOKENS, (HEADS + 2 * 4) * head_dim), empty(TOKENS, 1, head_dim, dtype=FP32)
    parts = tuple(empty(TOKENS, heads, head_dim) for heads in (HEADS, 4, 4))
    return [
        case
        for backward in (False, True)
        for case in noted(
            f"of {head_dim}" + " back" * backward,
            lambda backward=backward: rope_grad._launch(product, parts, angles, angles, backward=backward),
        )
    ]


def compile_cases() -> list[CompileCase]:
    q, k, half, part = (empty(TOKENS, heads, dim) for heads, dim in ((40, 128), (8, 128), (20, 256), (20, 192)))
    angles, few = (empty(TOKENS, 1, dims, dtype=FP32) for dims in (128, 64))
    turn, turn_first, turn_last = rope.bind("cuda"), partial_rope.bind("cuda"), tail_rope.bind("cuda")
    row = pages(BF16, 576, 16, 3, kv_heads=1)
    launches = [
        noted("of positions", lambda: rope_angles.bind("cuda")(ints(TOKENS), empty(4096, 128, dtype=FP32))),
        noted("of heads", lambda: turn(q, angles, angles)),
        noted("of some dimensions", lambda: turn_first(half, few, few)),
        noted("of neighbours", lambda: turn_last(part, few, few, True)),
        noted("of halves", lambda: turn_last(part, few, few, False)),
        *(heads_with_gradients(head_dim) for head_dim in (64, 128)),
        *(finished_heads(head_dim, norm) for head_dim in (64, 80, 128, 256) for norm in (False, True)),
        *(
            noted(f"of {pool}", partial(kv_write.bind("cuda"), k, k, pages(pool, 128, 16, 3), 0))
            for pool in (BF16, torch.float8_e4m3fn, torch.int8)
        ),
        noted(
            "of rows",
            lambda: latent_write.bind("cuda")(empty(TOKENS, 576), empty(512), EPS, few, few, row, 0, True),
        ),
        noted(
            "of a step", lambda: gather_tables.bind("cuda")(ints(9, 256), ints(3), ints(4), ints(3), ints(TOKENS), 16)
        ),
        noted("of a step", lambda: newest_tokens.bind("cuda")(ints(TOKENS), ints(TOKENS), ints(9))),
    ]
    return [case for one in launches for case in one]
