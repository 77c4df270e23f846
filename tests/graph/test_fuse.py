"""Fused graphs have fewer nodes and the same results, for every family; what does not fit stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from strata.cost.nodes import node_costs, total
from strata.graph.bind import bind
from strata.graph.capture import capture
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.walk import meta_indices, meta_pages, operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear.embedding import embedding
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm
from strata.kernels.rotary.rope import rope, rope_angles
from strata.kernels.state.kv_write import kv_write
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from tests.models.batches import HandPaged, packed, random_sequences
from tests.models.checkpoints import ALIKE_CONFIGS, FAMILY_CONFIGS

from .tiny import VOCABULARY, Tiny
from .tiny import packed as tiny_batch

families = pytest.mark.parametrize(
    "config", [config for _, config in FAMILY_CONFIGS], ids=[n for n, _ in FAMILY_CONFIGS]
)


def model_of(config: dict[str, Any]) -> tuple[nn.Module, ModelConfig]:
    read = config_from_dict(config)
    model = build(read).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.2).add_(1.0 if "norm" in name else 0.0)
    return model, read


@pytest.mark.parametrize("config", [config for _, config in ALIKE_CONFIGS], ids=[n for n, _ in ALIKE_CONFIGS])
def test_node_counts_of_every_family(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = build(config_from_dict(config))
    layers, qwen3 = config["num_hidden_layers"], config["model_type"] == "qwen3"
    graph = merge(capture(model))
    before = operation_counts(graph)
    assert sum(before.values()) == (15 if qwen3 else 13) * layers + 3
    fused = operation_counts(fuse(graph))
    assert fused == {
        "embedding": 1, "rope_angles": 1, "rms_norm": 1, "linear": 4 * layers, "qk_rope_kv_write": layers,
        "attention": layers, "silu_mul": layers, "add_rms_norm": 2 * layers,
    }  # fmt: skip
    nodes = [node.name for node in graph.graph.nodes]
    graph.graph.lint()
    assert [node.name for node in fuse(graph).graph.nodes] == nodes


def bound(model: nn.Module, deterministic: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
    plain, fused = merge(capture(model)), fuse(merge(capture(model)))
    return bind(plain, "cpu", deterministic), bind(fused, "cpu", deterministic)


def assert_same(fused: Tensor, plain: Tensor, exact: bool) -> None:
    assert plain.isfinite().all()
    torch.testing.assert_close(fused, plain, rtol=0, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@families
def test_fused_graph_computes_the_same(config: dict[str, Any], deterministic: bool) -> None:
    model, read = model_of(config)
    plain, fused = bound(model, deterministic)
    lengths = (1, 2, 9, 17, 30)
    for count in (1, 2, 5):
        batch = packed(random_sequences(read.vocab_size, lengths[:count], seed=count))
        assert_same(fused(batch), plain(batch), deterministic)
    caches = [HandPaged(read, 2, 24) for _ in range(2)]
    first, second = random_sequences(read.vocab_size, (20, 12))
    for chunks in ({0: first[:7], 1: second[:1]}, {0: first[7:19]}, {1: second[1:12], 0: first[19:]}):
        of_plain, of_fused = (cache.next_batch(chunks) for cache in caches)
        assert_same(fused(of_fused), plain(of_plain), deterministic)
    for one, other in zip(*((*cache.keys, *cache.values) for cache in caches), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if deterministic else 1e-6, equal_nan=True)


def test_bf16_has_the_same_bits() -> None:
    torch.manual_seed(0)
    model, read = model_of(dict(FAMILY_CONFIGS)["qwen3-tied"])
    plain, fused = bound(model.bfloat16(), True)
    batch = packed(random_sequences(read.vocab_size, (5, 11)))
    assert torch.equal(fused(batch), plain(batch))


def test_nodes_are_named_after_what_they_were() -> None:
    def named(config: str) -> list[tuple[str, int | None]]:
        with torch.device("meta"):
            graph = fuse(merge(capture(build(config_from_dict(dict(FAMILY_CONFIGS)[config])))))
        nodes = [node.meta for node in graph.graph.nodes if node.op == "call_function"]
        return [(meta["module"], meta["layer"]) for meta in nodes if "+" in meta["module"]]

    assert named("llama-yarn") == [
        ("model.layers.0.self_attn.rope+kv_write", 0),
        ("model.layers.0.post_attention_layernorm+add", 0),
        ("model.layers.1.input_layernorm+add", 1),
        ("model.layers.1.self_attn.rope+kv_write", 1),
        ("model.layers.1.post_attention_layernorm+add", 1),
        ("model.norm+add", None),
    ]
    assert ("model.layers.1.self_attn.q_norm+k_norm+rope+kv_write", 1) in named("qwen3-linear")


@pytest.mark.parametrize("family", ["llama-yarn", "qwen3-linear"])
def test_fusion_saves_bytes_and_no_work(family: str) -> None:
    config = config_from_dict(dict(FAMILY_CONFIGS)[family])
    with torch.device("meta"):
        graph = merge(capture(build(config)))
    workload, sizes = Workload((3,), (3,)), {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    pages = meta_pages(workload, layers=config.num_layers, dtype=torch.float32, **sizes)
    batch = Batch(meta_indices(3), meta_indices(3), meta_indices(2), 3, pages)
    before = total(node_costs(graph, batch, workload))
    after = total(node_costs(fuse(graph), batch, workload))
    assert (after.flops, after.weights) == (before.flops, before.weights)
    sums, rotated = config.hidden_size, (config.num_heads + config.num_kv_heads) * config.head_dim
    # Each sum is read again by its norm; rotated keys by the write; normalized heads are written and read.
    saved = 2 * sums + config.num_kv_heads * config.head_dim + (2 * rotated if family == "qwen3-linear" else 0)
    # The angles are read once for queries and keys, not twice: half of cosines and sines is counted.
    assert before.bytes - after.bytes == 3 * 4 * config.num_layers * (saved + config.head_dim)


def test_a_model_without_rotation_keeps_its_writes() -> None:
    model = Tiny()
    graph = fuse(merge(capture(model)))
    counts = operation_counts(graph)
    assert (counts["kv_write"], counts["add_rms_norm"], counts["rms_norm"], counts["add"]) == (2, 4, 1, 0)
    batch = tiny_batch(4, 3)
    torch.testing.assert_close(graph(batch), Tiny.forward(model, batch))


HEAD_DIM, WIDTH = 6, 24


class Projections(nn.Module):
    """Projections of one input into 4, 2 and 2 heads, and what `attend` makes of them."""

    def __init__(self, attend: Callable[..., Tensor], kv_heads: tuple[int, int] = (2, 2)) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.projections = nn.ModuleList(nn.Module() for _ in range(3))
        for projection, heads in zip(self.projections, (4, *kv_heads), strict=True):
            projection.weight = nn.Parameter(torch.randn(heads * HEAD_DIM, WIDTH))
        self.norm = nn.Parameter(torch.rand(HEAD_DIM) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("tables", torch.randn(2, 20, HEAD_DIM))
        self.register_buffer("table", self.tables[0])
        self.register_buffer("other", self.tables[1])
        self.attend = attend
        self.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        x = embedding(batch.tokens, self.embed)
        q, k, v = (linear(x, one.weight, None).unflatten(-1, (-1, HEAD_DIM)) for one in self.projections)
        angles, others = (rope_angles(batch.positions, table) for table in (self.table, self.other))
        return self.attend(self, batch, q, k, v, (angles[0], angles[1]), (others[0], others[1]))


def written(batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = kv_write(k, v, batch.pages, 0)
    return q.narrow(1, 0, 2) + k + v


def plain(self, batch, q, k, v, angles, others):
    return written(batch, rope(q, *angles), rope(k, *angles), v)


def queries_rotated_last(self, batch, q, k, v, angles, others):
    k, v = kv_write(rope(k, *angles), v, batch.pages, 0)
    return rope(q, *angles).narrow(1, 0, 2) + k + v


def normed(self, batch, q, k, v, angles, others):
    q, k = rope(rms_norm(q, self.norm, 1e-5), *angles), rope(rms_norm(k, self.norm, 1e-5), *angles)
    return written(batch, q, k, v)


def only_keys_normed(self, batch, q, k, v, angles, others):
    q, k = rope(q, *angles), rope(rms_norm(k, self.norm, 1e-5), *angles)
    return written(batch, q, k, v)


def different_eps(self, batch, q, k, v, angles, others):
    q, k = rope(rms_norm(q, self.norm, 1e-5), *angles), rope(rms_norm(k, self.norm, 1e-4), *angles)
    return written(batch, q, k, v)


def different_angles(self, batch, q, k, v, angles, others):
    q, k = rope(q, *angles), rope(k, *others)
    return written(batch, q, k, v)


def values_first(self, batch, q, k, v, angles, others):
    q, v = rope(q, *angles), rope(v, *angles)
    return written(batch, q, v, k)


def keys_read_twice(self, batch, q, k, v, angles, others):
    q, k = rope(q, *angles), rope(k, *angles)
    return written(batch, q, k, v) + k


def queries_read_before(self, batch, q, k, v, angles, others):
    q, k = rope(q, *angles), rope(k, *angles)
    early = silu_mul(q, q).narrow(1, 0, 2)
    return written(batch, q, k, v) + early


@pytest.mark.parametrize("attend", [plain, queries_rotated_last, normed])
def test_writes_of_rotated_keys_are_fused(attend: Callable[..., Tensor]) -> None:
    check(Projections(attend), fused=1)


@pytest.mark.parametrize(
    "attend", [only_keys_normed, different_eps, different_angles, values_first, keys_read_twice, queries_read_before]
)
def test_other_writes_stay(attend: Callable[..., Tensor]) -> None:
    check(Projections(attend), fused=0)


def test_unequal_keys_and_values_stay() -> None:
    def more_values(self, batch, q, k, v, angles, others):
        k, v = kv_write(rope(k, *angles), v, batch.pages, 0)
        return rope(q, *angles) + k.narrow(1, 0, 1) + v

    check(Projections(more_values, (2, 4)), fused=0)


def check(model: Projections, *, fused: int) -> None:
    batch = tiny_batch(3, 2)
    expected = model(batch)
    graph = fuse(merge(capture(model)))
    counts = operation_counts(graph)
    assert (counts["qk_rope_kv_write"], counts["kv_write"]) == (fused, 1 - fused)
    torch.testing.assert_close(graph(batch), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bind(graph, "cpu")(batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("compute", "fused"),
    [
        (lambda self, x, y: rms_norm(x + y, self.scale, 1e-5) + (x + y), 1),
        (lambda self, x, y: rms_norm(x + self.bias, self.scale, 1e-5), 0),
        (lambda self, x, y: rms_norm(x + 0.5, self.scale, 1e-5), 0),
        (lambda self, x, y: rms_norm(x + y, y.narrow(0, 0, 1).flatten(), 1e-5), 0),
        (lambda self, x, y: rms_norm(x, self.scale, 1e-5) + y, 0),
    ],
    ids=["residual", "bias", "scalar", "computed weight", "norm first"],
)
def test_only_norms_of_residual_sums_are_fused(compute: Callable[..., Tensor], fused: int) -> None:
    class Sums(Projections):
        def forward(self, batch: Batch) -> Tensor:
            return compute(self, embedding(batch.tokens, self.embed), embedding(batch.positions, self.embed))

    model, batch = Sums(plain), tiny_batch(3, 2)
    graph = fuse(capture(model))
    assert operation_counts(graph)["add_rms_norm"] == fused
    torch.testing.assert_close(graph(batch), model(batch))


def test_a_sum_with_several_readers_is_kept() -> None:
    class Sums(Projections):
        def forward(self, batch: Batch) -> Tensor:
            x = embedding(batch.tokens, self.embed)
            total = x + embedding(batch.positions, self.embed)
            early = silu_mul(total, x)
            return rms_norm(total, self.scale, 1e-5) + rms_norm(total, self.bias, 1e-5) + early + total

    model, batch = Sums(plain), tiny_batch(3, 2)
    graph = fuse(capture(model))
    assert operation_counts(graph)["add_rms_norm"] == 1
    assert operation_counts(graph)["rms_norm"] == 1
    torch.testing.assert_close(graph(batch), model(batch))
