"""What an engine of a plan holds on each device: the engine's own ledger, of a device that need not be here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from strata.engine.engine_config import MAX_NUM_SEQS, EngineConfig, EngineSizes, groups_of
from strata.engine.ledger import bytes_beside_snapshots, numbered_pages, snapshot_rows
from strata.engine.ranks.rank import share_of
from strata.engine.startup.memory import CONTEXT_BYTES, listed_memory, planned_memory
from strata.engine.startup.packing import Packing
from strata.kernels.device_limits import DeviceLimits, why_not
from strata.kernels.quant.quantized import QuantizedWeight
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.parallel.serving_shard import PIPELINE_AXIS, TENSOR_AXIS
from strata.parallel.stages import layer_spans
from strata.plan.search.layer_prices import representatives, shard_of
from strata.plan.search.layout import ServingLayout
from strata.plan.search.machine import Machine
from strata.plan.search.precision import AS_CHECKPOINT, Precision
from strata.plan.search.traffic import Traffic

# By how many standard deviations more tokens are kept room for than the mean of a load needs.
_DEVIATIONS = 2.0
_DEVICE = torch.device("cuda")
_BUDGET = 8192
# Where the names of their parameters begin.
_LAYERS = "model.layers."


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank of an engine that needs the most. windows: the pools of layers with windows, beside
    pages of all tokens. tokens: that the latter have room for, of each rank where ranks have sequences of their own.
    sequences: that run at once. state_bytes: of the fixed states of one; snapshots of them share the room of pages.
    numbered: pages where no layer keeps any.
    """

    total: int
    budget: int
    weights: int
    workspace: int
    windows: int
    tokens: int
    page_bytes: int
    page_size: int
    sequences: int = 0
    state_bytes: int = 0
    numbered: int = 0

    @property
    def token_bytes(self) -> float:
        """Of keys and values of a token."""
        return self.page_bytes / self.page_size

    @property
    def states(self) -> int:
        """Of the sequences that run, and of padding."""
        return (self.sequences + 1) * self.state_bytes

    @property
    def kv(self) -> int:
        """With snapshots."""
        return max(0, self.budget - self.weights - self.workspace - self.states)

    @property
    def snapshots(self) -> int:
        """How many are kept for prefixes."""
        return snapshot_rows(self.kv, self.sequences, self.state_bytes) if self.state_bytes else 0

    @property
    def margin(self) -> int:
        """What is left to others and lost between blocks."""
        return self.total - self.budget

    def lacking(self, tokens: int) -> int:
        """Bytes that are missing for so many tokens; 0 if there are enough."""
        pages = math.ceil(tokens / self.page_size) * self.page_bytes
        if self.state_bytes:
            pages = bytes_beside_snapshots(pages, self.sequences, self.state_bytes)
        return max(0, self.weights + self.workspace + self.states + self.windows + pages - self.budget)

    @property
    def max_pages(self) -> int:
        """Pages of all tokens."""
        if not self.page_bytes:
            return self.numbered
        return max(0, self.kv - self.windows - self.snapshots * self.state_bytes) // self.page_bytes


class Memory:
    """Asks the engine's ledger for layouts of a model. Weights and captured sizes are found once for a layout."""

    def __init__(self, config: ModelConfig, machine: Machine, traffic: Traffic, model: str) -> None:
        self._config, self._machine, self._model = config, machine, model
        self._length = traffic.longest
        limits = DeviceLimits.listed(machine.listed) if machine.runs else None
        self._limits = None if limits is None or why_not(limits) is not None else limits
        self._memory = listed_memory(machine.listed)
        self._found: dict[tuple[ServingLayout, int, int, Precision], RankMemory] = {}
        self._ranks, self._fullest = cache(self._of_rank), cache(self._of_fullest)
        self._layers = cache(self._packed_layers)

    def engine_config(
        self, layout: ServingLayout, sequences: int, budget: int, precision: Precision = AS_CHECKPOINT
    ) -> EngineConfig:
        """The options of such an engine. Raises ValueError for what Strata's engine does not do."""
        options: dict[str, Any] = {**layout.options, **precision.options}
        return EngineConfig(
            self._model,
            max_model_len=self._length,
            max_num_seqs=sequences,
            max_num_batched_tokens=budget,
            **options,
        )

    def rank_memory(self, layout: ServingLayout, sequences: int, budget: int, precision: Precision) -> RankMemory:
        """sequences: of a rank where ranks have their own. Raises ValueError as `asked`."""
        key = layout, sequences, budget, precision
        if key not in self._found:
            asked = self.engine_config(layout, sequences, budget, precision)
            every = [self._held(asked, *self._ranks(layout, rank, precision)) for rank in self._fullest(layout)]
            found = max(every, key=lambda one: (one.lacking(self._length), -one.max_pages))
            self._found[key] = replace(found, tokens=found.max_pages * found.page_size)
        return self._found[key]

    def _of_fullest(self, layout: ServingLayout) -> list[int]:
        """Ranks of which one needs the most: with the embedding, with the most layers, with the head."""
        if layout.stages == 1:
            return sorted({0, layout.ranks - 1})
        layers = [end - first for first, end in self._spans(layout)]
        return sorted({0, layers.index(max(layers)) * layout.tensor, layout.ranks - 1})

    def _spans(self, layout: ServingLayout) -> list[tuple[int, int]]:
        return layer_spans(self._whole, layout.stages, 0)

    @cached_property
    def _whole(self) -> CausalLM:
        with torch.device("meta"):
            return build(self._config)

    def _of_rank(
        self, layout: ServingLayout, rank: int, precision: Precision = AS_CHECKPOINT
    ) -> tuple[ModelConfig, EngineSizes]:
        """The config of a rank, with the whole vocabulary, and the sizes of an engine with default options. Raises
        ValueError for a precision that the engine refuses."""
        asked = self.engine_config(layout, MAX_NUM_SEQS, _BUDGET, precision)
        if precision.options:
            config, sizes = self._ranks(layout, rank)
            pool = replace(sizes.pool, quantized=precision.kv_dtype)
            sizes = replace(sizes, pool=pool, groups=groups_of(asked, config, pool, sizes.max_length))
            return config, self._packed(sizes, layout, asked.places(rank), precision.quantization)
        shard = share_of(asked, self._config, rank) if max(layout.tensor, layout.stages) > 1 else None
        own = self._config if shard is None else shard.config
        sizes = EngineSizes.of(asked, own, _DEVICE, self._limits, shard)
        return replace(own, vocab_size=self._config.vocab_size), sizes

    def _packed(
        self, sizes: EngineSizes, layout: ServingLayout, places: Mapping[str, int], quantization: str | None
    ) -> EngineSizes:
        """With the weights of a rank in those places packed: layers of one kind are packed alike."""
        if quantization is None:
            return sizes
        if sizes.packing.schemes:
            raise ValueError(f"the weights of {self._model} are packed already ({sizes.packing.name})")
        by_kind = self._layers(replace(layout, stages=1), places[TENSOR_AXIS], quantization)
        first, end = self._spans(layout)[places[PIPELINE_AXIS]]
        kinds = enumerate(self._config.layer_kinds[first:end], first)
        planned = {f"{layer}.{name}": weight for layer, kind in kinds for name, weight in by_kind[kind].items()}
        floats = sum(weight.numel() for weight in planned.values()) * sizes.pool.dtype.itemsize
        nbytes = sizes.weight_bytes - floats + sum(weight.nbytes for weight in planned.values())
        return replace(sizes, packing=Packing({}, planned, name=quantization), weight_bytes=nbytes)

    def _packed_layers(
        self, layout: ServingLayout, place: int, quantization: str
    ) -> dict[Any, dict[str, QuantizedWeight]]:
        """By kinds of layers, from a model of one of each."""
        kinds = self._config.layer_kinds
        chosen = representatives(kinds)
        few = self._config.with_layers(chosen)
        shard = shard_of(few, layout, place)
        with torch.device("meta"):
            model = build(few) if shard is None else shard.build()
        packing = Packing.of(quantization, model, shard)
        if self._limits is not None:
            packing.check_kernels("cuda", deterministic=False)
        found: dict[Any, dict[str, QuantizedWeight]] = {kinds[layer]: {} for layer in chosen}
        for name, weight in packing.planned.items():
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            found[kinds[chosen[int(number)]]][rest] = weight
        return found

    def _held(self, asked: EngineConfig, config: ModelConfig, sizes: EngineSizes) -> RankMemory:
        budget = asked.max_num_batched_tokens or _BUDGET
        sizes = replace(sizes, max_tokens=budget, max_sequences=asked.max_sequences)
        # With one page, of a device with room for anything: what is missing on the real one is counted from the parts.
        ample = self._memory._replace(free=1 << 60, total=1 << 60)
        ledger = planned_memory(replace(asked, num_pages=1), config, sizes, _DEVICE, ample)
        workspace = ledger.activations + ledger.sequences + ledger.graphs + ledger.messages
        usable = int(self._memory.total * asked.gpu_memory_utilization) - CONTEXT_BYTES
        windows = 0
        for group in sizes.groups[1:]:
            pages = group.max_useful(asked.max_sequences, budget, self._length)
            windows += (pages or 0) * group.shape.page_bytes
        return RankMemory(
            self._memory.total,
            usable,
            ledger.weights,
            workspace,
            windows,
            0,
            ledger.page_bytes,
            ledger.page_size,
            asked.max_sequences,
            ledger.state_bytes,
            numbered_pages(asked.max_sequences, -(-self._length // ledger.page_size)),
        )


def needed_tokens(traffic: Traffic, sequences: int, page_size: int) -> float:
    """Tokens of KV pages that so many sequences under way hold, all at different places of their answers: their mean
    and some deviations more, no more than all could; a cached prefix once."""
    own = traffic.context - traffic.cached + page_size / 2
    spread = _DEVIATIONS * traffic.output * math.sqrt(sequences / 12)
    most = sequences * (traffic.longest - traffic.cached + page_size)
    return traffic.cached + min(sequences * own + spread, most)
