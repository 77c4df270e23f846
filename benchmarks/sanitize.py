"""A small run of each own kernel, for compute-sanitizer to watch.

    python -m benchmarks.sanitize                                   # first: compiles the kernels into Triton's cache
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m benchmarks.sanitize

Every tensor is an allocation of its own, so that an access past its end is seen. Nothing is recorded in a CUDA graph.
Says which call runs, and fails if a kernel was not launched.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from triton import JITFunction

import strata.kernels
from benchmarks.kernels.cases import EPS, angles, full_pages, randn
from benchmarks.kernels.products import Product
from benchmarks.sanitize_packed import packed_calls
from strata.cache.pool import KVPool, PoolShape
from strata.kernels.activation import silu_mul_grad  # noqa: F401  registers what is run
from strata.kernels.activation.sigmoid_gate import sigmoid_gate
from strata.kernels.activation.silu_mul import Clamp, gelu_mul, silu_mul
from strata.kernels.attention import mixed as attention_mixed
from strata.kernels.attention.attention import attention
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.prompt_keys import gather_prompt_keys
from strata.kernels.attention.query_chunks import Rows, as_query_chunks, query_chunks
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.decodes import page_sparse_attention
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, HeadsSpec, Sequences
from strata.kernels.latent.attention import latent_attention
from strata.kernels.linear.embedding import embedding, vocabulary_embedding
from strata.kernels.linear.linear import linear, sliced_linear
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.linear.small_m import multiply
from strata.kernels.linear.small_m_tiles import SmallMTile
from strata.kernels.loss.loss import cross_entropy_gradients
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall
from strata.kernels.moe.combine import combine
from strata.kernels.moe.count import count_choices
from strata.kernels.moe.grouped import grouped_product
from strata.kernels.moe.local_order import local_order, sort_choices
from strata.kernels.moe.route import SOFTMAX, ExpertChoice, route
from strata.kernels.moe.small_m import by_choices
from strata.kernels.norm import norm_grad  # noqa: F401  registers what is run
from strata.kernels.norm.norm import add_rms_norm, launch_norm, rms_norm, wide_rms_norm
from strata.kernels.op import Operation
from strata.kernels.optimizer.adamw import Constants, adamw
from strata.kernels.optimizer.muon import muon_momentum, muon_update
from strata.kernels.quant.fp8 import quantize
from strata.kernels.recurrent.deinterleave import deinterleave
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.recurrent.gated_norm import gated_rms_norm
from strata.kernels.recurrent.sequences import StateSpaceSpec
from strata.kernels.recurrent.short_convolution import short_convolution
from strata.kernels.recurrent.state_space import state_space
from strata.kernels.rotary import rope_grad  # noqa: F401  registers what is run
from strata.kernels.rotary.rope import partial_rope, rope, rope_angles, tail_rope
from strata.kernels.sampling.filters import WORD, apply_bitmask, filter_bounds
from strata.kernels.sampling.sampling import gumbel_sample, token_logprobs
from strata.kernels.sampling.shards import best_in_shard, best_of_shards, exponential_sums
from strata.kernels.state.gather_tables import gather_tables, newest_tokens
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.latent_write import latent_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch

Call = tuple[str, Callable[[], object]]

HEADS, KV_HEADS = 4, 2
VOCABULARY = 3001


def own_kernels() -> set[str]:
    """The names of all kernels, but for those that wait for other GPUs, which one process lacks. A kernel is what no
    other function of Triton's calls."""
    found = pkgutil.walk_packages(strata.kernels.__path__, "strata.kernels.")
    modules = [importlib.import_module(module.name) for module in found]
    functions = [one.fn for module in modules for one in vars(module).values() if isinstance(one, JITFunction)]
    called = {name for one in functions for name in one.__code__.co_names}
    return {one.__name__ for one in functions if ".collective" not in one.__module__} - called


@contextmanager
def launches() -> Iterator[set[str]]:
    """The names of the kernels that are launched meanwhile."""
    seen: set[str] = set()
    run = JITFunction.run

    def noted(kernel: JITFunction, *args: object, **options: object) -> object:
        seen.add(kernel.fn.__name__)
        return run(kernel, *args, **options)

    JITFunction.run = noted
    try:
        yield seen
    finally:
        JITFunction.run = run


def calls() -> Iterator[Call]:
    """Small calls on torch's default device, some with sizes that fill no tile."""
    for rows, width in ((1, 128), (5, 1000), (3, 4096)):
        yield from _rowwise(rows, width)
    for head_dim in (80, 128):
        yield from _heads(head_dim)
    for head_dim, window in ((128, None), (80, 50)):
        yield from _attention(head_dim, window)
    yield from _latents()
    yield from _recurrences()
    yield from _sampling(rows=3)
    yield from _products()
    for rows, width in ((5, 1000), (70, 2048)):
        yield from _training(rows, width)


def own(operation: Operation, *args: object) -> Call:
    """Every own implementation of an operation without gradients, one after the other."""
    found = [made for made in operation.implementations if made.device == "cuda" and made.name.startswith("triton")]
    found = [made for made in found if not made.differentiable]

    def run() -> None:
        for implementation in found:
            implementation.run(*operation.call_args(*args))

    return f"{operation.name} {_shapes(args)}", run


def with_gradients(operation: Operation, *args: object) -> Call:
    """Both passes of the implementation whose backward pass is our own."""
    (made,) = (one for one in operation.implementations if one.name == "triton with gradients")

    def run() -> None:
        leaves = (x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
        results = made.run(*operation.call_args(*leaves))
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.randn_like(result) for result in results])

    return f"{operation.name} with gradients {_shapes(args)}", run


def _shapes(args: tuple[object, ...]) -> str:
    return " ".join(str(list(x.shape)) for x in args if isinstance(x, Tensor))


def _rowwise(rows: int, width: int) -> Iterator[Call]:
    yield own(rms_norm, randn(rows, width), randn(width), EPS)
    yield own(add_rms_norm, randn(rows, width), randn(rows, width), randn(width), EPS)
    yield own(wide_rms_norm, randn(rows, width), randn(width), EPS, 1.0)
    summed = partial(launch_norm, randn(rows, width), randn(width), EPS, randn(rows, width))
    yield f"norm of what is received [{rows}, {width}]", partial(summed, received=randn(rows, width))
    for gated in (silu_mul, gelu_mul):
        yield own(gated, *randn(rows, 2 * width).chunk(2, -1))
    yield own(embedding, torch.randint(50, (rows,), dtype=torch.int32), randn(50, width))
    yield own(vocabulary_embedding, torch.randint(150, (rows,), dtype=torch.int32), randn(50, width), 50)
    yield own(sliced_linear, randn(rows, width), randn(96, width), 8, False)


def _heads(head_dim: int) -> Iterator[Call]:
    tokens = 7
    pages = full_pages(KV_HEADS, head_dim, (tokens,))
    pages.slot_mapping[2] = -1  # a token that is written nowhere
    product = randn(tokens, (HEADS + 2 * KV_HEADS) * head_dim)
    q, k, v = product.unflatten(-1, (-1, head_dim)).split_with_sizes((HEADS, KV_HEADS, KV_HEADS), -2)
    cos_sin = angles(tokens, head_dim)
    yield own(rope_angles, torch.arange(tokens, dtype=torch.int32), torch.randn(tokens, head_dim))
    yield own(rope, q, *cos_sin)
    yield own(kv_write, k, v, pages, 0)
    yield own(kv_write, k, v, _in_8_bits(pages), 0)
    for weights in ((None, None), (randn(head_dim), randn(head_dim))):
        yield own(qk_rope_kv_write, product, *weights, *cos_sin, pages, HeadsSpec(0, HEADS, KV_HEADS, EPS))


def _in_8_bits(pages: PagedKV) -> PagedKV:
    pool = PoolShape(1, pages.page_size, *pages.keys[0].shape[2:], torch.bfloat16, quantized=torch.int8)
    held = KVPool(pool, len(pages.keys[0]), pages.keys[0].device)
    exponents = {"key_exponents": held.key_exponents, "value_exponents": held.value_exponents}
    return replace(pages, keys=held.keys, values=held.values, **exponents)


def _attention(head_dim: int, window: int | None) -> Iterator[Call]:
    lengths = (300, 1, 37)
    held = full_pages(KV_HEADS, head_dim, lengths)
    spec = AttentionSpec(0, head_dim**-0.5, window)

    def drawn(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        return randn(tokens, HEADS, head_dim), randn(tokens, KV_HEADS, head_dim), randn(tokens, KV_HEADS, head_dim)

    def step(*new: int, pages: PagedKV | None) -> Sequences:
        return Sequences(torch.tensor((0, *new), dtype=torch.int32).cumsum(0).int(), max(new), pages)

    yield own(attention, *drawn(3), step(1, 1, 1, pages=held), spec)
    # Of two sequences a kernel behind joins the splits.
    yield own(attention, *drawn(2), step(1, 1, pages=full_pages(KV_HEADS, head_dim, (300, 37))), spec)
    yield own(attention, *drawn(91), step(70, 1, 20, pages=held), spec)  # of 300, 1 and 37 tokens
    yield own(attention, *drawn(91), step(70, 1, 20, pages=None), spec)
    if window is None:
        prompts = step(70, 1, 20, pages=held)
        yield own(block_sparse_attention, *drawn(91), prompts, spec, BlockChoice(0.9, min_keys=1))
        bounds = held.keys[0].new_zeros(len(held.keys[0]), 2, KV_HEADS, head_dim)
        bounded = replace(held, bounds=(bounds,))
        yield own(page_sparse_attention, *drawn(3), step(1, 1, 1, pages=bounded), spec, PageChoice(2))
    packed = _in_8_bits(held)
    for new in ((1, 1, 1), (70, 1, 20)):
        yield own(attention, *drawn(sum(new)), step(*new, pages=packed), spec)
    yield f"recorded attention of {head_dim}", lambda: _captured(*drawn(100), held, spec)
    offsets, bounds = torch.tensor((0, 1, 2, 30), dtype=torch.int32), torch.tensor((1, 3), dtype=torch.int32)
    row = KV_HEADS * head_dim
    rows = Rows(6 * head_dim, 4 * head_dim, row, row)
    yield own(query_chunks, offsets, held.lengths, bounds, rows)
    yield f"keys of prompts of {head_dim}", lambda: _gathered(held, offsets, bounds, rows)
    ends = torch.tensor(lengths) - 1
    slots = held.tables.gather(1, ends[:, None] // held.page_size)[:, 0] * held.page_size + ends % held.page_size
    written = replace(held, slot_mapping=slots.int())
    product = randn(3, (HEADS + 2 * KV_HEADS) * head_dim)
    for weights in ((None, None), (randn(head_dim), randn(head_dim))):
        heads = HeadsSpec(0, HEADS, KV_HEADS, EPS)
        decodes = step(1, 1, 1, pages=written)
        yield own(decode_attention, product, *weights, *angles(3, head_dim), decodes, heads, spec)


def _captured(q: Tensor, k: Tensor, v: Tensor, held: PagedKV, spec: AttentionSpec) -> Tensor:
    """A decode, prompts of 7 and 20 tokens, and padding for the rest."""
    tables, lengths = held.tables[[0, 1, 2, 0]], torch.tensor((300, 7, 37, 0), dtype=torch.int32)
    decode_lengths, starts = torch.tensor(((300, 0, 0, 0), (1, 1, 8, 28)), dtype=torch.int32)
    parts = BatchSplit(decode_lengths, starts, torch.tensor((1, 4), dtype=torch.int32))
    offsets = torch.tensor((0, 1, 8, 28, len(q)), dtype=torch.int32)
    pages = replace(held, tables=tables, lengths=lengths, parts=parts)
    return attention_mixed.attend(AttentionCall(q, k, v, Sequences(offsets, len(q), pages), spec))


def _gathered(held: PagedKV, offsets: Tensor, bounds: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    chunks = as_query_chunks(query_chunks(offsets, held.lengths, bounds, rows), rows)
    return gather_prompt_keys(held, 0, chunks, held.tables.shape[1] * held.page_size)


def _latents() -> Iterator[Call]:
    heads, nope, dims, rank, value, tokens = 5, 20, 12, 40, 24, 27
    product, cos_sin = randn(tokens, rank + dims), angles(tokens, dims)
    held = full_pages(1, rank + dims, (300, 6, 20))
    spec = AttentionSpec(0, 0.1)
    written = replace(held, slot_mapping=held.slot_mapping[:tokens])
    q, weight = randn(tokens, heads, nope + dims), randn(heads * (nope + value), rank)
    yield own(partial_rope, q, *cos_sin)
    for paired in (False, True):
        yield own(tail_rope, q, *cos_sin, paired)
        yield own(latent_write, product, randn(rank), EPS, *cos_sin, written, 0, paired)
    for new in ((1, 1, 1), (1, 6, 20)):
        offsets, rows = torch.tensor((0, *new), dtype=torch.int32).cumsum(0).int(), sum(new)
        yield own(latent_attention, q[:rows], product[:rows], weight, Sequences(offsets, max(new), held), spec)
    parts = BatchSplit(held.lengths * (held.lengths > 20), offsets[:-1], torch.tensor((1, 3), dtype=torch.int32), 1)
    step = Sequences(offsets, 20, replace(held, parts=parts))
    yield own(latent_attention, q, product, weight, step, spec)


def _recurrences() -> Iterator[Call]:
    """Of sequences that begin, go on and stand still, with rows of a pool, and of whole ones without."""
    counts, starts, heads, groups, dim, size, channels = (70, 1, 0, 19), (0, 300, 5, 7), 4, 2, 40, 24, 200
    tokens = sum(counts)
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    offsets, ids = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0).int(), positions.int()
    slots = torch.tensor((4, 1, 3, 0), dtype=torch.int32)
    tail = randn(6, channels, 3)
    bounded = StateSpaceSpec(0, 0.01, 1.0)

    def per_head() -> tuple[Tensor, Tensor]:
        return torch.randn(heads), torch.randn(heads)

    for state in (torch.randn(6, heads, dim, size), torch.randn(6, heads, size, dim), None):
        states = None if state is None else RecurrentStates(((tail, state),), slots)
        batch = Batch(ids, ids, offsets, max(counts), states=states)
        mixed, keys = (randn(tokens, groups, size) for _ in range(2))
        values, steps = randn(tokens, heads, dim), randn(tokens, heads)
        if state is None or state.shape[2] == dim:
            yield own(
                short_convolution, randn(tokens, channels), randn(channels, 1, 4), randn(channels), batch, 0, True
            )
            yield own(state_space, values, steps, mixed, keys, *per_head(), torch.randn(heads), batch, bounded)
        if state is None or state.shape[2] == size:
            yield own(gated_delta, mixed, keys, values, steps, randn(tokens, heads), *per_head(), batch, 0)
    for gate_first in (False, True):
        yield own(gated_rms_norm, randn(7, 480), randn(7, 480), randn(480), EPS, 120, gate_first)
    for parts in ((20, 20, 40), (5, 5)):
        yield own(deinterleave, randn(7, 3 * sum(parts) + 9)[:, :-9].unflatten(1, (3, -1)), parts)
    yield own(sigmoid_gate, randn(7, 4, 120), randn(7, 4, 240)[..., 120:])
    yield own(sigmoid_gate, randn(7, 1500), randn(7, 9)[:, 8:])


def _sampling(rows: int) -> Iterator[Call]:
    logits, temperatures = randn(rows, VOCABULARY), torch.linspace(0, 1, rows)
    top_k = torch.randint(1, 50, (rows,), dtype=torch.int32)
    top_p, min_p = torch.rand(2, rows)
    seeds, steps = torch.arange(rows), torch.arange(rows, dtype=torch.int32)
    bounds = torch.zeros(rows), torch.full((rows,), VOCABULARY, dtype=torch.int32)
    masks = torch.randint(-(2**31), 2**31, (rows, -(-VOCABULARY // WORD)), dtype=torch.int32)
    yield own(apply_bitmask, logits, masks, torch.arange(rows, dtype=torch.int32) - 1)
    yield own(apply_bitmask, logits[:, 1:], masks, torch.arange(rows, dtype=torch.int32) - 1, 1)
    yield own(filter_bounds, logits, temperatures, top_k, top_p, min_p)
    yield own(gumbel_sample, logits, temperatures, seeds, steps)
    yield own(gumbel_sample, logits, temperatures, seeds, steps, bounds)
    yield own(newest_tokens, steps, steps - 1, torch.arange(rows, dtype=torch.int32) - 1)
    tables = torch.randint(1000, (rows + 1, 1300), dtype=torch.int32)
    offsets = torch.arange(rows + 1, dtype=torch.int32)
    yield own(gather_tables, tables, steps, offsets, steps * 17, steps * 5, 16)  # the first is padding
    yield own(token_logprobs, logits.float(), torch.randint(VOCABULARY, (rows, 6)))
    yield own(best_in_shard, logits, temperatures, seeds, steps, 77)
    yield own(best_of_shards, torch.randint(2**62, (rows, 3)))
    yield own(exponential_sums, logits.float())


# Rows, and the tile that multiplies them: with one program to the whole of k and with several.
TILES = (
    (1, SmallMTile("gemv", 4, 512, 4)),
    (3, SmallMTile("gemv", 2, 256, 2)),
    (7, SmallMTile("dot", 16, 128, 2, 3, 1, rows=16)),
    (40, SmallMTile("dot", 64, 64, 4, 3, 2, rows=32)),
    (200, SmallMTile("dot", 64, 64, 8, 3, 4, rows=128)),
)


def _products() -> Iterator[Call]:
    out, width = 208, 512
    for name in ("linear", "linear_add", "scaled_linear", "scaled_linear_silu_mul"):
        product = Product("small", name, name, out, width)
        for rows, tile in TILES:
            call = product.call(rows, randn(out, width))
            ahead = replace(tile, early=True, prefetch=0 if tile.kernel == "gemv" else 128)
            for chosen in (tile, ahead):
                yield f"{name} x{rows} {chosen}", partial(multiply, call, chosen)
    for rows, taken in ((1, width), (70, width - 16)):
        yield own(linear, randn(rows, taken), randn(out, taken), randn(out))
        yield own(linear_silu_mul, randn(rows, taken), randn(out, taken), randn(out))
    yield from packed_calls(out, width)
    ends = torch.tensor([0, 5, 5, 70], dtype=torch.int32)  # two experts have no rows
    for dtype, taken in ((torch.float16, 128), (torch.float32, 100)):
        operands = randn(70, taken).to(dtype), randn(len(ends), 96, taken).to(dtype), ends
        yield f"grouped_product {_shapes(operands)}", partial(grouped_product, *operands)
    clamp, matrices, biases = Clamp(1.702, 7.0), (randn(5, 96, 128), randn(5, 128, 48)), (randn(5, 96), randn(5, 128))
    gated = {"source": torch.arange(140) % 70, "per_token": 2, "gated": True, "bias": randn(4, 96), "clamp": clamp}
    yield "grouped_product with a gate", partial(grouped_product, randn(70, 128), randn(4, 96, 128), ends, **gated)
    given = randn(1, 128), torch.rand(1, 3), torch.tensor([[3, 0, 4]]), *matrices
    for call in (ExpertsCall(*given), BiasedExpertsCall(*given, *biases, clamp)):
        yield f"by_choices {_shapes(given)}", partial(by_choices, call)
    for choice in (SOFTMAX, ExpertChoice("sigmoid", 5, 2, "top2")):
        yield own(route, randn(70, 15), randn(15).float(), 4, True, choice)
    chosen, turns = torch.randint(6, (70, 2)), torch.randint(8, (6, 4), dtype=torch.int32)
    yield own(count_choices, chosen, torch.arange(70, dtype=torch.int32) - 1, torch.zeros(2, 6, dtype=torch.int64), 1)
    for placement in (None, turns):
        yield f"local_order {_shapes((chosen, placement))}", partial(local_order, chosen, 2, 3, placement)
        counted = partial(sort_choices, chosen, 2, 3, placement, None, counting=True)
        yield f"counted order {_shapes((chosen, placement))}", counted


def _training(rows: int, width: int) -> Iterator[Call]:
    yield with_gradients(rms_norm, randn(rows, width), randn(width), EPS)
    yield with_gradients(add_rms_norm, randn(rows, width), randn(rows, width), randn(width), EPS)
    yield with_gradients(silu_mul, *randn(rows, 2 * width).chunk(2, -1))
    head_dim = 80
    cos_sin = angles(rows, head_dim)
    product = randn(rows, (HEADS + 2 * KV_HEADS) * head_dim)
    yield with_gradients(rope, randn(rows, HEADS, head_dim), *cos_sin)
    yield with_gradients(qk_rope_kv_write, product, None, None, *cos_sin, None, HeadsSpec(0, HEADS, KV_HEADS))
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        for per_row in (False, True):
            yield own(quantize, randn(rows, width), kind, per_row)
    place = torch.randperm(3 * rows).view(rows, 3)
    rows_of_experts = randn(3 * rows, width), place.flatten().argsort(), place
    yield own(combine, *rows_of_experts, None)
    yield with_gradients(combine, *rows_of_experts, torch.rand(rows, 3))
    # Every other place is without a row; the first token has none.
    held = torch.arange(3, 3 * rows, 2)
    place = torch.full((3 * rows,), -1).scatter(0, held, torch.arange(len(held))).view(rows, 3)
    rows_of_experts = randn(len(held), width), held, place
    yield own(combine, *rows_of_experts, None)
    yield with_gradients(combine, *rows_of_experts, torch.rand(rows, 3))
    targets = torch.randint(VOCABULARY, (rows,))
    scale = torch.full((), 1 / rows)
    yield own(cross_entropy_gradients, randn(rows, 64), randn(VOCABULARY, 64), targets, scale, 1 << 20)
    weight, gradient = randn(rows, width), randn(rows, width)
    master, first, second = weight.float(), torch.randn(rows, width), torch.rand(rows, width)
    rate = torch.tensor([0.01, 0.5, 0.3, 0.7])
    yield own(adamw, weight, master, first, second, gradient, rate, Constants(0.9, 0.95, 1e-8, 0.1))
    yield own(muon_momentum, torch.empty_like(weight), first, gradient, rate[2:], 0.95)
    yield own(muon_update, weight, master, gradient, rate[2:], 0.2, 0.1)


def missing(launched: set[str]) -> set[str]:
    """The own kernels that are not among those launched."""
    return own_kernels() - launched


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise SystemExit("benchmarks/sanitize.py runs all kernels, which takes a Hopper GPU or a later one: none here")
    # Read when the first tensor is made.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    count = 0
    with torch.device("cuda"), launches() as launched:
        for name, run in calls():
            print(name, flush=True)
            run()
            torch.cuda.synchronize()
            count += 1
    left = missing(launched)
    for name in sorted(left):
        print(f"not launched: {name}; add a call to benchmarks/sanitize.py", file=sys.stderr)
    print(f"{count} calls launched {len(launched)} kernels")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
