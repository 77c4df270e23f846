"""One layer is rounded: by its weights alone, or by what runs through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strata.kernels.quant.quantized import QuantizedWeight, dense
from strata.models.batch import Batch
from strata.models.layers import Linear
from strata.models.quantized.calibrate import folds
from strata.models.quantized.calibrate.column_scaling import scaling, smoothing
from strata.models.quantized.calibrate.folds import Fold
from strata.models.quantized.calibrate.gptq import gptq
from strata.models.quantized.calibrate.inputs import LayerInputs
from strata.models.quantized.calibrate.matrices import GATE_UP, Matrix, is_skipped, layer_views, products
from strata.models.quantized.calibrate.rounding import find_scales, largest_scales, nearest, round_trip
from strata.models.quantized.calibrate.settings import AWQ, GPTQ, SMOOTHQUANT, Rounding
from strata.models.quantized.calibrate.stream import LayerStream

# Of calibration text, that losses of AWQ are taken over.
_LOSS_BATCHES = 2


class LayerRounding:
    """Rounds an opened layer in place, so that later layers are calibrated on what it will make.

    batches, hidden: the text and what enters the layer; empty: there is no text.
    """

    def __init__(
        self, stream: LayerStream, number: int, rounding: Rounding, batches: Sequence[Batch], hidden: Sequence[Tensor]
    ) -> None:
        self.stream, self.number, self.rounding = stream, number, rounding
        self.batches, self.hidden = batches, hidden
        self.inputs = LayerInputs(stream, number, gram=rounding.method == GPTQ, without="rounded to nearest")
        self.layer, self.observer = self.inputs.layer, self.inputs.observer
        self.views = {name: view for name, _, view in layer_views(stream.model, number)}
        found = products(stream.model, number)
        self.matrices = [matrix for matrix in found if not is_skipped(matrix, rounding.skip)]

    @torch.no_grad()
    def run(self) -> dict[str, QuantizedWeight]:
        """The packed matrices by their names in a checkpoint; the layer multiplies by what they stand for then."""
        if self.batches:
            self.inputs.observe(self.batches, self.hidden)
            self._fold()
        packed = {matrix.name: self._pack(matrix) for matrix in self.matrices}
        for name, weight in packed.items():
            self.views[name].copy_(dense(weight))
        return packed

    @property
    def notes(self) -> list[str]:
        return self.inputs.notes

    def _pack(self, matrix: Matrix) -> QuantizedWeight:
        weight, scheme = self.views[matrix.name], self.rounding.packing
        dtype = self._scale_dtype(matrix)
        moments = self.inputs.moments(matrix) if self.batches else None
        if moments is None or moments.rows == 0:
            return nearest(weight, scheme, dtype)
        if self.rounding.method != GPTQ:
            return nearest(weight, scheme, dtype, moments.mean_squares)
        assert moments.gram is not None
        scales = find_scales(weight, scheme, dtype, moments.mean_squares)
        return gptq(weight, scheme, scales, moments.gram, moments.rows)

    def _scale_dtype(self, matrix: Matrix) -> torch.dtype:
        """In which scales are stored: the checkpoint's, but float32 for float64, in which no format has them."""
        dtype = self.stream.sources[matrix.name].dtype
        return torch.float32 if dtype == torch.float64 else dtype

    def _fold(self) -> None:
        """Move what is large between what makes activations and what multiplies them, where the method does."""
        if self.rounding.method == SMOOTHQUANT:
            for fold in self._exact([fold for fold in folds.norm_folds(self.observer) if self._is_linear(fold)]):
                moments = self.observer.moments[fold.after[0]]
                self._apply(fold, smoothing(moments.largest, folds.weights_after(self.layer, fold)))
        elif self.rounding.method == AWQ:
            for fold in self._exact([*folds.norm_folds(self.observer), *folds.product_folds(self.layer)]):
                self._search(fold)

    def _exact(self, found: list[Fold]) -> list[Fold]:
        """Those behind which something is rounded, and that change nothing but how it is rounded."""
        rounded = {matrix.module for matrix in self.matrices}
        batch, x = self.batches[0], self.hidden[0]

        def run() -> Tensor:
            return self.stream.run(self.number, batch, x)

        wanted = [fold for fold in found if rounded.intersection(fold.after)]
        return [fold for fold in wanted if folds.is_exact(self.layer, fold, run)]

    def _is_linear(self, fold: Fold) -> bool:
        """Whether no experts and routers read what is folded: they would each want other factors."""
        return all(isinstance(self.layer.get_submodule(name), Linear) for name in fold.after)

    def _apply(self, fold: Fold, factors: Tensor) -> None:
        folds.apply(self.layer, fold, factors)
        divided: list[Any] = []
        for name in fold.after:
            for kept in (self.observer.moments.get(name), self.observer.experts.get(name)):
                if kept is not None and not any(kept is one for one in divided):
                    kept.divide(factors)
                    divided.append(kept)

    def _search(self, fold: Fold) -> None:
        """Fold the factors of AWQ."""
        moments = next(self.observer.moments[name] for name in fold.after if name in self.observer.moments)
        block, scheme = self._block(fold), self.rounding.packing
        calls = self._calls(block)
        expected = [block(*given) for given in calls]
        reading = [matrix for matrix in self.matrices if self._reads(matrix, fold)]
        dtypes = [self._scale_dtype(matrix) for matrix in reading]
        weights = [self.views[matrix.name] for matrix in reading]
        kept = [weight.clone() for weight in weights]

        def loss(factors: Tensor) -> float:
            for weight, own, dtype in zip(weights, kept, dtypes, strict=True):
                larger = own * factors
                weight.copy_(round_trip(larger, scheme, largest_scales(larger, scheme, dtype)) / factors)
            made = (block(*given) for given in calls)
            pairs = zip(made, expected, strict=True)
            total = sum(float((one - other).square().sum(dtype=torch.float64)) for one, other in pairs)
            for weight, own in zip(weights, kept, strict=True):
                weight.copy_(own)
            return total

        magnitudes = moments.mean_magnitudes
        factors = scaling(magnitudes, folds.weights_after(self.layer, fold), scheme, loss)
        if factors is not None:
            self._apply(fold, factors)

    def _reads(self, matrix: Matrix, fold: Fold) -> bool:
        return matrix.module in fold.after and matrix.side in ("", GATE_UP)

    def _block(self, fold: Fold) -> nn.Module:
        """The smallest module that AWQ compares the outputs of: of products behind a norm, attention or MLP."""
        first = fold.after[0]
        return self.layer.get_submodule(first if len(fold.after) == 1 else first.partition(".")[0])

    def _calls(self, block: nn.Module) -> list[tuple[Any, ...]]:
        """What a module is called with for the first batches."""
        calls: list[tuple[Any, ...]] = []

        def note(module: nn.Module, given: tuple[Any, ...]) -> None:
            calls.append(given)

        handle = block.register_forward_pre_hook(note)
        try:
            for batch, x in list(zip(self.batches, self.hidden, strict=True))[:_LOSS_BATCHES]:
                self.stream.run(self.number, batch, x)
        finally:
            handle.remove()
        return calls
