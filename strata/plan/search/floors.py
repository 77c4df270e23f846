"""The least that a step takes on any layout, from a model's sizes alone: known before anything is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from strata.kernels.quant.packed import multiplied_in
from strata.models.config import ModelConfig
from strata.plan.search.layout import ServingLayout
from strata.plan.search.machine import Machine
from strata.plan.search.precision import Precision
from strata.plan.search.traffic import Objectives
from strata.train.predict.flops import active_elements


@dataclass(frozen=True)
class Matrices:
    """Elements that a token is multiplied by: of attention, of what is around it in all layers, of the head. latent:
    what is multiplied to attend over latents follows from the step."""

    attention: int
    around: int
    head: int
    latent: bool

    @staticmethod
    def of(config: ModelConfig) -> Matrices:
        whole, attention = (
            sum(active_elements(config, layer, mlps=mlps) for layer in range(config.num_layers))
            for mlps in (True, False)
        )
        around = whole - attention
        return Matrices(attention, around, config.vocab_size * config.hidden_size, config.latent is not None)


def min_step(
    matrices: Matrices, dtype: torch.dtype, machine: Machine, layout: ServingLayout, precision: Precision, tokens: int
) -> float:
    """Seconds below which no step of so many tokens of a sequence is: a rank's part of the products that these need,
    and of the matrices that one of them needs. Attention, messages and other sequences come on top."""
    scheme, predictor = precision.scheme, machine.predictor
    each = dtype.itemsize if scheme is None else min(precision.weight_bytes, dtype.itemsize)
    rate = predictor.rate("" if scheme is None else multiplied_in(scheme))
    around, head = matrices.around / layout.tensor, matrices.head / layout.tensor
    # Ranks with sequences of their own have attention whole.
    layers = around + matrices.attention / (1 if layout.own_tokens else layout.tensor)
    rows = max(1, tokens // layout.context)
    multiplied = around if matrices.latent else layers
    compute = 2 * multiplied * rows / rate + 2 * head / predictor.rate()
    memory = (layers * each + head * dtype.itemsize) / predictor.device.ceiling("bandwidth").value
    return max(compute, memory)


def below_floors(objectives: Objectives, floors: Mapping[str, tuple[float, Precision]], where: str) -> str | None:
    """Which objectives nothing can meet, and what could, in words; None if none is below its floor. floors: seconds
    and the precision that they are of, by the names of `Objectives`."""
    wanted = {"ttft": objectives.ttft, "tpot": objectives.tpot}
    below = [
        (name, asked, *floors[name]) for name, asked in wanted.items() if asked is not None and asked < floors[name][0]
    ]
    if not below:
        return None
    asked = " and ".join(f"--{name} {value * 1e3:g}" for name, value, *_ in below)
    least = " and ".join(f"{floor * 1e3:.3g} ms ({precision.name})" for *_, floor, precision in below)
    are, floor = ("are", "floors") if len(below) > 1 else ("is", "floor")
    return (
        f"{asked} {are} below the {floor} of {where}, {least}: the devices read weights, compute and send no "
        "faster; ask for more than that"
    )
