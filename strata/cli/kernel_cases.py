"""The calls of one step of a model, operation by operation, that `strata bench kernels` times besides its products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Workload
from strata.kernels.activation import silu_mul
from strata.kernels.attention import attention
from strata.kernels.embedding import embedding
from strata.kernels.kv_write import kv_write
from strata.kernels.norm import add_rms_norm, rms_norm
from strata.kernels.op import Operation
from strata.kernels.paged import BatchParts, PagedKV
from strata.kernels.qk_rope_kv_write import qk_rope_kv_write
from strata.kernels.rope import rope
from strata.kernels.sampling import gumbel_sample
from strata.models.config import ModelConfig

ROWS = (1, 64, 8192)
SAMPLED_ROWS = (1, 64)
DECODES = ((1, 1024), (1, 4096), (64, 1024), (64, 4096))
PREFILLS = (2048, 8192)
PAGE_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One call to time. `make` draws fresh arguments; `library` runs the same work by torch alone, if it can."""

    operation: Operation
    shape: str
    rows: int
    make: Callable[[], tuple[Any, ...]]
    workload: Workload
    dtype: str = "float32"  # of its arithmetic
    library: Callable[..., object] | None = None


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _integers(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, dtype=torch.int32, device="cuda")


def cases(config: ModelConfig) -> Iterator[Case]:
    """The cases of a model, cheapest kinds first."""
    for rows in ROWS:
        yield from _rowwise(config, rows)
    for rows in SAMPLED_ROWS:
        yield _sampling(config.vocab_size, rows)
    for batch, context in DECODES:
        yield _decode(config, batch, context)
    for length in PREFILLS:
        yield _prefill(config, length, fresh=True)
        yield _prefill(config, length, fresh=False)


def _rowwise(config: ModelConfig, rows: int) -> Iterator[Case]:
    workload = Workload((1,) * rows, (1,) * rows)
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = (heads + 2 * kv_heads) * dim

    def norm() -> tuple[Any, ...]:
        return _draw(rows, hidden), _draw(hidden), 1e-6

    def sum_and_norm() -> tuple[Any, ...]:
        return _draw(rows, hidden), *norm()

    def angles() -> list[Tensor]:
        return [torch.randn(rows, 1, dim, device="cuda") for _ in range(2)]

    def rotation() -> tuple[Any, ...]:
        return _draw(rows, qkv)[:, : heads * dim].unflatten(-1, (-1, dim)), *angles()

    def heads_to_pages() -> tuple[Any, ...]:
        weights = [_draw(dim), _draw(dim)] if config.architecture.startswith("Qwen3") else [None, None]
        return _draw(rows, qkv), heads, kv_heads, *weights, 1e-6, *angles(), _pages(kv_heads, dim, (rows,)), 0

    def activation() -> tuple[Any, ...]:
        return tuple(_draw(rows, 2 * inner).chunk(2, -1))

    def writing() -> tuple[Any, ...]:
        k, v = _draw(rows, qkv)[:, heads * dim :].unflatten(-1, (-1, dim)).chunk(2, 1)
        return k, v, _pages(kv_heads, dim, (rows,)), 0

    def looking_up() -> tuple[Any, ...]:
        return _integers(vocab, rows), _draw(vocab, hidden)

    yield Case(
        rms_norm,
        f"{hidden}",
        rows,
        norm,
        workload,
        library=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
    )
    yield Case(add_rms_norm, f"{hidden}", rows, sum_and_norm, workload)
    yield Case(rope, f"{heads}x{dim}", rows, rotation, workload)
    yield Case(qk_rope_kv_write, f"{heads}+2*{kv_heads}x{dim}", rows, heads_to_pages, workload)
    yield Case(silu_mul, f"{inner}", rows, activation, workload, library=lambda gate, up: F.silu(gate) * up)
    yield Case(kv_write, f"{kv_heads}x{dim}", rows, writing, workload)
    yield Case(embedding, f"{vocab}x{hidden}", rows, looking_up, workload, library=F.embedding)


def _sampling(vocab: int, rows: int) -> Case:
    def make() -> tuple[Any, ...]:
        seeds = torch.arange(rows, device="cuda")
        greedy = torch.zeros(rows, dtype=torch.bool, device="cuda")
        return torch.randn(rows, vocab, device="cuda"), seeds, _integers(100, rows), greedy

    workload = Workload((1,) * rows, (1,) * rows)
    return Case(gumbel_sample, f"{vocab}", rows, make, workload, library=gumbel_sample.reference)


def _pages(kv_heads: int, dim: int, lengths: tuple[int, ...]) -> PagedKV:
    """Full pools of one layer, the pages of each sequence scattered; one slot for each token of the first sequence."""
    most = max(-(-length // PAGE_SIZE) for length in lengths)
    tables = torch.randperm(len(lengths) * most, device="cuda").int().view(len(lengths), most)
    keys, values = (_draw(tables.numel(), PAGE_SIZE, kv_heads, dim) for _ in range(2))
    slots = (tables[0, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten()[: lengths[0]].int()
    return PagedKV((keys,), (values,), tables, torch.tensor(lengths, dtype=torch.int32, device="cuda"), slots)


def _decode(config: ModelConfig, batch: int, context: int) -> Case:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def make() -> tuple[Any, ...]:
        q, k, v = _draw(batch, heads, dim), _draw(batch, kv_heads, dim), _draw(batch, kv_heads, dim)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        return q, k, v, offsets, 1, _pages(kv_heads, dim, (context,) * batch), 0, dim**-0.5, None

    workload = Workload((1,) * batch, (context,) * batch)
    return Case(attention, f"decode {heads}/{kv_heads}x{dim} over {context}", batch, make, workload, "bfloat16")


def _prefill(config: ModelConfig, length: int, fresh: bool) -> Case:
    """One prompt. fresh: it is known that none of it was cached."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def make() -> tuple[Any, ...]:
        q, k, v = _draw(length, heads, dim), _draw(length, kv_heads, dim), _draw(length, kv_heads, dim)
        offsets = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        pages = _pages(kv_heads, dim, (length,))
        if fresh:
            pages = replace(pages, parts=BatchParts(0, (), (length,)))
        return q, k, v, offsets, length, pages, 0, dim**-0.5, None

    shape = f"{'fresh' if fresh else 'paged'} prefill {heads}/{kv_heads}x{dim}"
    return Case(attention, shape, length, make, Workload((length,), (length,)), "bfloat16", _cudnn)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """cuDNN's attention of one sequence over its own keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
