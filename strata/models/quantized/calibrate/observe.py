"""What the modules of a layer are given while it runs: sums over it, and which of them read what a norm has made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strata.kernels.activation.silu_mul import silu_mul
from strata.models.experts import BiasedExperts, ExpertRouter, Experts
from strata.models.layers import Linear, RMSNorm
from strata.models.quantized.calibrate.moments import Moments


class ExpertInputs:
    """What a block of experts was given: x [tokens, hidden] and the experts chosen [tokens, per_token].

    Kept as it came, since moments of all experts at once would take experts * width^2.
    """

    def __init__(self) -> None:
        self._x: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def add(self, x: Tensor, chosen: Tensor) -> None:
        self._x.append(x.detach().cpu())
        self._chosen.append(chosen.detach().cpu())

    @property
    def tokens(self) -> int:
        return sum(len(x) for x in self._x)

    def rows(self, expert: int) -> Tensor:
        """The x that went to an expert, [rows, hidden]."""
        pairs = zip(self._x, self._chosen, strict=True)
        return torch.cat([x[(chosen == expert).any(-1)] for x, chosen in pairs])

    def divide(self, factors: Tensor) -> None:
        self._x = [x / factors.cpu() for x in self._x]


class LayerObserver:
    """Listens to a layer. readers: by the norm, the modules that multiply the very tensor that it has made."""

    def __init__(self, layer: nn.Module, *, gram: bool) -> None:
        self.layer, self.gram = layer, gram
        self.moments: dict[str, Moments] = {}
        self.experts: dict[str, ExpertInputs] = {}
        self.readers: dict[str, list[str]] = {}
        # Of the batch that runs, so that tensors are told apart by being the same object.
        self._made: list[tuple[Tensor, str]] = []
        self._read: list[tuple[Tensor, Moments]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this is open, runs of the layer are added up; call `next_batch` before each."""
        handles: list[Any] = []
        for name, module in self.layer.named_modules():
            if isinstance(module, RMSNorm):
                handles.append(module.register_forward_hook(self._hook(self._note_norm, name)))
            elif isinstance(module, Linear | ExpertRouter | Experts | BiasedExperts):
                handles.append(module.register_forward_pre_hook(self._hook(self._note_input, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.next_batch()

    def next_batch(self) -> None:
        self._made.clear()
        self._read.clear()

    @staticmethod
    def _hook(note: Any, name: str) -> Any:
        def call(module: nn.Module, *given: Any) -> None:
            note(name, module, *given)

        return call

    def _note_norm(self, name: str, module: nn.Module, given: tuple[Any, ...], made: Tensor) -> None:
        self._made.append((made, name))

    def _note_input(self, name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        x = given[0]
        for made, norm in self._made:
            if made is x and name not in self.readers.setdefault(norm, []):
                self.readers[norm].append(name)
        if isinstance(module, Experts | BiasedExperts):
            self.experts.setdefault(name, ExpertInputs()).add(x, given[2])
        elif isinstance(module, Linear | ExpertRouter):
            self._add(name, x)

    def _add(self, name: str, x: Tensor) -> None:
        """To the module's sums; modules that read one tensor share them."""
        for read, moments in self._read:
            if read is x:
                self.moments[name] = moments
                return
        if name not in self.moments:
            self.moments[name] = Moments(x.shape[-1], x.device, gram=self.gram)
        self.moments[name].add(x)
        self._read.append((x, self.moments[name]))


def gated(x: Tensor, gate_up: Tensor) -> Tensor:
    """What an expert's second product multiplies: x [rows, hidden], gate_up [2 * width, hidden] -> [rows, width]."""
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    made: Tensor = silu_mul(gate.contiguous(), up.contiguous())
    return made
