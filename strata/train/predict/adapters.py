"""What a step of adapters beside a frozen model takes before it runs, by hand count: memory of a rank by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from strata.kernels.quant.quantized import QuantizedWeight
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.weights import quantized_bytes
from strata.parallel.layout import Layout
from strata.train.adapters.frozen import planned_weights
from strata.train.adapters.lora import LoraConfig, adapter_shapes
from strata.train.config import TrainConfig
from strata.train.predict.estimate import (
    GIB,
    USABLE,
    MemoryOfRank,
    layer_bytes,
    layer_working_bytes,
    logits_bytes,
    step_shape,
)
from strata.train.predict.rank_parameters import parameters_by_rank
from strata.train.predict.step_shape import TrainShape


@dataclass(frozen=True)
class AdapterMemory(MemoryOfRank):
    """frozen: the weights that are not trained, packed or in bfloat16. adapters: float32 weights, gradients, and two
    moments as far as ZeRO leaves them here. activations: for the backward pass, at most: as if all projections had
    adapters. workspace: what only the fullest moment holds, the logits of a chunk or the backward pass of a layer with
    the floats of the largest packed weight.
    """

    frozen: int
    adapters: int
    activations: int
    workspace: int


@dataclass(frozen=True)
class AdapterStep:
    """The largest step of a run of adapters. planned: the packed weights of its frozen model (`planned_weights`)."""

    shape: TrainShape
    lora: LoraConfig
    model: CausalLM
    planned: Mapping[str, QuantizedWeight]

    @staticmethod
    def of(run: TrainConfig, config: ModelConfig, layout: Layout) -> AdapterStep:
        """Raises ValueError as `planned_weights` does."""
        assert run.lora is not None
        with torch.device("meta"):
            model = build(config)
        planned = planned_weights(run.start.folder, config, run.lora.quantization)
        return AdapterStep(step_shape(run, config, layout), run.lora, model, planned)

    def memory(self, recompute: str) -> AdapterMemory:
        """recompute: one of `shape.recomputes`."""
        shape, shapes = self.shape, list(adapter_shapes(self.model, self.lora))
        tokens = shape.local_tokens
        elements = sum(self.lora.rank * (out + width) for out, width in shapes)
        layers = range(shape.config.num_layers)
        # What lies between an adapter's two matrices is float32. With layers computed again it is of one of them.
        of_adapters = 4 * tokens * self.lora.rank * len(shapes) // (len(layers) if recompute == "layers" else 1)
        kept = [layer_bytes(shape, layer, recompute) for layer in layers]
        again = max(layer_bytes(shape, layer, "none") - one for layer, one in zip(layers, kept, strict=True))
        # An adapter's backward pass widens the gradient twice, or it and the input.
        widened = max(4 * tokens * max(2 * out, out + width) for out, width in shapes)
        working = max(layer_working_bytes(shape, layer) for layer in layers)
        # Matrices of experts are needed together.
        floats: Counter[str] = Counter()
        for name, weight in self.planned.items():
            floats[name.rpartition(".")[0]] += 2 * weight.numel()
        return AdapterMemory(
            self._frozen(),
            8 * elements + 8 * -(-elements // shape.data_ranks[0]),
            sum(kept) + of_adapters,
            max(logits_bytes(shape), again + widened + working + max(floats.values(), default=0)),
        )

    def _frozen(self) -> int:
        """On the rank that holds most, by its share of all elements. Packed weights are not divided by ZeRO."""
        shape = self.shape
        (whole,) = parameters_by_rank(shape.config, 1, 1, shape.length, (0,))
        most = max(one.total for one in shape.local_parameters)
        packed = sum(weight.nbytes for weight in self.planned.values())
        floats = quantized_bytes(self.model, torch.bfloat16, self.planned) - packed
        ranks = shape.data_ranks[0] if shape.layout.zero == 3 else 1
        return -(-packed * most // whole.total) - (-floats * most // (whole.total * ranks))

    @property
    def beside(self) -> str:
        """What adapters stand beside, in words."""
        packed = sum(weight.nbytes for weight in self.planned.values())
        many = f"{len(self.planned)} packed weights of {packed / GIB:.2f} GiB"
        return f"adapters of rank {self.lora.rank} beside {many if self.planned else 'weights in bfloat16'}"

    def choose_recompute(self, device_bytes: int) -> str:
        """The first way of the layout that fits, or else the one that takes the least memory."""
        ways = self.shape.recomputes
        return next((one for one in ways if self.fits(one, device_bytes)), ways[-1])

    def fits(self, recompute: str, device_bytes: int) -> bool:
        return self.memory(recompute).total <= USABLE * device_bytes
