"""Rotary position embeddings (RoFormer, Su et al. 2021): how the frequencies of each type follow from its parameters.

The arithmetic is float32 in the order that transformers uses, so that logits agree to the last digits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from strata.files.fields import Fields


@dataclass(frozen=True)
class RopeConfig:
    """Plain rotary embeddings with base `theta`, and what all types have in common."""

    theta: float
    rope_type: ClassVar[str] = "default"
    # Whether sequences longer than the trained length are what this type is for.
    grows: ClassVar[bool] = False

    @property
    def attention_scaling(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    @property
    def score_factor(self) -> float:
        """What scores of latent attention are multiplied by, besides."""
        return 1.0

    def inverse_frequencies(self, head_dim: int, trained_length: int, max_length: int) -> Tensor:
        """[head_dim / 2] float32, radians per position.

        trained_length: the checkpoint's max_position_embeddings. max_length: the longest sequence of this instance.
        """
        return 1.0 / powers(self.theta, head_dim)

    def longest(self, trained_length: int) -> int:
        """Tokens of the longest sequence that the positions are made for; trained_length: max_position_embeddings."""
        return trained_length

    def to_dict(self) -> dict[str, Any]:
        """The parameters under the checkpoint's names, without theta."""
        values = {key: value for key, value in dataclasses.asdict(self).items() if key != "theta" and value is not None}
        lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
        return {"rope_type": self.rope_type, **values, **lists}


@dataclass(frozen=True)
class LinearRope(RopeConfig):
    """Position interpolation (Chen et al. 2023): positions divided by `factor`."""

    factor: float
    rope_type: ClassVar[str] = "linear"

    def longest(self, trained_length: int) -> int:
        """With this type max_position_embeddings stays what it was before the positions were divided."""
        return max(trained_length, int(self.factor * trained_length))

    def inverse_frequencies(self, head_dim: int, trained_length: int, max_length: int) -> Tensor:
        return 1.0 / powers(self.theta, head_dim) / self.factor


@dataclass(frozen=True)
class DynamicRope(RopeConfig):
    """NTK-aware scaling: the base grows once sequences are longer than the trained length.

    transformers recomputes the frequencies from the longest sequence seen so far, so the same token gets other keys
    depending on what came before. Here they are those of `max_length` from the start: the results of a model instance
    do not depend on chunking or on cached prefixes, and equal those of transformers for sequences of `max_length`
    (and for all, when `max_length` is at most the trained length).
    """

    factor: float
    rope_type: ClassVar[str] = "dynamic"
    grows: ClassVar[bool] = True

    def inverse_frequencies(self, head_dim: int, trained_length: int, max_length: int) -> Tensor:
        growth = self.factor * max(max_length, trained_length) / trained_length - (self.factor - 1)
        return 1.0 / powers(self.theta * growth ** (head_dim / (head_dim - 2)), head_dim)


@dataclass(frozen=True)
class Llama3Rope(RopeConfig):
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: ClassVar[str] = "llama3"

    def inverse_frequencies(self, head_dim: int, trained_length: int, max_length: int) -> Tensor:
        plain = 1.0 / powers(self.theta, head_dim)
        wavelengths = 2 * math.pi / plain
        longest = self.original_max_position_embeddings / self.low_freq_factor
        shortest = self.original_max_position_embeddings / self.high_freq_factor
        rotations = self.original_max_position_embeddings / wavelengths
        smooth = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - smooth) * plain / self.factor + smooth * plain
        scaled = torch.where(wavelengths > longest, plain / self.factor, between)
        return torch.where(wavelengths < shortest, plain, scaled)


@dataclass(frozen=True)
class YarnRope(RopeConfig):
    """YaRN (Peng et al. 2023): a ramp over the dimensions from extrapolation to interpolation, and warmer attention."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    rope_type: ClassVar[str] = "yarn"

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def score_factor(self) -> float:
        """DeepSeek-V2 warms whole scores, not rotated dimensions alone: `mscale_all_dim` squared."""
        return self._temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def longest(self, trained_length: int) -> int:
        """Qwen's recipe leaves max_position_embeddings as it was, others raise it to the new length."""
        return max(trained_length, int(self.factor * self.original_max_position_embeddings))

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def inverse_frequencies(self, head_dim: int, trained_length: int, max_length: int) -> Tensor:
        wavelengths = powers(self.theta, head_dim)
        low, high = self._dimension(head_dim, self.beta_fast), self._dimension(head_dim, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((index - low) / (high - low)).clamp(0, 1)
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def _dimension(self, head_dim: int, rotations: float) -> float:
        """The dimension that makes this many rotations over the original length."""
        turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class LongRope(RopeConfig):
    """LongRoPE (Ding et al. 2024): each wavelength times a number of its own, others beyond the original length.

    transformers takes `long_factor` for a sequence as soon as it is longer than the original length, and so gives its
    first tokens other keys than before. Here the factors are those of `max_length` from the start (as in vLLM): the
    results of a model instance do not depend on chunking or on cached prefixes.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    # How many times the original length sequences may have, and what cosines and sines are multiplied by.
    factor: float
    attention_factor: float | None = None
    rope_type: ClassVar[str] = "longrope"

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def inverse_frequencies(self, head_dim: int, trained_length: int, max_length: int) -> Tensor:
        is_long = max_length > self.original_max_position_embeddings
        factors = torch.tensor(self.long_factor if is_long else self.short_factor, dtype=torch.float32, device="cpu")
        return 1.0 / (factors * powers(self.theta, head_dim))


def powers(base: float, head_dim: int) -> Tensor:
    """base ** (2 i / head_dim), [head_dim / 2] float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return torch.pow(base, exponents)


def _read_llama3(fields: Fields, theta: float, trained_length: int) -> RopeConfig:
    rope = Llama3Rope(
        theta,
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.count("original_max_position_embeddings", trained_length),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        accepted = f"a number greater than low_freq_factor = {rope.low_freq_factor}"
        raise fields.wrong("high_freq_factor", rope.high_freq_factor, accepted)
    return rope


def _read_yarn(fields: Fields, theta: float, trained_length: int) -> RopeConfig:
    original = fields.count("original_max_position_embeddings", trained_length)
    return YarnRope(
        theta,
        factor=fields.number("factor", trained_length / original),
        original_max_position_embeddings=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
        mscale=fields.optional(fields.number, "mscale", positive=False) or None,
        mscale_all_dim=fields.optional(fields.number, "mscale_all_dim", positive=False) or None,
        attention_factor=fields.optional(fields.number, "attention_factor", positive=False),
    )


def _read_long(fields: Fields, theta: float, trained_length: int) -> RopeConfig:
    original = fields.count("original_max_position_embeddings", trained_length)
    factor, attention_factor = (
        fields.number("factor", trained_length / original),
        fields.optional(fields.number, "attention_factor", positive=False),
    )
    if attention_factor is None and original == 1:
        raise fields.wrong("original_max_position_embeddings", original, "at least 2 without attention_factor")
    short, long = _read_factors(fields, "short_factor"), _read_factors(fields, "long_factor")
    return LongRope(theta, short, long, original, factor, attention_factor)


def _read_factors(fields: Fields, key: str) -> tuple[float, ...]:
    values = fields.take(key)
    numeric = isinstance(values, list) and all(type(one) in (int, float) and 0 < one < math.inf for one in values)
    if not numeric:
        raise fields.wrong(key, values, "a list of numbers greater than 0")
    return tuple(float(one) for one in values)


_READERS: dict[str, Callable[[Fields, float, int], RopeConfig]] = {
    "default": lambda fields, theta, trained_length: RopeConfig(theta),
    "linear": lambda fields, theta, _: LinearRope(theta, fields.number("factor")),
    "dynamic": lambda fields, theta, _: DynamicRope(theta, fields.number("factor")),
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_long,
    "su": _read_long,  # what early checkpoints of Phi-3 call it
}


def read_rope(fields: Fields, theta: float, trained_length: int) -> RopeConfig:
    """The rotary embedding that the object `rope_scaling` or `rope_parameters` describes.

    theta: the base when the object has no `rope_theta`. trained_length: max_position_embeddings, which stands for the
    original length where that is absent. Raises ValueError for an unknown type, parameter or value.
    """
    legacy = fields.choice("type", (*_READERS, None), None)
    rope_type = fields.choice("rope_type", _READERS, legacy or "default")
    if legacy is not None and _READERS[legacy] is not _READERS[rope_type]:
        raise fields.wrong("type", legacy, f"{rope_type!r} beside a rope_type of that name")
    theta = fields.number("rope_theta", theta)
    if theta <= 1:
        raise fields.wrong("rope_theta", theta, "a number greater than 1")
    rope = _READERS[rope_type](fields, theta, trained_length)
    fields.finish()
    return rope


def rope_table(rope: RopeConfig, head_dim: int, trained_length: int, max_length: int) -> Tensor:
    """[max_length, head_dim] float32 on the CPU: cosines, then sines, of every position, attention factor included."""
    frequencies = rope.inverse_frequencies(head_dim, trained_length, max_length)
    angles = torch.arange(max_length, dtype=torch.float32, device="cpu")[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_scaling


class Rotary(nn.Module):
    """Holds the table of cosines and sines, [max_length, head_dim] float32, not part of the checkpoint.

    The table keeps its values and float32 whatever the module is moved or cast to, and fills itself when a module
    built on the meta device is given memory: it is always computed on the CPU, so that every device has the same bits.
    """

    table: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, trained_length: int, max_length: int) -> None:
        super().__init__()
        self._arguments = (rope, head_dim, trained_length, max_length)
        self.register_buffer("table", self._on(torch.get_default_device()), persistent=False)

    def _on(self, device: torch.device) -> Tensor:
        rope, head_dim, trained_length, max_length = self._arguments
        if device.type == "meta":
            return torch.empty(max_length, head_dim, dtype=torch.float32, device=device)
        return rope_table(rope, head_dim, trained_length, max_length).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table = self._on(self.table.device)
        return self
