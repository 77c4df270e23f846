"""LoRA (Hu et al. 2022): frozen weights, and beside chosen projections a trained product of two thin matrices."""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strata.kernels.linear.linear import linear
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.quant.schemes import scheme_of
from strata.models.layers import CausalLM, Linear

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


class LoraLinear(nn.Module):
    """y = x W^T (+ b) + scale * x A^T B^T, [..., inputs] to [..., outputs]; the base's parameters keep their names.

    A [rank, inputs] and B [outputs, rank] are float32 whatever the base is: their updates are small. The base's weight
    may be packed (`strata.train.adapters.frozen`).
    """

    weight: nn.Parameter | PackedWeight
    bias: nn.Parameter | None

    def __init__(self, base: Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.scale = config.alpha / config.rank
        outputs, inputs = base.weight.shape
        with torch.device(base.weight.device):
            self.lora_A = Linear(inputs, config.rank, bias=False).float()
            self.lora_B = Linear(config.rank, outputs, bias=False).float()
        # Uniform with variance 1 / (3 inputs), as PEFT's kaiming_uniform_(a=sqrt(5)); the product begins as zero.
        drawn = torch.empty(config.rank, inputs, device="cpu").uniform_(-1, 1, generator=generator) * inputs**-0.5
        with torch.no_grad():
            self.lora_A.weight.copy_(drawn)
            self.lora_B.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = linear(x, self.weight, self.bias)
        added: Tensor = _LowRank.apply(x, self.lora_A.weight, self.lora_B.weight, self.scale)
        return base + added

    @torch.no_grad()
    def merged(self) -> Linear:
        """One matrix that computes the same; the base's own tensor, changed in place. Raises ValueError if that is
        packed."""
        if isinstance(self.weight, PackedWeight):
            raise ValueError("packed weights have no room for an adapter: load the model in floats, then merge")
        outputs, inputs = self.weight.shape
        with torch.device("meta"):
            made = Linear(inputs, outputs, bias=False)
        product = self.scale * (self.lora_B.weight @ self.lora_A.weight)
        self.weight.copy_(self.weight.to(product.dtype) + product)
        made.weight = self.weight
        made.bias = self.bias
        return made


class _LowRank(torch.autograd.Function):
    """`scale * x A^T B^T` in the dtype of A and B, rounded to that of x.

    Keeps x as it is, which adapters beside each other share: widened, each would keep one of its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        inner = linear(x.to(a.dtype), a)
        ctx.save_for_backward(x, a, b, inner)
        ctx.scale = scale
        result: Tensor = (scale * linear(inner, b)).to(x.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, a, b, inner = ctx.saved_tensors
        grad = ctx.scale * upstream[0].to(b.dtype)
        through = grad @ b
        of_x = (through @ a).to(x.dtype) if ctx.needs_input_grad[0] else None
        of_a = through.flatten(0, -2).t() @ x.to(a.dtype).flatten(0, -2)
        of_b = grad.flatten(0, -2).t() @ inner.flatten(0, -2)
        return of_x, of_a, of_b, None


class Adapters(nn.Module):
    """The parameters of all adapters of a model, under their names in it: what an optimizer is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._named = {name: weight for name, weight in model.named_parameters() if name.endswith(_ADAPTERS)}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()


def add_lora(model: CausalLM, config: LoraConfig, seed: int) -> Adapters:
    """Freeze the model and put adapters beside its projections. At first the model computes what it did.

    Raises ValueError if it has none of those that the config names.
    """
    found = _projections(model, config.projections)
    model.requires_grad_(False)
    generator = torch.Generator("cpu").manual_seed(seed)
    for parent, name, child in found:
        setattr(parent, name, LoraLinear(child, config, generator))
    return Adapters(model)


def merge_lora(model: CausalLM) -> None:
    """Add every adapter to its weight and take it away: a model as it was before `add_lora`, with other weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                setattr(parent, name, child.merged())


def save_adapter(model: CausalLM, config: LoraConfig, base: str, folder: Path) -> None:
    """Write the adapters as PEFT does, so that PEFT, vLLM and others load them. base: the model that they are of."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_PREFIX + name: weight.detach().cpu() for name, weight in Adapters(model).named_parameters()}
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


def load_adapter(model: CausalLM, folder: Path) -> Adapters:
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
    wanted = {_PREFIX + name: weight for name, weight in adapters.named_parameters()}
    wrong = list(wanted.keys() ^ tensors.keys())
    wrong += [name for name in wanted.keys() & tensors.keys() if wanted[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(f"{folder} is an adapter of another model: {min(wrong)} is missing or misshapen in one")
    with torch.no_grad():
        for name, weight in wanted.items():
            weight.copy_(tensors[name])
    return adapters


def adapter_shapes(model: CausalLM, config: LoraConfig) -> list[tuple[int, int]]:
    """The sizes [outputs, inputs] of all weights that adapters would be put beside. Raises ValueError as `add_lora`."""
    return [(child.weight.shape[0], child.weight.shape[1]) for *_, child in _projections(model, config.projections)]


def _projections(model: CausalLM, names: Sequence[str]) -> list[tuple[nn.Module, str, Linear]]:
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in names and isinstance(child, Linear)
    ]
    if not found:
        raise ValueError(
            f"lora.projections: {type(model).__name__} has none of {', '.join(names)}; train it whole, without [lora]"
        )
    return found
