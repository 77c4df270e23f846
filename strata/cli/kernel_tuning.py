"""`strata bench kernels --tune`: which tile multiplies fastest by each weight and number of rows, or the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import TritonError

from strata.hardware.replay import copies_beyond_l2, time_replayed
from strata.kernels.gemm_skinny import IMPLEMENTATION, MOST_ROWS, SkinnyTile, candidates, skinny_linear
from strata.kernels.tuned import Choice, Key
from strata.models.config import ModelConfig

DTYPE = torch.bfloat16
BUCKETS = tuple(1 << power for power in range(MOST_ROWS.bit_length()))
LIBRARY = "cublas"
_FINALISTS = 3
# A tile has to beat the library by more than measurements differ.
_LEAST_GAIN = 1.02
# About what a weight streams at: only for how often to repeat a call.
_BYTES_A_SECOND = 4e12


@dataclass(frozen=True)
class Product:
    """A weight of a model, [out, width]."""

    model: str
    name: str
    out: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.out * self.width * DTYPE.itemsize

    def weights(self) -> list[Tensor]:
        """Random weights, enough of them that taking turns leaves none in the cache."""
        return [self._weight() for _ in range(copies_beyond_l2(self.nbytes))]

    def _weight(self) -> Tensor:
        return torch.randn(self.out, self.width, dtype=DTYPE, device="cuda").mul_(self.width**-0.5)

    def estimate(self, rows: int) -> float:
        """About how many seconds a product with so many rows takes."""
        return self.nbytes / _BYTES_A_SECOND * max(1.0, rows / 256)


def products(model: str, config: ModelConfig) -> Iterator[Product]:
    """The weights of a layer as they are merged, and the head."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = config.num_heads * dim
    yield Product(model, "qkv", heads + 2 * config.num_kv_heads * dim, hidden)
    yield Product(model, "o", hidden, heads)
    yield Product(model, "gate_up", 2 * inner, hidden)
    yield Product(model, "down", hidden, inner)
    yield Product(model, "lm_head", config.vocab_size, hidden)


@dataclass(frozen=True)
class Finding:
    """An entry of the table. plain: seconds of the best tile that is not launched early, None if there is none.

    Here a product follows a product, which lets early ones overlap more than they do between other kernels.
    """

    key: Key
    choice: Choice
    plain: float | None


def tune(product: Product) -> Iterator[Finding]:
    """The fastest of the candidates that are right, for each number of rows of the table."""
    weights = product.weights()
    x = torch.randn(MOST_ROWS, product.width, dtype=DTYPE, device="cuda")
    exact = x.float() @ weights[0].float().t()
    for rows in BUCKETS:
        key = Key("linear", str(DTYPE).removeprefix("torch."), product.out, product.width, rows)
        calls = [partial(F.linear, x[:rows], weight) for weight in weights]
        library = time_replayed(calls, repeats=15, estimate=product.estimate(rows)).seconds
        found = {
            tile: seconds
            for tile in candidates(rows, product.width)
            if (seconds := _measure(tile, x[:rows], weights, exact[:rows], product, repeats=5)) is not None
        }
        best = sorted(found, key=lambda tile: found[tile])[:_FINALISTS]
        finals = {
            tile: seconds
            for tile in (*best, *(replace(tile, early=True) for tile in best))
            if (seconds := _measure(tile, x[:rows], weights, exact[:rows], product, repeats=15)) is not None
        }
        winner = min(finals, key=lambda tile: finals[tile], default=None)
        if winner is None or finals[winner] * _LEAST_GAIN > library:
            choice = Choice(LIBRARY, {}, library, library)
        else:
            choice = Choice(IMPLEMENTATION, asdict(winner), finals[winner], library)
        yield Finding(key, choice, min((finals[tile] for tile in finals if not tile.early), default=None))


def _measure(
    tile: SkinnyTile, x: Tensor, weights: list[Tensor], exact: Tensor, product: Product, repeats: int
) -> float | None:
    """Seconds of one product; None, and a line that says why, if the tile cannot run or its result is wrong."""
    try:
        result = skinny_linear(x, weights[0], None, tile)
    except (TritonError, ValueError) as error:
        print(f"{tile} cannot run: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    # One rounding to 16 bits, beside what sums in float32 lose.
    allowed = exact.abs() * (1.1 * 2**-8) + exact.abs().max() * 1e-4
    if not bool(((result.float() - exact).abs() <= allowed).all()):
        print(f"{tile} is wrong for {list(x.shape)} by {list(weights[0].shape)}: not used", file=sys.stderr)
        return None
    calls = [partial(skinny_linear, x, weight, None, tile) for weight in weights]
    return time_replayed(calls, repeats=repeats, estimate=product.estimate(1)).seconds
