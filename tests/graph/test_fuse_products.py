"""Products that take up norms and gating: fewer nodes, the same results, for every family; what does not fit stays."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from strata.cost.nodes import node_costs, total
from strata.graph.bind import bind
from strata.graph.capture import capture, capture_head
from strata.graph.compose import compose
from strata.graph.fuse import fuse
from strata.graph.fuse_products import fuse_products
from strata.graph.merge import merge
from strata.graph.walk import meta_indices, meta_pages, operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import add_rms_norm
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from tests.models.batches import HandPaged, packed, random_sequences
from tests.models.checkpoints import ALIKE_CONFIGS, FAMILY_CONFIGS

families = pytest.mark.parametrize(
    "config", [config for _, config in FAMILY_CONFIGS], ids=[n for n, _ in FAMILY_CONFIGS]
)


def model_of(config: dict[str, Any]) -> tuple[nn.Module, ModelConfig]:
    read = config_from_dict(config)
    model = build(read).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.2).add_(1.0 if "norm" in name else 0.0)
    return model, read


def plain(model: nn.Module) -> fx.GraphModule:
    """From Batch to logits, as far as the other passes go."""
    return fuse(merge(compose(capture(model), capture_head(model))))


@pytest.mark.parametrize("config", [config for _, config in ALIKE_CONFIGS], ids=[n for n, _ in ALIKE_CONFIGS])
def test_node_counts_of_every_family(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = build(config_from_dict(config))
    layers = config["num_hidden_layers"]
    graph = fuse_products(plain(model))
    # Five for each layer, the first norm, whose scale nothing could take up, and what stands at the beginning.
    assert operation_counts(graph) == {
        "embedding": 1, "rope_angles": 1, "rms_norm": 1, "linear": 1, "qk_rope_kv_write": layers, "attention": layers,
        "linear_add": 2 * layers, "scaled_linear_silu_mul": layers, "scaled_linear": layers,
    }  # fmt: skip
    graph.graph.lint()
    nodes = [node.name for node in graph.graph.nodes]
    assert [node.name for node in fuse_products(graph).graph.nodes] == nodes


@pytest.mark.parametrize("config", [config for _, config in ALIKE_CONFIGS], ids=[n for n, _ in ALIKE_CONFIGS])
def test_hidden_states_keep_their_norm(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        graph = fuse_products(fuse(merge(capture(build(config_from_dict(config))))))
    counts, layers = operation_counts(graph), config["num_hidden_layers"]
    assert (counts["add_rms_norm"], counts["linear"], counts["linear_add"]) == (1, 2, 2 * layers - 1)


def assert_same(fused: Tensor, expected: Tensor) -> None:
    assert expected.isfinite().all()
    assert (fused - expected).norm() <= 1e-6 * expected.norm()


@families
def test_fused_graph_computes_the_same(config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, read = model_of(config)
    separate, fused = (bind(graph, "cpu") for graph in (plain(model), fuse_products(plain(model))))
    lengths = (1, 2, 9, 17, 30)
    for count in (1, 2, 5):
        batch = packed(random_sequences(read.vocab_size, lengths[:count], seed=count))
        assert_same(fused(batch), separate(batch))
    caches = [HandPaged(read, 2, 24) for _ in range(2)]
    first, second = random_sequences(read.vocab_size, (20, 12))
    for chunks in ({0: first[:7], 1: second[:1]}, {0: first[7:8], 1: second[1:2]}, {1: second[2:3], 0: first[8:9]}):
        of_separate, of_fused = (cache.next_batch(chunks) for cache in caches)
        assert_same(fused(of_fused), separate(of_separate))


@families
def test_bf16_is_as_exact_as_without(config: dict[str, Any]) -> None:
    torch.manual_seed(2)
    model, read = model_of(config)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    rounded = deepcopy(model).bfloat16()
    exact = bind(plain(model), "cpu")
    graphs = [bind(graph, "cpu") for graph in (plain(rounded), fuse_products(plain(rounded)))]
    errors = torch.zeros(2)
    for seed in range(6):
        batch = packed(random_sequences(read.vocab_size, (30, 40, 50), seed=seed))
        wanted = exact(batch)
        errors += torch.stack([(graph(batch).float() - wanted).square().mean() for graph in graphs])
    separate, fused = errors.sqrt().tolist()
    assert 0 < fused <= 1.1 * separate


def test_nodes_are_named_after_what_they_were() -> None:
    with torch.device("meta"):
        graph = fuse_products(plain(build(config_from_dict(dict(FAMILY_CONFIGS)["llama-yarn"]))))
    nodes = [node.meta for node in graph.graph.nodes if node.op == "call_function" and "getitem" not in node.name]
    found = [(meta["module"], meta["layer"]) for meta in nodes if "proj" in meta["module"] or "head" in meta["module"]]
    assert found == [
        ("model.layers.0.self_attn.q_proj&k_proj&v_proj", 0),
        ("model.layers.0.self_attn.o_proj+post_attention_layernorm+add", 0),
        ("model.layers.0.mlp.gate_proj&up_proj+silu_mul", 0),
        ("model.layers.0.mlp.down_proj+input_layernorm+add", 0),
        ("model.layers.1.self_attn.q_proj&k_proj&v_proj", 1),
        ("model.layers.1.self_attn.o_proj+post_attention_layernorm+add", 1),
        ("model.layers.1.mlp.gate_proj&up_proj+silu_mul", 1),
        ("model.layers.1.mlp.down_proj+norm+add", 1),
        ("lm_head", None),
    ]


@pytest.mark.parametrize("family", ["llama-yarn", "qwen2-tied"])
def test_fusion_saves_bytes_and_reads_all_weights(family: str) -> None:
    config = config_from_dict(dict(FAMILY_CONFIGS)[family])
    with torch.device("meta"):
        model = build(config)
    workload, sizes = Workload((1, 1), (3, 9)), {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    pages = meta_pages(workload, layers=config.num_layers, dtype=torch.float32, **sizes)
    batch = Batch(meta_indices(2), meta_indices(2), meta_indices(3), 1, pages)
    before = total(node_costs(plain(model), batch, workload))
    after = total(node_costs(fuse_products(plain(model)), batch, workload))
    assert after.weights == before.weights
    # Of each sum, its product is not written and read again, but a sum of squares is; nor are gate and up.
    norms, gated = 2 * config.num_layers, 2 * 2 * config.intermediate_size * config.num_layers
    assert before.bytes - after.bytes == 2 * 4 * (norms * (2 * config.hidden_size - 2) + gated)


WIDTH, INNER = 12, 8


class Products(nn.Module):
    """Products, a norm of their sum, and what `compute` makes of them."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        for name in ("first", "second"):
            setattr(self, name, nn.Parameter(torch.randn(WIDTH, WIDTH)))
        self.gates = nn.Parameter(torch.randn(2 * INNER, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.compute = compute
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def check(compute: Callable[..., Tensor], **counts: int) -> None:
    torch.manual_seed(3)
    model, x = Products(compute), torch.randn(5, WIDTH)
    expected = model(x)
    graph = fuse_products(capture(model))
    found = operation_counts(graph)
    assert {name: found[name] for name in counts} == counts
    torch.testing.assert_close(bind(graph, "cpu")(x), expected, rtol=1e-5, atol=1e-5)


def normed(self: Products, x: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, product, self.scale, 1e-5)


def one_reader(self, x):
    return linear(normed(self, x, linear(x, self.first))[1], self.second, self.bias)


def two_readers_and_the_sum(self, x):
    summed, y = normed(self, x, linear(x, self.first, self.bias))
    return linear(y, self.second, None) + linear(y, self.first, self.bias) + summed


def product_first(self, x):
    summed, y = add_rms_norm(linear(x, self.first, None), x, self.scale, 1e-5)
    return linear(y, self.second, None) + summed


def two_products(self, x):
    return linear(normed(self, linear(x, self.first), linear(x, self.second))[1], self.first)


@pytest.mark.parametrize(
    ("compute", "left", "readers"),
    [(one_reader, 0, 1), (two_readers_and_the_sum, 0, 2), (product_first, 0, 1), (two_products, 1, 1)],
)
def test_norms_of_sums_with_a_product_are_fused(compute: Callable[..., Tensor], left: int, readers: int) -> None:
    check(compute, linear_add=1, scaled_linear=readers, linear=left, add_rms_norm=0)


def normed_read_elsewhere(self, x):
    _, y = normed(self, x, linear(x, self.first))
    return linear(y, self.second) + y


def product_read_elsewhere(self, x):
    product = linear(x, self.first)
    return linear(normed(self, x, product)[1], self.second) + product


def no_product(self, x):
    return linear(normed(self, x, x + x)[1], self.second)


def nothing_reads_the_norm(self, x):
    return normed(self, x, linear(x, self.first))[0]


def normed_is_a_weight(self, x):
    _, y = normed(self, x, linear(x, self.first))
    return linear(x, y)


@pytest.mark.parametrize(
    "compute",
    [normed_read_elsewhere, product_read_elsewhere, no_product, nothing_reads_the_norm, normed_is_a_weight],
)
def test_other_norms_stay(compute: Callable[..., Tensor]) -> None:
    check(compute, linear_add=0, scaled_linear=0, add_rms_norm=1)


def test_float16_keeps_its_norms() -> None:
    graph = fuse_products(capture(Products(one_reader).half()))
    assert operation_counts(graph)["linear_add"] == 0


def halves(self: Products, x: Tensor, sizes: list[int]) -> list[Tensor]:
    _, y = normed(self, x, linear(x, self.first))
    return linear(y, self.gates).split_with_sizes(sizes, -1)


def gated(self, x):
    parts = halves(self, x, [INNER, INNER])
    return silu_mul(parts[0], parts[1])


def gate_and_up_exchanged(self, x):
    parts = halves(self, x, [INNER, INNER])
    return silu_mul(parts[1], parts[0])


def gate_read_elsewhere(self, x):
    parts = halves(self, x, [INNER, INNER])
    gate = parts[0]
    return silu_mul(gate, parts[1]) + gate


def two_of_three_parts(self, x):
    parts = halves(self, x, [4, 4, 8])
    return silu_mul(parts[0], parts[1])


@pytest.mark.parametrize(
    ("compute", "fused"), [(gated, 1), (gate_and_up_exchanged, 0), (gate_read_elsewhere, 0), (two_of_three_parts, 0)]
)
def test_only_whole_halves_are_gated(compute: Callable[..., Tensor], fused: int) -> None:
    check(compute, scaled_linear_silu_mul=fused, silu_mul=1 - fused, scaled_linear=1 - fused)


def test_there_is_no_deterministic_implementation() -> None:
    graph = fuse_products(capture(Products(one_reader)))
    with pytest.raises(NotImplementedError, match="linear_add"):
        bind(graph, "cpu", deterministic=True)
