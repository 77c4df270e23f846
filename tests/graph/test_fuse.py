"""What the passes fuse: norms of sums, writes of rotated keys, attention of decodes, products with norms and gates."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from strata.graph.bind import bind
from strata.graph.fuse import fuse, fuse_decode_attention, fuse_gated_products
from strata.graph.fuse_products import fuse_products
from strata.graph.merge import merge
from strata.graph.trace import trace
from strata.graph.walk import operation_counts
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.attention.attention import attention
from strata.kernels.linear.embedding import embedding
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import add_rms_norm, rms_norm
from strata.kernels.rotary.rope import rope, rope_angles
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.models.batch import Batch

from .families import fused, meta_model_of
from .tiny import VOCABULARY, Tiny
from .tiny import packed as tiny_batch


def test_a_model_without_rotation_keeps_its_writes() -> None:
    model = Tiny()
    graph = fuse(merge(trace(model)))
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


def normed(self: Projections, x: Tensor, eps: float = 1e-5) -> Tensor:
    return rms_norm(x, self.norm, eps)


def queries_rotated_last(self, batch, q, k, v, angles, others):
    k, v = kv_write(rope(k, *angles), v, batch.pages, 0)
    return rope(q, *angles).narrow(1, 0, 2) + k + v


def queries_read_before(self, batch, q, k, v, angles, others):
    q, k = rope(q, *angles), rope(k, *angles)
    early = silu_mul(q, q).narrow(1, 0, 2)
    return written(batch, q, k, v) + early


def keys_read_twice(self, batch, q, k, v, angles, others):
    k = rope(k, *angles)
    return written(batch, rope(q, *angles), k, v) + k


def plain(self, batch, q, k, v, angles, others):
    return written(batch, rope(q, *angles), rope(k, *angles), v)


@pytest.mark.parametrize(
    ("attend", "fused"),
    [
        (plain, 1),
        (queries_rotated_last, 1),
        (lambda self, batch, q, k, v, *of: plain(self, batch, normed(self, q), normed(self, k), v, *of), 1),
        (lambda self, batch, q, k, v, *of: plain(self, batch, q, normed(self, k), v, *of), 0),
        (lambda self, batch, q, k, v, *of: plain(self, batch, normed(self, q), normed(self, k, 1e-4), v, *of), 0),
        (lambda self, batch, q, k, v, mine, other: written(batch, rope(q, *mine), rope(k, *other), v), 0),
        (lambda self, batch, q, k, v, mine, other: written(batch, rope(q, *mine), rope(v, *mine), k), 0),
        (keys_read_twice, 0),
        (queries_read_before, 0),
    ],
    ids=[
        "plain",
        "queries last",
        "normed",
        "keys normed",
        "two eps",
        "two angles",
        "values first",
        "read twice",
        "early",
    ],
)
def test_only_writes_of_rotated_keys_are_fused(attend: Callable[..., Tensor], fused: int) -> None:
    check(Projections(attend), fused=fused)


def test_unequal_keys_and_values_stay() -> None:
    def more_values(self, batch, q, k, v, angles, others):
        k, v = kv_write(rope(k, *angles), v, batch.pages, 0)
        return rope(q, *angles) + k.narrow(1, 0, 1) + v

    check(Projections(more_values, (2, 4)), fused=0)


def check(model: Projections, *, fused: int) -> None:
    batch = tiny_batch(3, 2)
    expected = model(batch)
    graph = fuse(merge(trace(model)))
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
    graph = fuse(trace(model))
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
    graph = fuse(trace(model))
    assert operation_counts(graph)["add_rms_norm"] == 1
    assert operation_counts(graph)["rms_norm"] == 1
    torch.testing.assert_close(graph(batch), model(batch))


def another_reader(index: int) -> Callable[[fx.Graph, fx.Node, fx.Node], None]:
    def insert(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
        result = next(user for user in written.users if user.args[1] == index)
        graph.call_function(operator.add, (result, result))

    return insert


def another_result(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    graph.call_function(operator.getitem, (written, 1))


def pages_read_between(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    graph.call_function(getattr, (written.args[5], "keys"))


def state_read_between(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    graph.call_function(attention, (written.args[0], *attended.args[1:]))


def other_layer(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    *given, spec = attended.args
    attended.args = (*given, spec._replace(layer=spec.layer + 1))


def other_keys(graph: fx.Graph, written: fx.Node, attended: fx.Node) -> None:
    q, k, v, *rest = attended.args
    attended.args = (q, v, k, *rest)


@pytest.mark.parametrize(
    "change",
    [
        *(another_reader(index) for index in range(3)),
        another_result,
        pages_read_between,
        state_read_between,
        other_layer,
        other_keys,
    ],
)
def test_what_others_read_stays(change: Callable[[fx.Graph, fx.Node, fx.Node], None]) -> None:
    model, config = meta_model_of("llama-yarn")
    graph = fused(model)
    written = graph.graph.find_nodes(op="call_function", target=qk_rope_kv_write)[0]
    attended = graph.graph.find_nodes(op="call_function", target=attention)[0]
    with graph.graph.inserting_before(attended):
        change(graph.graph, written, attended)
    for node in graph.graph.nodes:
        node.meta.setdefault("module", "")
        node.meta.setdefault("layer", None)
    counts = operation_counts(fuse_decode_attention(graph))
    assert (counts["decode_attention"], counts["qk_rope_kv_write"]) == (config.num_layers - 1, 1)


def test_attention_of_a_model_without_rotation_stays() -> None:
    model = Tiny()
    graph = fuse_decode_attention(fuse(merge(trace(model))))
    counts = operation_counts(graph)
    assert (counts["kv_write"], counts["attention"], counts["decode_attention"]) == (2, 2, 0)
    batch = tiny_batch(4, 3)
    torch.testing.assert_close(graph(batch), Tiny.forward(model, batch))


PRODUCT_WIDTH, INNER = 12, 8


class Products(nn.Module):
    """Products, a norm of their sum, and what `compute` makes of them."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        for name in ("first", "second"):
            setattr(self, name, nn.Parameter(torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH)))
        self.gates = nn.Parameter(torch.randn(2 * INNER, PRODUCT_WIDTH))
        self.bias = nn.Parameter(torch.randn(PRODUCT_WIDTH))
        self.scale = nn.Parameter(torch.rand(PRODUCT_WIDTH) + 0.5)
        self.compute = compute
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def check_products(compute: Callable[..., Tensor], **counts: int) -> None:
    torch.manual_seed(3)
    model, x = Products(compute), torch.randn(5, PRODUCT_WIDTH)
    expected = model(x)
    graph = fuse_products(trace(model))
    found = operation_counts(graph)
    assert {name: found[name] for name in counts} == counts
    torch.testing.assert_close(bind(graph, "cpu")(x), expected, rtol=1e-5, atol=1e-5)


def normed_sum(self: Products, x: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, product, self.scale, 1e-5)


def one_reader(self, x):
    return linear(normed_sum(self, x, linear(x, self.first))[1], self.second, self.bias)


def two_readers_and_the_sum(self, x):
    summed, y = normed_sum(self, x, linear(x, self.first, self.bias))
    return linear(y, self.second, None) + linear(y, self.first, self.bias) + summed


def product_first(self, x):
    summed, y = add_rms_norm(linear(x, self.first, None), x, self.scale, 1e-5)
    return linear(y, self.second, None) + summed


def normed_read_elsewhere(self, x):
    _, y = normed_sum(self, x, linear(x, self.first))
    return linear(y, self.second) + y


def product_read_elsewhere(self, x):
    product = linear(x, self.first)
    return linear(normed_sum(self, x, product)[1], self.second) + product


FUSED, LEFT = {"linear_add": 1, "add_rms_norm": 0}, {"linear_add": 0, "add_rms_norm": 1, "scaled_linear": 0}


@pytest.mark.parametrize(
    ("compute", "counts"),
    [
        (one_reader, FUSED | {"scaled_linear": 1, "linear": 0}),
        (two_readers_and_the_sum, FUSED | {"scaled_linear": 2, "linear": 0}),
        (product_first, FUSED | {"scaled_linear": 1, "linear": 0}),
        (
            lambda self, x: linear(normed_sum(self, linear(x, self.first), linear(x, self.second))[1], self.first),
            FUSED | {"scaled_linear": 1, "linear": 1},
        ),
        (normed_read_elsewhere, LEFT),
        (product_read_elsewhere, LEFT),
        (lambda self, x: linear(normed_sum(self, x, x + x)[1], self.second), LEFT),
        (lambda self, x: normed_sum(self, x, linear(x, self.first))[0], LEFT),
        (lambda self, x: linear(x, normed_sum(self, x, linear(x, self.first))[1]), LEFT),
    ],
    ids=["one", "and the sum", "first", "two products", "norm read", "product read", "no product", "no norm", "weight"],
)
def test_norms_of_sums_with_a_product_are_fused(compute: Callable[..., Tensor], counts: dict[str, int]) -> None:
    check_products(compute, **counts)


def test_float16_keeps_its_norms() -> None:
    graph = fuse_products(trace(Products(one_reader).half()))
    assert operation_counts(graph)["linear_add"] == 0


def halves(self: Products, x: Tensor, sizes: list[int]) -> list[Tensor]:
    _, y = normed_sum(self, x, linear(x, self.first))
    return linear(y, self.gates).split_with_sizes(sizes, -1)


@pytest.mark.parametrize(
    ("gate", "fused"),
    [
        (lambda parts: silu_mul(parts[0], parts[1]), 1),
        (lambda parts: silu_mul(parts[1], parts[0]), 0),
        (lambda parts: silu_mul(gate := parts[0], parts[1]) + gate, 0),
    ],
    ids=["halves", "exchanged", "read elsewhere"],
)
def test_only_whole_halves_are_gated(gate: Callable[[list[Tensor]], Tensor], fused: int) -> None:
    counts = {"scaled_linear_silu_mul": fused, "silu_mul": 1 - fused, "scaled_linear": 1 - fused}
    check_products(lambda self, x: gate(halves(self, x, [INNER, INNER])), **counts)


def test_two_of_three_parts_are_not_gated() -> None:
    def compute(self: Products, x: Tensor) -> Tensor:
        parts = halves(self, x, [4, 4, 8])
        return silu_mul(parts[0], parts[1])

    check_products(compute, scaled_linear_silu_mul=0, silu_mul=1, scaled_linear=1)


def test_there_is_no_deterministic_implementation() -> None:
    graph = fuse_products(trace(Products(one_reader)))
    with pytest.raises(NotImplementedError, match="linear_add"):
        bind(graph, "cpu", deterministic=True)


def test_a_gate_that_others_read_is_not_in_the_product() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Tiny().layers[0]

        def forward(self, x: Tensor) -> Tensor:
            gate = self.layer.gate_proj(x)
            return silu_mul(gate, self.layer.up_proj(x)) + gate

    assert "linear_silu_mul" not in operation_counts(fuse_gated_products(merge(trace(Read()))))
