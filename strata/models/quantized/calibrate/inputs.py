"""What the products of one layer multiply, as calibration text runs through it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from strata.models.batch import Batch
from strata.models.experts import Experts
from strata.models.quantized.calibrate.matrices import GATE_UP, Matrix
from strata.models.quantized.calibrate.moments import Moments
from strata.models.quantized.calibrate.observe import LayerObserver, gated
from strata.models.quantized.calibrate.stream import LayerStream

# An expert that fewer of the tokens went to says too little about its inputs to be changed by them (llm-compressor).
_MIN_SHARE = 0.005


class LayerInputs:
    """Of an opened layer. gram: whether sums of x x^T are wanted.

    notes: of experts that too few tokens went to; `without` says what is done with these.
    """

    def __init__(self, stream: LayerStream, number: int, *, gram: bool, without: str) -> None:
        self._stream, self._number, self._without = stream, number, without
        self.layer: nn.Module = stream.model.model.layers[number]
        self.observer = LayerObserver(self.layer, gram=gram)
        self.notes: list[str] = []
        self._latest: tuple[tuple[str, int, str], Moments | None] | None = None

    @torch.no_grad()
    def observe(self, batches: Sequence[Batch], hidden: Sequence[Tensor]) -> None:
        """Add up what products multiply while the text runs. hidden: what enters the layer, of each batch."""
        with self.observer.listening():
            for batch, x in zip(batches, hidden, strict=True):
                self.observer.next_batch()
                self._stream.run(self._number, batch, x)

    def moments(self, matrix: Matrix) -> Moments | None:
        """Of what a matrix multiplies; None of an expert that too few tokens went to."""
        if matrix.expert is None:
            return self.observer.moments.get(matrix.module)
        asked = (matrix.module, matrix.expert, matrix.side)
        if self._latest is None or self._latest[0] != asked:  # gate and up multiply the same
            self._latest = (asked, self._expert_moments(matrix, matrix.expert))
        return self._latest[1]

    def _expert_moments(self, matrix: Matrix, expert: int) -> Moments | None:
        module, inputs = self.layer.get_submodule(matrix.module), self.observer.experts[matrix.module]
        assert isinstance(module, Experts)
        rows = inputs.rows(expert).to(module.gate_up_proj.device)
        if len(rows) < max(1, _MIN_SHARE * inputs.tokens):
            seen = f"expert {expert} saw {len(rows)} of {inputs.tokens} tokens"
            note = f"layer {self._number}: {seen}: {self._without}"
            if note not in self.notes:
                self.notes.append(note)
            return None
        multiplied = rows if matrix.side == GATE_UP else gated(rows, module.gate_up_proj.detach()[expert])
        return Moments.of(multiplied, gram=self.observer.gram)
