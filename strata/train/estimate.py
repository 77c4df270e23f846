"""What a training step takes on one GPU, before it runs: memory by kind, the least time, and what to recompute."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from strata.hardware.roofline import Cost, floor
from strata.hardware.specs import Device
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.train.config import RECOMPUTE, TrainConfig
from strata.train.graph_step import LOGITS_BYTES

# Of a device's memory, what a run may plan with: the rest is the driver's, the libraries' and lost between blocks.
USABLE = 0.94


@dataclass(frozen=True)
class StepShape:
    """A step on one GPU. tokens: of a batch, in sequences of at most `length`; batches: whose gradients add up."""

    config: ModelConfig
    tokens: int
    length: int
    batches: int = 1
    precision: str = "bf16"

    def __post_init__(self) -> None:
        if self.config.num_experts:
            raise ValueError("a step of a mixture of experts cannot be estimated: nobody knows what an expert will get")

    @property
    def parameters(self) -> tuple[int, int]:
        """(all, those of the layers' matrices)."""
        with torch.device("meta"):
            model = build(self.config)
        layers = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() > 1)
        return sum(weight.numel() for weight in model.parameters()), layers


def step_shape(config: ModelConfig, run: TrainConfig) -> StepShape:
    """The largest step of a run: full batches, of documents as long as the model takes."""
    tokens = run.data.tokens_per_batch
    length = min(tokens, config.max_length)
    return StepShape(config, tokens, length, run.data.batches_per_step, run.run.precision)


@dataclass(frozen=True)
class Memory:
    """Bytes at the fullest moment of a step.

    state: weights (bfloat16), masters and two moments (float32). sums: float32 gradients of the batches before.
    kept: activations for the backward pass. working: what only the fullest moment holds, which is the loss with its
    logits and the head's gradient, or the backward pass of a layer.
    """

    state: int
    sums: int
    kept: int
    working: int

    @property
    def total(self) -> int:
        return sum(int(getattr(self, field.name)) for field in fields(self))


def memory(shape: StepShape, recompute: str) -> Memory:
    """What a step keeps, by hand count of dense layers; `recompute` is one of `RECOMPUTE`."""
    config, tokens = shape.config, shape.tokens
    parameters, _ = shape.parameters
    everything, kept = _layer_bytes(shape, "none"), _layer_bytes(shape, recompute)
    head = 2 * config.vocab_size * config.hidden_size
    logits = min(2 * tokens * config.vocab_size, LOGITS_BYTES)
    return Memory(
        state=14 * parameters,
        sums=4 * parameters if shape.batches > 1 else 0,
        kept=config.num_layers * kept,
        working=head + max(logits, everything - kept),
    )


def _layer_bytes(shape: StepShape, recompute: str) -> int:
    """What one layer keeps of a batch. Sizes of a token below are elements of bfloat16 unless they say otherwise."""
    config = shape.config
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    product = queries + 2 * keys
    log_sums = 4 * config.num_heads  # bytes of attention
    if recompute == "layers":
        return shape.tokens * 2 * (2 * hidden)  # residual, and what is to be added to it
    if recompute == "operations":
        results = product + queries + hidden + 2 * inner + hidden  # of the four products and attention
        return shape.tokens * (2 * (results + hidden) + log_sums)
    read_by_norms = 2 * hidden
    read_by_products = 2 * hidden + inner  # beside attention's result, which is kept anyway
    kept = read_by_norms + product + queries + 2 * inner
    if shape.precision == "bf16":
        return shape.tokens * (2 * (kept + read_by_products) + log_sums)
    weights = product * hidden + queries * hidden + 3 * inner * hidden  # a byte each, as the backward pass reads them
    return shape.tokens * (2 * kept + read_by_products + queries + log_sums) + weights


def choose_recompute(shape: StepShape, device_bytes: int) -> str:
    """The one of `RECOMPUTE` that takes the least time and fits. Raises ValueError if none does."""
    usable = int(USABLE * device_bytes)
    for recompute in RECOMPUTE:
        if memory(shape, recompute).total <= usable:
            return recompute
    least = memory(shape, RECOMPUTE[-1])
    raise ValueError(
        f"a step over {shape.tokens} tokens takes {least.total / 2**30:.1f} GiB ({least.state / 2**30:.1f} of them for "
        f"the model and its optimizer) and {usable / 2**30:.1f} are usable; lower data.tokens_per_batch or the model"
    )


def least_seconds(shape: StepShape, recompute: str, device: Device) -> float:
    """The least time of a step: its products and attention at the device's measured rates, then AdamW's bytes.

    Norms, activations and the loss's own passes over memory are left out. Sequences are taken as full.
    """
    config = shape.config
    parameters, layers = shape.parameters
    passes = 4 if recompute == "layers" else 3  # a forward pass, and a backward pass of twice its work
    pairs = config.num_layers * config.num_heads * config.head_dim * shape.length
    attention, head = passes * 2 * pairs, 6 * config.vocab_size * config.hidden_size
    narrow = "bfloat16" if shape.precision == "bf16" else "float8"
    products = floor(Cost(shape.tokens * passes * 2 * layers), device, narrow).seconds
    rest = floor(Cost(shape.tokens * (attention + head)), device, "bfloat16").seconds
    update = floor(Cost(read=14 * parameters, written=14 * parameters), device, "bfloat16").seconds
    return shape.batches * (products + rest) + update
