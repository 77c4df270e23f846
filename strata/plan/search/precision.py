"""Precisions of weights and of keys and values beside the checkpoint's: what steps would take in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from strata.cost.nodes import NodeCost
from strata.engine.engine_config import KV_DTYPES, EngineConfig
from strata.engine.startup.packing import Packing
from strata.hardware.roofline import Cost
from strata.kernels.quant.quantized import Scheme, pack
from strata.kernels.quant.schemes import scheme_of
from strata.models.config import ModelConfig
from strata.models.families import build

# Of a weight whose groups all are whole.
_ROWS, _COLUMNS = 128, 4096


@dataclass(frozen=True)
class Precision:
    """quantization, kv_cache_dtype: as `EngineConfig` has them. stored: how a checkpoint that is packed already has its
    products. Raises ValueError for a name that `EngineConfig` does not know."""

    quantization: str | None = EngineConfig.quantization
    kv_cache_dtype: str = EngineConfig.kv_cache_dtype
    stored: Scheme | None = None

    def __post_init__(self) -> None:
        EngineConfig("", quantization=self.quantization, kv_cache_dtype=self.kv_cache_dtype)

    @property
    def name(self) -> str:
        """Such as "fp8 weights, fp8 KV"."""
        parts = [] if self.quantization is None else [f"{self.quantization} weights"]
        parts += [] if self.kv_cache_dtype == "auto" else [f"{self.kv_cache_dtype} KV"]
        return ", ".join(parts) or "as the checkpoint"

    @property
    def short(self) -> str:
        """Such as "fp8, fp8 KV"."""
        return self.name.replace(" weights", "")

    @property
    def options(self) -> dict[str, str]:
        """Of `EngineConfig`, without those that are as by default."""
        given = {} if self.quantization is None else {"quantization": self.quantization}
        return given if self.kv_cache_dtype == "auto" else {**given, "kv_cache_dtype": self.kv_cache_dtype}

    @property
    def words(self) -> list[str]:
        """The options of a command."""
        return [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", value)]

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Of pages."""
        return KV_DTYPES[self.kv_cache_dtype]

    @property
    def scheme(self) -> Scheme | None:
        """Of packed weights."""
        return self.stored if self.quantization is None else scheme_of(self.quantization)

    def cost(self, node: NodeCost, itemsize: int) -> Cost:
        """Of a node of floats of so many bytes, with its weights packed; as it is if it reads none of a layer."""
        cost = node.cost
        if self.scheme is None or not _is_layer_product(node):
            return cost
        saved = int(cost.weights * (1 - self.weight_bytes / itemsize))
        return replace(cost, read=cost.read - saved, weights=cost.weights - saved)

    @cached_property
    def weight_bytes(self) -> float:
        """Of an element of a packed weight, scales among them; only where weights are packed."""
        assert self.scheme is not None
        with torch.device("meta"):
            packed = pack(torch.empty(_ROWS, _COLUMNS), self.scheme)
        return packed.nbytes / packed.numel()


def stored_scheme(config: ModelConfig, folder: Path) -> Scheme | None:
    """How the checkpoint in a folder has most products of layers packed; None if it has none. Raises ValueError for
    one that the engine does not read."""
    with torch.device("meta"):
        model = build(config)
    schemes = Packing.of(None, model, folder=folder).schemes
    counts = Counter(scheme for name, scheme in schemes.items() if ".layers." in name)
    return max(counts, key=counts.__getitem__, default=None)


AS_CHECKPOINT = Precision()
# What is looked at beside the checkpoint's.
IN_FEWER_BITS = (Precision("fp8"), Precision("fp8", "fp8"), Precision("int4"))


def _is_layer_product(node: NodeCost) -> bool:
    """Whether a node multiplies by weights of a layer that are packed: head and routers are not, nor what attends and
    norms, which read weights of their own."""
    is_product = node.layer is not None and (node.weight is not None or node.is_mixture)
    return is_product and not any(name.endswith((".gate.weight", ".router.weight")) for name in node.parameters)
