"""What an engine is asked for, and the sizes that follow from it and a model's config before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from strata.cache.block_tables import table_pages
from strata.cache.groups import PageGroup, page_groups
from strata.cache.pool import PoolShape
from strata.cache.state_pool import StateShape
from strata.engine.args.options import check_types, known_options
from strata.engine.compatibility import (
    check_compatible,
    check_dcp,
    check_experts,
    check_messages,
    check_states,
    keeps_all,
)
from strata.engine.program.sizes import LIBRARY_TOKENS, StepSizes, captured_sizes
from strata.engine.ranks.prefill_context_parallel import CONTEXT_AXIS, TokenSharding
from strata.engine.sampling_params import RANGES, check_integer
from strata.engine.scheduling.prompt_budget import SERVER_TTFT_MS
from strata.engine.startup.packing import NOTHING_PACKED, Packing
from strata.engine.startup.sparse_attention import SPARSE_SIZES, check_sparse_attention
from strata.graph.passes import passes_of
from strata.kernels.attention.cudnn_prompts import keeps_neighbours_apart, why_no_plan
from strata.kernels.attention.query_chunks import gathered_keys
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.quant.schemes import scheme_of, sparsity_of
from strata.kernels.state.dcp_shard import ALL_KEYS
from strata.models import weights
from strata.models.config import DTYPES, ModelConfig
from strata.models.families import FAMILIES, build
from strata.models.folder import located
from strata.parallel.serving_shard import PIPELINE_AXIS, TENSOR_AXIS, RankShard

# The axes of the ranks' mesh, from the outermost, and the options that give their sizes.
_AXES = {
    PIPELINE_AXIS: "pipeline_parallel_size",
    CONTEXT_AXIS: "prefill_context_parallel_size",
    TENSOR_AXIS: "tensor_parallel_size",
}

# In which 8 bits pages keep keys and values; None: in the weights' dtype.
KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}

# Sequences that run at once where nothing more is known.
MAX_NUM_SEQS = 256


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is asked for; the names and meanings are vLLM's where it has them.

    model: a checkpoint folder, or the name of a shape ("8B", "0.6B") for random weights with load_format="dummy".
    quantization: the scheme by which the weights of products are packed while they are read ("fp8", "int8", "int4" and
        others: see `strata.kernels.quant.schemes`); None: none are.
    sparsity: "2:4" keeps the weights of products, of which the checkpoint must have two zeros in each four columns,
        without these; None: as they are.
    dtype: "auto" (the checkpoint's, see `strata.models.weights.load`), "float32", "bfloat16" or "float16".
    device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
    max_model_len: the most tokens of a sequence, prompt and output; None is the model's own.
    load_format: "auto" reads safetensors, "dummy" makes random weights from config.json alone.
    skip_tokenizer_init: prompts and outputs are ids only.
    enable_prefix_caching: keep and reuse the pages of prompts that begin alike.
    gpu_memory_utilization: share of the GPU's memory that may be in use with the engine, other processes' included, in
        (0, 1].
    max_num_seqs: most sequences that run at once. None: on CUDA as many as find room for some hundred tokens each and
        still make the engine faster, from 256 on (`startup.sequences`); elsewhere 256.
    max_num_batched_tokens: most tokens of one step; longer prompts are prefilled in chunks. None: 8192 on CUDA, with
        stages of a pipeline that share of it, so that all soon have work, but at least 2048; 2048 on a CPU or where the
        own kernels cannot run.
    seed: of the requests that bring none, and of dummy weights; None draws anew in every engine (weights as for 0).
    deterministic: a request's bits depend on nothing else that runs (see docs/engine.md).
    passes: over the graphs of steps: "all", "exact", "none", names that alone run, or names with a minus that do not
        and with a plus that do beside the others (see `strata.graph.passes`).
    kv_cache_dtype: "auto" keeps keys and values in the weights' dtype; "fp8" (e4m3, also "fp8_e4m3") or "int8" keeps
        them in 8 bits, each row with a power of two of its own, so that nothing has to be calibrated.
    sparse_prefill: None, or the share of the pooled softmax that the keys hold to which long prompts attend, in (0, 1]
        (see docs/sparse_attention.md). sparse_prefill_min_keys: of a sequence that is long. sparse_prefill_block: keys
        that are kept or left out together, and queries that do so alike.
    decode_pages: None, or to how many of its pages a sequence attends that decodes (see docs/sparse_attention.md).
    page_size: tokens of a KV page.
    num_pages: KV pages; None takes what memory allows.
    tpot_target_ms: what a step with decodes is to take at most, so that prompts do not stall those who read along; None
        fills steps up to max_num_batched_tokens, which ends a batch sooner. It needs a device whose peaks are known.
    ttft_target_ms: in what time the prompts in line are to be read; longer lines make steps longer than that, until
        max_num_batched_tokens.
    tensor_parallel_size: ranks that divide each matrix among them; each is a process with a GPU of its own, or with its
        share of a CPU's cores.
    prefill_context_parallel_size: ranks that hold the model alike, or by as many ranks each as divide its matrices, and
        divide the tokens of long prompts among them.
    decode_context_parallel_size: how many of the ranks that divide matrices, and would have the same KV heads, keep
        different tokens of them instead, so that keys and values take that share of the memory.
    overlap_tokens: where ranks divide matrices, steps with prompts of so many tokens or more divide their rows in two,
        and the messages of one half travel while the products of the other run; None: between two GPUs that send by
        copy engines, steps of as many as a cost model says that it pays for; 0: none do. Not in deterministic mode.
    message_dtype: "auto" lets what ranks add up travel as it is computed; "fp8" (e4m3, also "fp8_e4m3") rounds it in
        steps of many tokens, there and back, with a power of two for each 128 columns of a row
        (`strata.graph.ranks.quantize_messages`), and lets no messages travel beside products.
    all_reduce_group_size: of ranks that divide matrices, how many neighbours a faster link joins (a pair with a bridge,
        a machine): these add up among them first, and each sends its part alone to other groups; 1: all at once.
    pipeline_parallel_size: stages that divide the layers among them, each of tensor_parallel_size ranks.
    enable_expert_parallel: ranks that divide matrices have different experts of a mixture, each whole, instead of a
        part of every one. One rank has all of them, and is as it would be without, as vLLM's is.
    enable_dp_attention: those ranks have sequences of their own and all else than experts whole: each its own KV pages,
        and max_num_seqs, max_num_batched_tokens and num_pages of its own. Of mixtures, with enable_expert_parallel.
    enable_eplb: experts that are chosen often get copies and move between the ranks while the engine runs.
    num_redundant_experts: of each layer, how many more than there are the ranks have room for, for copies.
    eplb_step_interval: steps after which experts are placed anew.
    executor: "graph" runs the kernels that the registry chooses; "compile", to compare with, those that torch.compile
        makes of the references, but for attention and what else it cannot look into.
    """

    model: str = field(kw_only=False)
    quantization: str | None = None
    sparsity: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    seed: int | None = None
    deterministic: bool = False
    passes: str = "all"
    kv_cache_dtype: str = "auto"
    sparse_prefill: float | None = None
    sparse_prefill_min_keys: int = 16384
    sparse_prefill_block: int = 128
    decode_pages: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    tpot_target_ms: float | None = None
    ttft_target_ms: float = SERVER_TTFT_MS
    tensor_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    overlap_tokens: int | None = None
    message_dtype: str = "auto"
    all_reduce_group_size: int = 1
    enable_expert_parallel: bool = False
    enable_dp_attention: bool = False
    enable_eplb: bool = False
    num_redundant_experts: int = 0
    eplb_step_interval: int = 3000
    executor: str = "graph"

    @classmethod
    def from_options(cls, model: str | Path | None, options: Mapping[str, Any]) -> EngineConfig:
        """`model` None or "builtin" is the built-in model, `org/model` a download in the Hugging Face cache.

        Options of vLLM's that ask for nothing are left out. Raises ValueError for an unknown option, and for a download
        that is not there.
        """
        if not isinstance(model, str | Path | None):
            raise ValueError(f"model must be a folder, org/model of the Hugging Face cache, or None, got {model!r}")
        known = {field.name for field in fields(cls)} - {"model"}
        return cls(located(model), **known_options(options, known))

    def __post_init__(self) -> None:
        may_be_none = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_pages")
        sizes = "page_size", "decode_context_parallel_size", "eplb_step_interval", *_AXES.values()
        for name in (*may_be_none, *sizes, *SPARSE_SIZES):
            value = getattr(self, name)
            if not (_is_whole(value, 1) or (value is None and name in may_be_none)):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.overlap_tokens is not None and not _is_whole(self.overlap_tokens, 0):
            raise ValueError(f"overlap_tokens must be an integer of at least 0, or None, got {self.overlap_tokens!r}")
        if not _is_whole(redundant := self.num_redundant_experts, 0):
            raise ValueError(f"num_redundant_experts must be an integer of at least 0, got {redundant!r}")
        check_types(self)
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype {self.dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_DTYPES:
            raise ValueError(f"kv_cache_dtype {self.kv_cache_dtype!r} is unknown; use {', '.join(KV_DTYPES)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if (target := self.tpot_target_ms) is not None and not 0 < target < math.inf:
            raise ValueError(f"tpot_target_ms must be a number over 0, or None for no target, got {target!r}")
        if not 0 < self.ttft_target_ms < math.inf:
            raise ValueError(f"ttft_target_ms must be a number over 0, got {self.ttft_target_ms!r}")
        if self.seed is not None:
            check_integer("seed", self.seed, RANGES["seed"])
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        passes_of(self.passes)
        if self.executor not in ("graph", "compile"):
            raise ValueError(f"executor {self.executor!r} is unknown; use graph or compile")
        check_experts(self)
        check_sparse_attention(self)
        check_messages(self)
        check_dcp(self)
        self._check_quantization()
        check_compatible(self)

    @property
    def max_sequences(self) -> int:
        """`max_num_seqs` as it takes effect."""
        return MAX_NUM_SEQS if self.max_num_seqs is None else self.max_num_seqs

    @property
    def quantized_messages(self) -> bool:
        """Whether sums over ranks travel in 8 bits."""
        return self.message_dtype != "auto"

    @property
    def overlapped_from(self) -> int | None:
        """`overlap_tokens` as it takes effect."""
        return 0 if self.quantized_messages or self.decode_context_parallel_size > 1 else self.overlap_tokens

    @property
    def axis_sizes(self) -> dict[str, int]:
        """How many ranks there are along each axis of their mesh, from the outermost."""
        return {axis: getattr(self, option) for axis, option in _AXES.items()}

    @property
    def ranks(self) -> int:
        """Processes of the engine; each has a GPU, or its share of a CPU's cores."""
        return math.prod(self.axis_sizes.values())

    def places(self, rank: int) -> dict[str, int]:
        """Where a rank is along each axis."""
        found = {}
        for axis, size in reversed(self.axis_sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    @property
    def redundant_slots(self) -> int | None:
        """See `RankShard.of`."""
        return self.num_redundant_experts if self.enable_eplb else None

    def _check_quantization(self) -> None:
        if self.quantization is not None:
            scheme_of(self.quantization)
            self.check_quantized(f"quantization={self.quantization!r}")
        if self.sparsity is not None:
            sparsity_of(self.sparsity)
            self.check_quantized(f"sparsity={self.sparsity!r}")

    def check_quantized(self, given: str) -> None:
        """Raises ValueError for what packed weights cannot be had with; `given` says that they are packed."""
        if self.enable_eplb:
            raise ValueError(
                f"enable_eplb=True moves experts that are not packed, and {given} packs them; leave out one of them"
            )
        if self.deterministic and self.tensor_parallel_size > 1:
            raise ValueError(
                f"{given} with tensor_parallel_size={self.tensor_parallel_size} and "
                "deterministic=True: products that ranks divide are summed in one order of floats alone; leave out one "
                "of them"
            )

    def resolve_device(self, rank: int = 0) -> torch.device:
        """Of a rank. Raises ValueError if the device asked for is not there, or a GPU is missing for any rank."""
        device = device_of(self.device)
        if self.ranks == 1 or device.type == "cpu":
            return device
        asked = " and ".join(f"{_AXES[axis]}={size}" for axis, size in self.axis_sizes.items() if size > 1)
        if device.index is not None:
            raise ValueError(
                f"device {self.device!r} is one GPU, {asked} needs {self.ranks}: give cuda, and choose among GPUs by "
                "the environment variable CUDA_VISIBLE_DEVICES"
            )
        count = torch.cuda.device_count()
        if self.ranks > count:
            raise ValueError(f"{asked} needs {self.ranks} GPUs, and torch sees {count}: give at most {count} ranks")
        return torch.device("cuda", rank)


def device_of(name: str) -> torch.device:
    """Of "auto", "cpu", "cuda" or "cuda:N". Raises ValueError for another name, and for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cpu" and device.index is not None:
        raise ValueError(f"device {name!r} is not there: processors have no numbers; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class EngineSizes:
    """max_length: tokens of one sequence; max_tokens: of one step. pool: of the KV pages of all layers, were they
    alike, with the weights' dtype. groups: into which the layers are divided that keep rows. states: of the fixed
    states of the others, None if there are none.

    weight_bytes: of the model; of a rank of several, of its share. parameters: of the model; of several ranks, of the
    one with the most experts, and of several stages, the mean of a stage. max_sequences: that run at once. captures:
    steps replay CUDA graphs; attends: cuDNN can attend for prompts in them. packing: which weights of the model, or of
    the share, are packed. division: how ranks divide the tokens of steps, times aside. exchanged: from how many tokens
    on rows go to the ranks of their experts alone, None: never.
    """

    max_length: int
    max_tokens: int
    max_sequences: int
    pool: PoolShape
    groups: tuple[PageGroup, ...]
    weight_bytes: int
    parameters: int
    captures: bool = False
    attends: bool = False
    states: StateShape | None = None
    packing: Packing = NOTHING_PACKED
    division: TokenSharding | None = None
    exchanged: int | None = None

    @property
    def library(self) -> bool:
        """Whether cuDNN attends to keys of pages: it reads those of floats alone."""
        return self.attends and self.pool.quantized is None

    @property
    def prompt_keys(self) -> int:
        """Of the prompts of a step, in whole blocks, for which there is room where cuDNN attends to them."""
        if not self.library or self.max_tokens < LIBRARY_TOKENS:
            return 0
        longest = table_pages(self.max_length, self.pool.page_size) * self.pool.page_size
        return gathered_keys(longest, self.pool.kv_heads * self.pool.head_dim)

    @cached_property
    def captured(self) -> StepSizes:
        """Of steps that get a CUDA graph."""
        if not self.captures:
            return StepSizes()
        pure_prefill = self.attends and keeps_neighbours_apart(self.pool.dtype)  # a step's own rows are floats
        given = self.max_sequences, self.max_tokens, self.parameters
        found = captured_sizes(*given, self.library, pure_prefill, self.division, self.exchanged)
        return StepSizes((replace(size, groups=len(self.groups)) for size in found), self.prompt_keys)

    @staticmethod
    def of(
        asked: EngineConfig,
        config: ModelConfig,
        device: torch.device,
        limits: DeviceLimits | None,
        shard: RankShard | None = None,
    ) -> EngineSizes:
        """limits: of a CUDA device that runs the own kernels, which need not be here; None: of no such device. shard:
        whose `config` it is, where several ranks share a model. Raises ValueError for a length that the model cannot
        have."""
        max_length = _max_length(asked, config)
        filled = max(2048, 8192 // asked.pipeline_parallel_size) if limits is not None else 2048
        max_tokens = asked.max_num_batched_tokens or filled
        dtype = weights.resolve_dtype(asked.dtype, config, device)
        pool = replace(PoolShape.of(config, asked.page_size, dtype), quantized=KV_DTYPES[asked.kv_cache_dtype])
        pool = replace(pool, has_bounds=asked.decode_pages is not None, kept=ALL_KEYS if shard is None else shard.kept)
        with torch.device("meta"):
            whole = build(config if shard is None else shard.max_sharded, max_length)
            # All ranks capture the same sizes: what one sends has the length that others take.
            parameters = weights.weight_bytes(whole, dtype) // dtype.itemsize
            own = whole
            if shard is not None:
                parameters //= shard.stages
                alike = shard.max_sharded == shard.divided
                own = shard.shard_of(whole) if alike else shard.build(max_length)
        folder = Path(asked.model) if asked.load_format == "auto" else None
        packing = Packing.of(asked.quantization, own, shard, folder, asked.sparsity, dtype)
        if packing.schemes:
            asked.check_quantized(f"{asked.model} ({packing.name})")
        weight_bytes = weights.quantized_bytes(own, dtype, packing.planned)
        groups = groups_of(asked, config, pool, max_length)
        states = StateShape.of(FAMILIES[config.architecture].states(config), dtype)
        parts = asked.prefill_context_parallel_size
        sizes = EngineSizes(
            max_length,
            max_tokens,
            asked.max_sequences,
            pool,
            groups,
            weight_bytes,
            parameters,
            states=states,
            packing=packing,
            division=TokenSharding.on(device.type, parts, 0) if parts > 1 else None,
        )
        if limits is None:
            return sizes
        attends = bool(groups[0].layers) and not asked.deterministic and pool.kept == ALL_KEYS
        attends &= library_limit(limits, config, dtype, asked.page_size) is None
        exchanged = None if shard is None or asked.deterministic else shard.exchange_tokens(dtype)
        return replace(sizes, captures=True, attends=attends, exchanged=exchanged)


def groups_of(asked: EngineConfig, config: ModelConfig, pool: PoolShape, max_length: int) -> tuple[PageGroup, ...]:
    """Where ranks have stages, parts of prompts or sequences of their own, all layers keep all tokens. Raises as
    `check_states`."""
    check_states(asked, config)
    if keeps_all(asked):
        return (PageGroup(tuple(range(config.num_layers)), None, pool),)
    return page_groups(FAMILIES[config.architecture].states(config), pool, max_length)


def library_limit(limits: DeviceLimits, config: ModelConfig, dtype: torch.dtype, page_size: int) -> str | None:
    """Why cuDNN cannot attend for prompts, in words; None if it should."""
    if config.latent is not None:
        return "attention is latent, its keys and values are one row"
    if None not in config.windows:
        return "all layers have windows"
    if config.has_sinks:
        return "its attention has sinks"
    if config.rotated and not any(config.rotated):
        return "no layer rotates its queries, so that they lie apart from their keys"
    return why_no_plan(limits, dtype, config.head_dim, page_size)


def _max_length(asked: EngineConfig, config: ModelConfig) -> int:
    if asked.max_model_len is None:
        return config.longest
    if asked.max_model_len > config.longest and not config.rope.grows:
        raise ValueError(
            f"max_model_len={asked.max_model_len} is over the model's longest sequence of {config.longest} tokens: "
            f"max_position_embeddings={config.max_length}, rope_type={config.rope.rope_type!r}"
        )
    return asked.max_model_len
