"""The fused CUDA kernels have the bits of the kernels they replace, and a fused graph those of the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from strata.graph.bind import bind
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.trace import trace
from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.norm.norm import add_rms_norm, rms_norm
from strata.kernels.op import Operation
from strata.kernels.rotary.rope import rope, rope_angles
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from tests.gpu.tensors import draw

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAGE = 16


def run(operation: Operation, *arguments: Any) -> Any:
    return operation.bind("cuda", deterministic=True)(*arguments)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 64, 80, 255, 1024, 4096, 5000, 16384])
def test_add_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = draw(width, dtype=dtype)
    for rows in (0, 1, 2, 7, 64, 300):
        x, residual = draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype)
        total, normed = run(add_rms_norm, x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, run(rms_norm, x + residual, weight, 1e-5))
    x, residual = draw(37, 2 * width + 5, dtype=dtype)[:, 3 : 3 + width], draw(37, width + 1, dtype=dtype)[:, 1:]
    total, normed = run(add_rms_norm, x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    exact = rms_norm.reference(total.double(), weight.double(), 1e-5)
    rtol = max(1.1 * torch.finfo(dtype).eps, 4e-6)
    torch.testing.assert_close(normed.double(), exact, rtol=rtol, atol=2e-6 * exact.abs().max().item())


def test_rows_of_add_rms_norm_stand_alone() -> None:
    x, residual = draw(1024, 4096, dtype=torch.bfloat16), draw(1024, 4096, dtype=torch.bfloat16)
    weight = draw(4096, dtype=torch.bfloat16)
    together = run(add_rms_norm, x, residual, weight, 1e-5)
    for count in (1, 2, 7, 16, 65, 300):
        rows = torch.randint(0, 1024, (count,), device="cuda")
        for alone, all_rows in zip(run(add_rms_norm, x[rows], residual[rows], weight, 1e-5), together, strict=True):
            assert torch.equal(alone, all_rows[rows])


def pools(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[PagedKV, PagedKV]:
    """The same slots, some of them padding, in two sets of pools full of NaN."""
    pages = tokens // PAGE + 2
    slots = torch.randperm(pages * PAGE, device="cuda")[:tokens].int()
    slots[tokens // 2 :: 9] = -1
    nothing = torch.full((pages, PAGE, kv_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
    first, second = (
        PagedKV(*(tuple(nothing.clone() for _ in range(2)) for _ in range(2)), slots[None], slots, slots)
        for _ in range(2)
    )
    return first, second


def chain(
    product: torch.Tensor, heads: int, kv_heads: int, weights: list[Any], angles: Any, pages: PagedKV | None
) -> tuple[torch.Tensor, ...]:
    """What the plain graph launches."""
    q, k, v = product.unflatten(-1, (-1, angles[0].shape[-1])).split((heads, kv_heads, kv_heads), 1)
    if weights[0] is not None:
        q, k = run(rms_norm, q, weights[0], 1e-6), run(rms_norm, k, weights[1], 1e-6)
    return run(rope, q, *angles), *run(kv_write, run(rope, k, *angles), v, pages, 1)


def compare(product: torch.Tensor, shape: tuple[int, int, int], normed: bool, paged: bool) -> None:
    heads, kv_heads, head_dim = shape
    tokens, dtype = product.shape[0], product.dtype
    weights = [draw(head_dim, dtype=dtype) for _ in range(2)] if normed else [None, None]
    positions = torch.randint(0, 5000, (tokens,), device="cuda", dtype=torch.int32)
    angles = run(rope_angles, positions, torch.randn(5000, head_dim, device="cuda"))
    mine, parts = pools(tokens, kv_heads, head_dim, dtype) if paged else (None, None)
    found = run(qk_rope_kv_write, product, *weights, *angles, mine, HeadsSpec(1, heads, kv_heads, 1e-6))
    # The squares of a head that is no multiple of 16 wide are summed in another order than alone, which float32 shows.
    tolerance = 1e-6 if normed and head_dim % 16 and dtype == torch.float32 else 0.0
    for one, other in zip(found, chain(product, heads, kv_heads, weights, angles, parts), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    if mine is not None and parts is not None:
        for one, other in zip((*mine.keys, *mine.values), (*parts.keys, *parts.values), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(32, 8, 128), (16, 8, 128), (14, 2, 64), (5, 5, 80), (28, 4, 96), (8, 1, 32), (7, 1, 12), (3, 3, 20), (4, 2, 256)],
)
def test_qk_rope_kv_write(shape: tuple[int, int, int], normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    width = (heads + 2 * kv_heads) * head_dim
    for tokens in (0, 1, 2, 33, 300):
        compare(draw(tokens, width, dtype=dtype), shape, normed, paged=True)
    compare(draw(17, width, dtype=dtype), shape, normed, paged=False)
    compare(draw(17, width + 64, dtype=dtype)[:, :width], shape, normed, paged=True)
    if not normed:
        compare(draw(17, width + 5, dtype=dtype)[:, 3 : 3 + width], shape, normed, paged=True)


FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
}


def model_of(family: str, layers: int = 2) -> tuple[nn.Module, ModelConfig]:
    config = config_from_dict(
        {
            "vocab_size": 515,
            "hidden_size": 384,
            "intermediate_size": 1040,
            "num_hidden_layers": layers,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
        | FAMILIES[family]
    )
    with torch.device("cuda"):
        model = build(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.1).add_(1.0 if "norm" in name else 0.0)
    return model, config


class Cache:
    """Pages of two sequences, full of NaN until they are written."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        shape = (16, PAGE, config.num_kv_heads, config.head_dim)
        kinds = ([torch.full(shape, torch.nan, dtype=dtype, device="cuda") for _ in config.windows] for _ in range(2))
        self.keys, self.values = (tuple(kind) for kind in kinds)

    def batch(self, ids: torch.Tensor, starts: list[int], counts: list[int]) -> Batch:
        table = torch.arange(15, -1, -1, device="cuda", dtype=torch.int32).view(2, 8)
        spans = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        positions = torch.tensor([p for span in spans for p in span], device="cuda")
        rows = torch.tensor([row for row, span in enumerate(spans) for _ in span], device="cuda")
        slots = table[rows, positions // PAGE] * PAGE + positions % PAGE
        ends = torch.tensor([span.stop for span in spans], device="cuda", dtype=torch.int32)
        offsets = torch.tensor([0, counts[0], sum(counts)], device="cuda", dtype=torch.int32)
        pages = PagedKV(self.keys, self.values, table, ends, slots.int())
        return Batch(ids[rows, positions], positions.int(), offsets, max(counts), pages)


STEPS = [([0, 0], [40, 1]), ([40, 1], [1, 70]), ([41, 71], [1, 1]), ([42, 72], [1, 1])]


def hidden_states(graph: fx.GraphModule, config: ModelConfig, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cache = Cache(config, dtype)
    with torch.inference_mode():
        return torch.cat([graph(cache.batch(ids, *step)) for step in STEPS])


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_graph_in_bf16(family: str) -> None:
    model, config = model_of(family)
    ids = torch.randint(0, config.vocab_size, (2, 128), device="cuda", dtype=torch.int32)
    model.bfloat16()
    bits = [
        hidden_states(bind(graph, "cuda", deterministic=True), config, ids, torch.bfloat16)
        for graph in (merge(trace(model)), fuse(merge(trace(model))))
    ]
    assert bits[0].isfinite().all()
    assert torch.equal(*bits)
    plain, fused = (
        hidden_states(bind(graph, "cuda"), config, ids, torch.bfloat16).float()
        for graph in (merge(trace(model)), fuse(merge(trace(model))))
    )
    truth = hidden_states(bind(trace(model.float()), "cuda"), config, ids, torch.float32)
    assert (fused - truth).norm() <= 1.1 * (plain - truth).norm()


def kernels(layers: int) -> list[str]:
    """The kernels of one decode step, by name."""
    model, config = model_of("llama", layers)
    graph = bind(fuse(merge(trace(model.bfloat16()))), "cuda", deterministic=True)
    ids = torch.zeros(2, 128, device="cuda", dtype=torch.int32)
    batch = Cache(config, torch.bfloat16).batch(ids, [0, 0], [1, 1])
    with torch.inference_mode():
        graph(batch)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph(batch)
            torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def test_nine_kernels_a_layer() -> None:
    two, three = kernels(2), kernels(3)
    assert len(three) - len(two) == 9, three
