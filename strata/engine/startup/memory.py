"""How the memory of a rank's device is divided: what the rank has of the model, the sizes that follow, and the ledger.

The start of an engine counts so on the device that is here, a simulation on one that need not be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.ledger import DeviceMemory, Ledger, PoolTooSmall, plan_memory
from strata.engine.ranks.prefill_context_parallel import CONTEXT_AXIS, TokenSharding
from strata.engine.ranks.rank import share_of
from strata.engine.startup.sparse_attention import choice_bytes
from strata.graph.passes import passes_of
from strata.graph.ranks.overlap import SLOTS
from strata.graph.ranks.row_split import max_rows
from strata.hardware.figures import Device
from strata.kernels.attention import batch_invariant as attention_fixed
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.prompt_keys import prompt_keys_bytes
from strata.kernels.device_limits import DeviceLimits, implementations_for
from strata.kernels.latent import cuda as latent_cuda
from strata.kernels.recurrent import delta_chunks_cuda
from strata.models.config import ModelConfig
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig
from strata.parallel.serving_shard import RankShard

# What a process holds of a device before anything is allocated, estimated.
CONTEXT_BYTES = 1 << 29
# Copies of what a rank has found, in float32, that are alive at once while ranks join it: as it was computed, packed
# for the others, and what has arrived.
_COPIES = 3
# What NCCL takes for the channels between the ranks of one host, estimated.
_MESSAGE_BYTES = 1 << 30


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs. limits: of a CUDA device that runs the own kernels, which need not be here; None: of no such
    device. index: of the rank. memory: of a device that need not be here; None: of `device` as it is now."""

    device: torch.device
    limits: DeviceLimits | None
    index: int = 0
    memory: DeviceMemory | None = None


def listed_memory(device: Device) -> DeviceMemory:
    """Of a device of that kind that nobody else uses."""
    total = int(device.ceiling("memory").value)
    return DeviceMemory(device.product, total - CONTEXT_BYTES, total)


@dataclass(frozen=True)
class RankSetup:
    """What a rank has of a model. shard: None if it has all of it. config: its own, from which `sizes` follow."""

    shard: RankShard | None
    config: ModelConfig
    sizes: EngineSizes


def rank_setup(asked: EngineConfig, config: ModelConfig, place: RankPlace) -> RankSetup:
    """config: of the whole model. Raises ValueError for whatever cannot be honoured."""
    divides = max(asked.tensor_parallel_size, asked.pipeline_parallel_size) > 1
    shard = share_of(asked, config, place.index) if divides else None
    own = config if shard is None else shard.config
    sizes = EngineSizes.of(asked, own, place.device, place.limits, shard)
    kind = implementations_for(place.limits or place.device)
    sizes.packing.check_kernels(kind, deterministic=asked.deterministic)
    return RankSetup(shard, own, sizes)


def rank_memory(asked: EngineConfig, config: ModelConfig, place: RankPlace, part: RankSetup) -> Ledger:
    """How the memory of a rank's device is divided. config: of the whole model, of which the rank has `part`.

    Raises ValueError if it does not suffice; where the weights or the pages lack room, with options that have it.
    """

    def planned(other: EngineConfig) -> Ledger:
        return rank_ledger(other, config, place, rank_setup(other, config, place))

    try:
        return rank_ledger(asked, config, place, part)
    except PoolTooSmall as error:
        raise error.with_options(memory_advice(asked, planned)) from None


def rank_ledger(asked: EngineConfig, config: ModelConfig, place: RankPlace, part: RankSetup) -> Ledger:
    """The same, which knows no other options."""
    # A draw with filters gathers its rows of logits, of the whole vocabulary, on every rank.
    whole = replace(part.config, vocab_size=config.vocab_size)
    return planned_memory(asked, whole, part.sizes, place.device, place.memory)


def planned_memory(
    asked: EngineConfig,
    config: ModelConfig,
    sizes: EngineSizes,
    device: torch.device,
    memory: DeviceMemory | None = None,
) -> Ledger:
    """How the memory of a device is divided. config: of a rank, with the whole vocabulary. memory: of a device that
    need not be here. Raises ValueError if it does not suffice."""
    rows = {(size.sequences, size.tokens > size.sequences) for size in sizes.captured}
    overlapped = SLOTS * overlapped_bytes(asked, config, sizes)
    return plan_memory(
        config,
        sizes,
        device,
        # Products behind norms stand once more where they take up the norms' weights: no more than all.
        weight_bytes=sizes.weight_bytes * (2 if "fold_norm_weights" in passes_of(asked.passes) else 1),
        utilization=asked.gpu_memory_utilization,
        num_pages=asked.num_pages,
        scratch=max((_scratch_bytes(asked, config, sizes, *one) for one in rows), default=0)
        + (sizes.packing.largest_in_floats(sizes.pool.dtype) if device.type == "cuda" else 0)
        + (recurrent_bytes(asked, config, sizes.max_tokens, sizes.pool.dtype) if device.type == "cuda" else 0)
        + prompt_keys_bytes(sizes.prompt_keys, sizes.pool.kv_heads * sizes.pool.head_dim, sizes.pool.dtype.itemsize)
        + choice_bytes(asked, config, sizes.max_tokens, sizes.max_length)
        + _joining_bytes(asked, config, sizes.max_tokens),
        sharing=asked.ranks,
        messages=_message_bytes(asked, sizes, device, overlapped),
        sources=asked.tensor_parallel_size if asked.enable_dp_attention else 1,
        memory=memory,
        takes_snapshots=asked.enable_prefix_caching,
    )


def overlapped_bytes(asked: EngineConfig, config: ModelConfig, sizes: EngineSizes) -> int:
    """Of the largest message that travels by copy engines beside products; 0 if none is to."""
    none_travel = asked.overlapped_from == 0 or asked.deterministic or asked.enable_dp_attention
    if none_travel or asked.tensor_parallel_size != 2:
        return 0
    return max_rows(sizes.max_tokens) * config.hidden_size * sizes.pool.dtype.itemsize


def _joining_bytes(asked: EngineConfig, config: ModelConfig, tokens: int) -> int:
    """What ranks that divide keys need to join what they find in a step of so many tokens. config: of a rank."""
    ranks = asked.decode_context_parallel_size
    width = config.head_dim if config.latent is None else config.latent.rank
    return 0 if ranks == 1 else _COPIES * 4 * tokens * ranks * config.num_heads * (width + 1)


def _message_bytes(asked: EngineConfig, sizes: EngineSizes, device: torch.device, overlapped: int) -> int:
    """What messages between ranks need: those of NCCL, the keys and values of a layer where ranks gather them, and
    `overlapped` for those that travel beside products."""
    found = _MESSAGE_BYTES + overlapped if asked.ranks > 1 and device.type == "cuda" else 0
    if 1 < asked.decode_context_parallel_size < asked.tensor_parallel_size:
        found *= 2  # some of the ranks have a group of their own
    if asked.all_reduce_group_size > 1:
        found *= 3  # neighbours have one, and those that are at one place among theirs
    parts = asked.axis_sizes[CONTEXT_AXIS]
    if parts > 1:
        rows = TokenSharding.on(device.type, parts, 0).largest(sizes.max_tokens, asked.max_sequences).tokens
        token = sizes.pool.page_bytes // sizes.pool.page_size // sizes.pool.layers
        found += (1 + parts) * rows * token
    return found


def _scratch_bytes(asked: EngineConfig, config: ModelConfig, sizes: EngineSizes, rows: int, some: bool) -> int:
    """What attention needs beside its result in a step of so many decodes, or, with `some`, of up to so many beside
    prompts."""
    pool, ranks = sizes.pool, sizes.pool.kept.ranks
    keys = -(-sizes.max_length // pool.page_tokens) * pool.page_size
    if config.latent is not None:
        if asked.deterministic:  # no sequence is divided
            return 0
        return latent_cuda.scratch_bytes(rows, keys, config.num_heads * ranks, config.latent.rank, pool.dtype)
    if asked.deterministic:
        return attention_fixed.scratch_bytes(rows, keys, config.num_heads, config.head_dim)
    heads = config.num_heads * ranks, config.num_kv_heads, config.head_dim
    kind = {"rounded": pool.quantized is not None, "some": some}
    return decode_attention_cuda.scratch_bytes(rows, keys, *heads, pool.dtype, **kind)


def recurrent_bytes(asked: EngineConfig, config: ModelConfig, max_tokens: int, dtype: torch.dtype) -> int:
    """On a GPU, in the largest step, whose padding may be one more sequence. config: of a rank. In deterministic mode a
    state goes from token to token."""
    delta = config.recurrence
    if asked.deterministic or not isinstance(delta, GatedDeltaConfig):
        return 0
    heads = delta.heads, delta.key_dim, delta.value_dim
    return delta_chunks_cuda.scratch_bytes(max_tokens, asked.max_sequences + 1, *heads, dtype)


_RANKS = (2, 4, 8)


def memory_advice(asked: EngineConfig, plan: Callable[[EngineConfig], object]) -> list[str]:
    """The fewest ranks that have room, and weights in 8 bits if they have: each alone, as `LLM` takes them.

    plan: divides the memory for other options; raises ValueError where it does not suffice, or they cannot be.
    """

    def has_space(**other: Any) -> bool:
        try:
            plan(replace(asked, **other))
        except ValueError:
            return False
        return True

    more = (size for size in _RANKS if size > asked.tensor_parallel_size)
    ranks = next((size for size in more if has_space(tensor_parallel_size=size)), None)
    found = [] if ranks is None else [f"tensor_parallel_size={ranks}"]
    if asked.quantization is None and asked.sparsity is None and has_space(quantization="fp8"):
        found.append("quantization='fp8'")
    return found
