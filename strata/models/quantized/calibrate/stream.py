"""A model layer by layer: one has its weights, in float32, while the others are shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from strata.kernels.state.groups import of_group
from strata.models.batch import Batch
from strata.models.families import build
from strata.models.layers import CausalLM, Layer, layer_angles
from strata.models.quantized.calibrate.matrices import layer_prefix
from strata.models.quantized.checkpoint import Checkpoint
from strata.models.save import runs
from strata.models.sources import is_passed_over
from strata.models.weights import allocate, resolve

_EMBEDDING = "model.embed_tokens.weight"
# Tokens that run through a layer at once.
_BATCH_TOKENS = 4096


class LayerStream:
    """The model of a folder. sources: of all its tensors in the checkpoint. behind: tensors that the checkpoint has of
    layers that predict further tokens. device: where layers are computed."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises ValueError as `strata.models.weights.load` does; reads no weight."""
        config, _ = resolve(folder)
        self.folder, self.config, self.device = folder, config, device
        with torch.device("meta"):
            self.model: CausalLM = build(config)
        self.checkpoint = Checkpoint.of(folder, self.model)
        self.sources = self.checkpoint.sources
        self.behind = {name: one for name, one in self.checkpoint.tensors.items() if is_passed_over(self.model, name)}
        for rotary in (self.model.model.rotary, self.model.model.window_rotary):
            if rotary is not None:
                allocate(rotary, device)

    @property
    def layers(self) -> int:
        return len(self.model.model.layers)

    def check_tokens(self, sequences: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for tokens that the model does not have, and for more of them in a sequence than it
        takes."""
        known, longest = self.config.vocab_size, self.config.longest
        for sequence in sequences:
            if unknown := [token for token in sequence if not 0 <= token < known]:
                raise ValueError(f"the calibration text has token {unknown[0]}, and the model {known} tokens")
            if len(sequence) > longest:
                raise ValueError(
                    f"the calibration text has a sample of {len(sequence)} tokens, and the model takes {longest}: "
                    "cut it"
                )

    @contextmanager
    def opened(self, number: int) -> Iterator[Layer]:
        """A layer with its weights, for as long as this is open."""
        layer = self.model.model.layers[number]
        assert isinstance(layer, Layer)
        allocate(layer, self.device, torch.float32)
        prefix = layer_prefix(number)
        parameters = {prefix + name: parameter for name, parameter in layer.named_parameters()}
        try:
            for name, value in self.checkpoint.parameters(self.model, parameters.keys()):
                parameters[name].detach().copy_(value)
            yield layer
        finally:
            allocate(layer, torch.device("meta"))

    def embed(self, batches: Sequence[Batch]) -> list[Tensor]:
        """What enters the first layer, [tokens, hidden] float32 on the CPU, of each batch."""
        embedding = self.model.model.embed_tokens
        ((_, value),) = self.checkpoint.parameters(self.model, (_EMBEDDING,))
        embedding.weight = torch.nn.Parameter(value, requires_grad=False)
        try:
            return [self.model.model.embed(batch.tokens).detach() for batch in batches]
        finally:
            allocate(embedding, torch.device("meta"))

    @torch.no_grad()
    def run(self, number: int, batch: Batch, x: Tensor) -> Tensor:
        """What an opened layer makes of hidden states, on the device."""
        decoder = self.model.model
        batch = replace(
            batch, **{name: getattr(batch, name).to(self.device) for name in ("tokens", "positions", "offsets")}
        )
        angles, window_angles = layer_angles(batch.positions, decoder.rotary, decoder.window_rotary)
        layer = decoder.layers[number]
        made: Tensor = layer(
            x.to(self.device),
            of_group(batch, decoder.groups[number]),
            *(window_angles if layer.has_window else angles),
        )
        return made


def batches_of(sequences: Sequence[Sequence[int]]) -> list[Batch]:
    """Sequences of token ids, each whole, in batches of about `_BATCH_TOKENS` tokens on the CPU."""
    return [_batch(run) for run in runs(sequences, len, _BATCH_TOKENS)]


def _batch(sequences: Sequence[Sequence[int]]) -> Batch:
    offsets = [0, *accumulate(map(len, sequences))]
    tokens = [token for sequence in sequences for token in sequence]
    positions = [position for sequence in sequences for position in range(len(sequence))]
    return Batch(_int32(tokens), _int32(positions), _int32(offsets), max(map(len, sequences)))


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
