"""Decoding in one launch: results against float64, pages bit for bit, counters, and launches that overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as every
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.attention.attention import attention
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.decode_cuda import Unfinished, decode
from strata.kernels.attention.decode_tile import DecodeTile
from strata.kernels.attention.spec import AttentionSpec, HeadsSpec, Sequences
from strata.kernels.split_counters import split_counters
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from tests.kernels.attention.cases import copied, decode_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 1e-5}
EPS = 1e-6


class Step:
    """A decode step of sequences with `lengths` tokens, the new one included; 0 is a padding row."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        window: int | None = None,
        page_size: int = 16,
        normed: bool = False,
        width: int = 1,
    ) -> None:
        self.shape, self.scale, self.window = (heads, kv_heads), head_dim**-0.5, window
        options = {"page_size": page_size, "width": width, "layers": 1, "device": "cuda", "beside": 64}
        given, self.pages = decode_step(lengths, heads, kv_heads, head_dim, normed, dtype, **options)
        self.product, *weights, _, _, batch, _ = given
        self.weights = [None if weight is None else weight.abs() + 0.5 for weight in weights]
        angle = torch.rand(len(lengths), 1, head_dim // 2, device="cuda") * 6.3
        self.cos = torch.cat((angle.cos(), angle.cos()), -1)
        self.sin = torch.cat((-angle.sin(), angle.sin()), -1)
        self.offsets = batch.offsets

    def finishing(self, pages: PagedKV) -> tuple[Any, ...]:
        """The arguments of `qk_rope_kv_write`."""
        return (self.product, *self.weights, self.cos, self.sin, pages, HeadsSpec(0, *self.shape, EPS))

    def spec(self, layer: int = 0) -> AttentionSpec:
        return AttentionSpec(layer, self.scale, self.window)

    def attending(self, pages: PagedKV) -> tuple[Any, ...]:
        """The arguments of `decode_attention`."""
        *given, _, heads = self.finishing(pages)
        return (*given, Sequences(self.offsets, 1, pages), heads, self.spec())

    def run(self) -> Tensor:
        """By the operation; nothing is under way that it might take for finished."""
        bound, given = decode_attention.bind("cuda"), self.attending(self.pages)
        assert bound.choose(*given).name == "triton"
        torch.cuda.synchronize()
        result: Tensor = bound(*given)
        return result

    def run_tile(self, tile: DecodeTile) -> Tensor:
        unfinished = Unfinished(*self.weights, EPS, self.cos, self.sin)
        torch.cuda.synchronize()
        heads, head_dim = self.shape[0], self.cos.shape[-1]
        return decode(self.product, heads, head_dim, self.pages, self.spec(), unfinished, tile)

    def exact(self, queries: Tensor, pages: PagedKV) -> Tensor:
        """In float64, over plain pages; of padding rows anything."""
        nothing = queries.new_zeros(1, self.shape[1], queries.shape[2]).double()
        double = replace(pages, keys=(pages.keys[0].double(),), values=(pages.values[0].double(),))
        step = Sequences(self.offsets, 1, double)
        found: Tensor = attention.reference(queries.double(), nothing, nothing, step, self.spec())
        return found

    def wanted(self) -> tuple[Tensor, PagedKV]:
        """In float64 from the queries and the pages that `qk_rope_kv_write` leaves."""
        pages = copied(self.pages)
        queries = qk_rope_kv_write.bind("cuda", deterministic=True)(*self.finishing(pages))[0]
        return self.exact(queries, pages), pages

    def check(self, *tiles: DecodeTile) -> None:
        wanted, pages = self.wanted()
        for run in (self.run, self.run) if not tiles else [lambda tile=tile: self.run_tile(tile) for tile in tiles]:
            out = run()
            assert out.isfinite().all()
            live = pages.lengths > 0
            tolerance = TOLERANCE[out.dtype]
            torch.testing.assert_close(out[live].double(), wanted[live], rtol=tolerance, atol=tolerance)
            assert not split_counters(out.device).any()
            assert torch.equal(out, run())
            for found, expected in ((self.pages.keys, pages.keys), (self.pages.values, pages.values)):
                assert torch.equal(found[0].view(torch.int16), expected[0].view(torch.int16))


# heads, kv_heads, head_dim, dtype, window, page_size, normed. Each compiles one kernel for a kind of batch.
CONFIGURATIONS = [
    (16, 8, 128, torch.bfloat16, None, 16, True),
    (32, 8, 128, torch.bfloat16, None, 64, False),
    (4, 4, 64, torch.bfloat16, None, 1, True),
    (7, 1, 80, torch.float16, 100, 8, True),
    (12, 2, 96, torch.bfloat16, 65, 16, False),
    (8, 1, 256, torch.bfloat16, None, 16, True),
    (32, 1, 128, torch.float16, 1, 32, True),
]
PAIR = [4096, 65]  # whose splits a kernel behind joins
FEW = [1, 63, 64, 65, 128, 129, 4096, 0]
SOME = [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1300, 0, 0, 0, 0]
MANY = [1, 2, 255, 256, 257, 511, 512, 513, 514, 1023, 1024, 1025, 16, 17, 64, 65, *[33] * 20, 0, 0, 0, 0]


@pytest.mark.parametrize("lengths", [PAIR, FEW, SOME, MANY], ids=["pair", "few", "some", "many"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "window", "page_size", "normed"), CONFIGURATIONS, ids=str
)
def test_at_page_and_split_boundaries(lengths, heads, kv_heads, head_dim, dtype, window, page_size, normed):
    options = {"window": window, "page_size": page_size, "normed": normed, "width": 8192 // page_size}
    Step(lengths, heads, kv_heads, head_dim, dtype, **options).check()


@pytest.mark.parametrize("batch", [1, 3, 64, 512])
def test_any_number_of_sequences(batch):
    lengths = torch.randint(1, 400, (batch,)).tolist()
    Step(lengths, 16, 8, 128, normed=True).check()
    Step([*lengths, *[0] * (batch // 3)], 16, 8, 128, normed=True, width=100).check()


def test_only_padding_rows():
    Step([0, 0], 16, 8, 128, normed=True).check()


def test_splits_of_long_sequences_are_larger():
    Step([20000, 3, 16385], 16, 8, 128, normed=True, width=2560).check()


@pytest.mark.parametrize("window", [None, 200])
def test_any_tile(window):
    step = Step([1, 33, 64, 65, 129, 640, 0, 1025], 16, 8, 128, window=window, normed=True)
    shapes = [(32, 2, 2, 32, 64), (64, 4, 3, 128, 2), (128, 8, 3, 256, 1)]
    step.check(*(DecodeTile(*shape, *kind) for shape, *kind in every(shapes, [True, False], [True, False])))


def test_what_does_not_fit_is_composed():
    step = Step([5, 300, 64], 4, 2, 64, torch.float32, normed=True)
    wanted, pages = step.wanted()
    bound, given = decode_attention.bind("cuda"), step.attending(step.pages)
    assert bound.choose(*given).name == "composed"
    torch.testing.assert_close(bound(*given).double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(step.pages.keys[0].nan_to_num(), pages.keys[0].nan_to_num())


@pytest.mark.parametrize("batch", [1, 7, 200])
def test_launches_that_overlap_in_a_cuda_graph(batch):
    """Two layers side by side, twice: the second of them starts while the first runs, and takes the same counters.

    Each replay continues the sequences of the one before.
    """
    heads, kv_heads, head_dim, layers, steps = 16, 8, 128, 4, 20
    most = 300
    step = Step([most] * batch, heads, kv_heads, head_dim, normed=True)
    weight = torch.randn(heads * head_dim, step.product.shape[1], device="cuda").bfloat16() / (heads * head_dim) ** 0.5
    starts = torch.randint(1, most - steps, (batch,), device="cuda").int()

    def fresh() -> PagedKV:
        keys, values = (tuple(pool[0].clone() for _ in range(layers)) for pool in (step.pages.keys, step.pages.values))
        return PagedKV(keys, values, step.pages.tables, torch.empty_like(starts), torch.empty_like(starts))

    def advance(pages: PagedKV, by: int) -> None:
        pages.lengths.copy_(starts + by)
        position = (pages.lengths - 1).long()
        page = pages.tables.gather(1, (position // pages.page_size)[:, None])[:, 0]
        pages.slot_mapping.copy_(page * pages.page_size + position % pages.page_size)

    def forward(pages: PagedKV, wait: bool) -> Tensor:
        products = [step.product * 1, step.product * 0.5]
        for layer in range(layers):
            if wait:
                torch.cuda.synchronize()
            batch, heads_spec = Sequences(step.offsets, 1, pages), HeadsSpec(layer, *step.shape, EPS)
            given = (products[layer % 2], *step.weights, step.cos, step.sin, batch, heads_spec, step.spec(layer))
            products[layer % 2] = decode_attention.bind("cuda")(*given)
            if layer % 2:
                products = [out.flatten(1) @ weight for out in products]
        return torch.cat(products)

    one_by_one, expected = fresh(), []
    for by in range(steps):
        advance(one_by_one, by)
        expected.append(forward(one_by_one, wait=True))
    captured = fresh()
    advance(captured, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward(captured, wait=False)
    for by, wanted in enumerate(expected):
        advance(captured, by)
        graph.replay()
        assert result.isfinite().all()
        assert torch.equal(result, wanted), by
    for found, wanted in zip((*captured.keys, *captured.values), (*one_by_one.keys, *one_by_one.values), strict=True):
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    assert not split_counters(result.device).any()
