"""LoRA (Hu et al. 2022): frozen weights, and beside chosen projections a trained product of two thin matrices."""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strata.comm.placement import Placement
from strata.kernels.linear.linear import linear
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.quant.schemes import scheme_of
from strata.models.layers import CausalLM, Linear
from strata.parallel.tensor import ColumnLinear, RowLinear, TensorSharding

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# How PEFT names the weights and the settings of an adapter.
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _ADAPTERS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class LoraConfig:
    """rank: inner width of the product, which is scaled by alpha / rank. projections: which get one, in all layers.

    quantization: the scheme, one of `SCHEMES`, by which a run packs the frozen weights of products (QLoRA, Dettmers et
    al. 2023); None leaves them as the checkpoint has them.
    """

    rank: int = 8
    alpha: float = 16.0
    projections: list[str] = field(default_factory=lambda: list(PROJECTIONS))
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.rank = {self.rank} and lora.alpha = {self.alpha} must be positive and finite")
        if unknown := [name for name in self.projections if name not in PROJECTIONS]:
            raise ValueError(f"lora.projections: {unknown[0]!r} is unknown; accepted are {', '.join(PROJECTIONS)}")
        if not self.projections:
            raise ValueError(f"lora.projections is empty; name some of {', '.join(PROJECTIONS)}")
        if self.quantization is not None:
            scheme_of(self.quantization)


# What may get an adapter; its weight [outputs, inputs] may be packed (`strata.train.adapters.frozen`).
Base = Linear | RowLinear | ColumnLinear

# Of A and B, by the placement of the weight that they are beside. A is whole beside divided rows, and its gradient a
# part on each rank.
_PLACEMENTS = {
    Placement.COLUMN: (Placement.PER_HEAD, Placement.COLUMN),
    Placement.ROW: (Placement.ROW, Placement.PER_TOKEN),
}


def add_lora(model: CausalLM, config: LoraConfig, seed: int) -> dict[str, nn.Parameter]:
    """Freeze a model that one process holds whole and put adapters beside its projections, in float32 whatever it is:
    their updates are small. At first the model computes what it did. Returns the adapters' parameters by name.

    Raises ValueError if it has none of those that the config names.
    """
    values = dict(first_values(model, config, seed))
    model.requires_grad_(False)
    for _, child in _projections(model, config.projections):
        _put_beside(child, config, next(model.parameters()).device, torch.float32)
    found = adapters_of(model)
    with torch.no_grad():
        for name, weight in found.items():
            weight.copy_(values[name])
    return found


def add_adapters(model: nn.Module, sharding: TensorSharding, config: LoraConfig, dtype: torch.dtype) -> TensorSharding:
    """Put adapters beside the projections of a rank's part of a frozen model, and say how they are divided: as these.

    model: as `shard_model` has left it, maybe on the meta device, maybe without any of the projections.
    """
    placements, shapes = dict(sharding.placements), dict(sharding.shapes)
    for name, child in _projections(model, config.projections):
        _put_beside(child, config, next(model.parameters()).device, dtype)
        placement = sharding.placements.get(f"{name}.weight", Placement.PER_TOKEN)  # a packed one is not divided
        both = _PLACEMENTS.get(placement, (Placement.PER_TOKEN, Placement.PER_TOKEN))
        sizes = _sizes(sharding.shapes.get(f"{name}.weight", child.weight.shape), config.rank)
        placements |= dict(zip((name + one for one in _ADAPTERS), both, strict=True))
        shapes |= dict(zip((name + one for one in _ADAPTERS), sizes, strict=True))
    return replace(sharding, placements=placements, shapes=shapes)


def first_values(model: CausalLM, config: LoraConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """By name, whole, what the adapters of a whole model begin with: the same for any layout. The model may be on the
    meta device. Raises ValueError as `add_lora`.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, child in _needed(model, config):
        of_a, of_b = _sizes(child.weight.shape, config.rank)
        # Uniform with variance 1 / (3 inputs), as PEFT's kaiming_uniform_(a=sqrt(5)); the product begins as zero.
        drawn = torch.empty(of_a, device="cpu").uniform_(-1, 1, generator=generator) * of_a[1] ** -0.5
        yield from zip((name + one for one in _ADAPTERS), (drawn, torch.zeros(of_b, device="cpu")), strict=True)


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all adapters of a model, by their names in it."""
    return {name: weight for name, weight in model.named_parameters() if name.endswith(_ADAPTERS)}


def _put_beside(base: Base, config: LoraConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Let `base` compute x W^T (+ b) + scale * x A^T B^T, [..., inputs] to [..., outputs]: A is `lora_A.weight`
    [rank, inputs], B `lora_B.weight` [outputs, rank]; its own parameters keep their names.
    """
    for name, (outputs, inputs) in zip(("lora_A", "lora_B"), _sizes(base.weight.shape, config.rank), strict=True):
        with torch.device(device):
            base.register_module(name, Linear(inputs, outputs, bias=False).to(dtype))
    adapted: Any = base
    adapted.lora_scale = config.alpha / config.rank
    adapted.forward = MethodType(_forward, base)


def _forward(self: Any, x: Tensor) -> Tensor:
    product: Tensor = type(self).forward(self, x)
    inner: Tensor = _WideProduct.apply(x, self.lora_A.weight)
    if isinstance(self, (RowLinear, ColumnLinear)):
        inner = self.between(inner)
    added: Tensor = self.lora_scale * linear(inner, self.lora_B.weight)
    return product + added.to(product.dtype)


class _WideProduct(torch.autograd.Function):
    """`x W^T` in the dtype of W.

    Keeps x as it is, which adapters beside each other share: widened, each would keep one of its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        result: Tensor = linear(x.to(weight.dtype), weight)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = (upstream[0] @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        return of_x, upstream[0].flatten(0, -2).t() @ x.to(weight.dtype).flatten(0, -2)


@torch.no_grad()
def merge_lora(model: CausalLM) -> None:
    """Add every adapter to its weight, in place, and take it away: a model as it was before `add_lora`, with other
    weights. Raises ValueError for a packed weight.
    """
    adapted: list[Any] = [one for one in model.modules() if "lora_A" in dict(one.named_children())]
    for child in adapted:
        if isinstance(child.weight, QuantizedWeight):
            raise ValueError("packed weights have no room for an adapter: load the model in floats, then merge")
        product = child.lora_scale * (child.lora_B.weight @ child.lora_A.weight)
        child.weight.copy_(child.weight.to(product.dtype) + product)
        for name in ("lora_A", "lora_B", "lora_scale", "forward"):
            delattr(child, name)


def save_adapter(adapters: Mapping[str, Tensor], config: LoraConfig, base: str, folder: Path) -> None:
    """Write the adapters as PEFT does, so that PEFT, vLLM and others load them. adapters: whole, by their names in the
    model. base: the model that they are of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_PREFIX + name: weight.detach().cpu() for name, weight in adapters.items()}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_adapter(model: CausalLM, folder: Path) -> None:
    """Put the adapters of a folder in PEFT's layout beside the projections of `model`, which is frozen.

    Raises ValueError if a file is missing, if it uses what this does not compute, or does not fit the model.
    """
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        config = LoraConfig(int(settings["r"]), float(settings["lora_alpha"]), sorted(settings["target_modules"]))
    except Exception as error:  # safetensors raises its own bare errors
        raise ValueError(f"{folder} holds no LoRA adapter that can be read: {error}") from None
    for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "layers_to_transform", "modules_to_save"):
        if settings.get(name):
            raise ValueError(f"{folder / SETTINGS}: {name} = {settings[name]!r} is not supported; merge it with PEFT")
    adapters = add_lora(model, config, seed=0)
    wanted = {_PREFIX + name: weight for name, weight in adapters.items()}
    wrong = list(wanted.keys() ^ tensors.keys())
    wrong += [name for name in wanted.keys() & tensors.keys() if wanted[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(f"{folder} is an adapter of another model: {min(wrong)} is missing or misshapen in one")
    with torch.no_grad():
        for name, weight in wanted.items():
            weight.copy_(tensors[name])


def adapter_shapes(model: CausalLM, config: LoraConfig) -> list[tuple[int, int]]:
    """The sizes [outputs, inputs] of all weights that adapters would be put beside. Raises ValueError as `add_lora`."""
    return [(child.weight.shape[0], child.weight.shape[1]) for _, child in _needed(model, config)]


def _sizes(base: Sequence[int], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of A and of B, beside a weight [outputs, inputs]."""
    outputs, inputs = base
    return (rank, inputs), (outputs, rank)


def _needed(model: CausalLM, config: LoraConfig) -> list[tuple[str, Base]]:
    if found := _projections(model, config.projections):
        return found
    raise ValueError(
        f"lora.projections: {type(model).__name__} has none of {', '.join(config.projections)}; train it whole, "
        "without [lora]"
    )


def _projections(model: nn.Module, names: Sequence[str]) -> list[tuple[str, Base]]:
    """The modules of these names, by their places."""
    return [
        (f"{place}.{name}", child)
        for place, parent in model.named_modules()
        for name, child in parent.named_children()
        if name in names and isinstance(child, Base)
    ]
