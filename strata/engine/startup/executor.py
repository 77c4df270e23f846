"""What runs an engine's steps on a device: weights, graphs, KV pages, runner, captured steps. Each rank has its own."""

from __future__ import annotations

import os
import shutil
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from strata.cache.block_tables import table_pages
from strata.cache.groups import pools
from strata.cache.pool import KVPool
from strata.cache.state_pool import StatePool
from strata.comm.mesh import Axis
from strata.comm.peer_copies import with_peer_copies
from strata.engine.captured_steps import CapturedSteps, gathered_rows_of, pure_prefill_rows_of
from strata.engine.compatibility import check_gathered_heads
from strata.engine.embeddings.pooling import Pooler, PromptPooler
from strata.engine.engine_config import EngineConfig, EngineSizes, library_limit
from strata.engine.faults import memory_explained
from strata.engine.ledger import GIB, Ledger
from strata.engine.program.meta_model import MetaModel
from strata.engine.program.program import StepProgram
from strata.engine.program.source import Target
from strata.engine.ranks.expert_balance import RankExperts
from strata.engine.ranks.prefill_context_parallel import CONTEXT_AXIS
from strata.engine.ranks.rank import Rank
from strata.engine.runner import Runner
from strata.engine.startup.clock import Log, StartupClock
from strata.engine.startup.memory import RankPlace, overlapped_bytes, rank_memory, rank_setup
from strata.engine.startup.sequences import with_sequences
from strata.engine.startup.sparse_attention import attention_choice
from strata.engine.step_cost import token_sharding
from strata.graph.buffers import BufferPlan
from strata.graph.ranks.overlap import SLOTS
from strata.hardware.figures import Device
from strata.hardware.specs import recognize
from strata.kernels.attention.cudnn_prompts import PlanShape, plan_for
from strata.kernels.attention.query_chunks import MAX_TOKENS
from strata.kernels.device_limits import DeviceLimits, implementations_for, why_not
from strata.models.config import ModelConfig
from strata.models.layers import Attention
from strata.models.weights import WeightStore
from strata.parallel.serving_shard import TENSOR_AXIS


@dataclass(frozen=True)
class Executor:
    """What runs plans, and what it was made of.

    weights: those of `model`, which may change between steps. costed: its program on shapes, and its sizes. captured:
    steps that replay CUDA graphs, and counts of those that do not; None if none is to. own_kernels: the device runs
    them. kernels_are_ready: all variants of them have been compiled. experts: of this rank, where those of a mixture
    may move between ranks.
    """

    model: torch.nn.Module
    weights: WeightStore
    runner: Runner
    pooler: PromptPooler
    captured: CapturedSteps | None
    ledger: Ledger
    costed: MetaModel
    own_kernels: bool
    kernels_are_ready: bool
    experts: RankExperts | None

    @property
    def program(self) -> StepProgram:
        return self.runner.program


def build_executor(
    asked: EngineConfig,
    config: ModelConfig,
    device: torch.device,
    mask_ids: int,
    log: Log,
    clock: StartupClock,
    beside: ExitStack,
    rank: Rank,
    *,
    details: Log,
    show_progress: bool,
) -> Executor:
    """Divide the memory, load the weights, trace the graphs, and on CUDA compile kernels meanwhile and capture steps.

    config: of the whole model. mask_ids: how many ids a mask of a grammar tells of. beside: takes what has to end with
    the start. rank: the place among those that each make one; what could differ between them is the least of all.
    Raises ValueError for whatever cannot be honoured, EngineFault if the memory does not suffice after all.
    """
    sparse = attention_choice(asked, config, implementations_for(device))
    if asked.executor == "compile":
        _check_compiler(device)
    own_kernels = _runs_own_kernels(asked, device, log)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // rank.size))
    limits = DeviceLimits.of(device) if own_kernels else None
    place = RankPlace(device, limits, rank.index)
    asked = with_sequences(asked, config, place)
    part = rank_setup(asked, config, place)
    shard, own, sizes = part.shard, part.config, part.sizes
    check_gathered_heads(asked, own, implementations_for(device))
    kernels = None
    if own_kernels:
        from strata.engine.ahead.ahead import KernelsAhead  # needs Triton

        kernels = beside.enter_context(KernelsAhead(asked, device, log, compiles=rank.index == 0).under_way())
    pool_shape, max_length = sizes.pool, sizes.max_length
    if own_kernels and not asked.deterministic:
        limit = library_limit(DeviceLimits.of(device), own, pool_shape.dtype, asked.page_size)
        if limit is not None:
            log(without_library(limit))
    ledger = rank_memory(asked, config, place, part)
    for line in ledger.lines():
        details(line)
    packing, given_dtype = sizes.packing, pool_shape.dtype
    if packing.schemes:
        details(packing.line(given_dtype))
    with clock.phase("weights"), memory_explained("loading the weights", ledger):
        source = device, given_dtype, asked.load_format, max_length, asked.seed or 0, shard
        store = WeightStore.load(asked.model, packing.schemes, *source)
        model, packed = store.model, store.quantized
    with clock.phase("ranks"):
        _require_alike(device, rank)
        ledger = ledger.agreed(rank.min_over_ranks)
        axes = rank.join(device)
        overlapped = overlapped_bytes(asked, own, sizes)
        axes[TENSOR_AXIS] = with_peer_copies(axes[TENSOR_AXIS], device, SLOTS, overlapped)
        context = axes.get(CONTEXT_AXIS)
        experts, tables = None, None
        if shard is not None:
            shard = replace(shard, axes=axes)
            if asked.enable_eplb:
                experts = RankExperts(model, shard, axes[TENSOR_AXIS], device)
                # All ranks route alike, so one of them counts.
                tables = experts.tables._replace(counts=rank.index == 0)
    with clock.phase("graph"):
        kind = implementations_for(device)
        limits = DeviceLimits.of(device) if kind == "cuda" else None
        copies = _sends_by_copies(axes[TENSOR_AXIS], device)
        target = Target(kind, limits, copies, shard, tables, context, packed, sparse)
        program = StepProgram.of(model, asked, target, sizes)
        store.folded = program.folded
        largest = sizes.max_tokens, min(asked.max_sequences, sizes.max_tokens)
        costed = MetaModel(own, limits, program, sizes, shard, asked.deterministic)
        planned = costed.planned_buffers(*largest)
        ledger = replace(ledger, planned=planned.peak)
        details(planned_line(planned, ledger, sizes.max_tokens))
    with clock.phase("KV pages"), memory_explained("allocating the KV pages", ledger):
        kept = pools(sizes.groups, ledger.group_pages, own.num_layers, device)
        states = None if sizes.states is None else StatePool(sizes.states, ledger.state_rows, device)
    if context is not None and context.size > 1:
        product = DeviceLimits.of(device).product if own_kernels else None
        division = token_sharding(costed, context, device.type, product)
        program = replace(program, division=division.agreed(rank.min_over_ranks))
    runner = Runner(program, sizes, own, kept, device, mask_ids, states, asked.pipeline_parallel_size)
    kernels_are_ready = False
    if kernels is not None:
        with clock.phase("kernels"):
            if rank.index > 0:
                rank.min_over_ranks(0)  # until the first has compiled what is not on the disk
            kernels_are_ready = kernels.finish(show=show_progress)
            if rank.index == 0:
                rank.min_over_ranks(0)
    captured = None
    with clock.phase("CUDA graphs"):
        pure_prefill, scales = any(size.pure_prefill for size in sizes.captured), library_scales(model)
        wanted = sizes.library or pure_prefill
        has_library = wanted and has_library_plan(own, scales, kept[0], max_length, pure_prefill, log)
        if not rank.min_over_ranks(int(has_library)) and wanted:
            sizes = replace(sizes, attends=False)
        if sizes.captured:
            ready = kernels_are_ready and asked.executor == "graph"  # what is compiled meanwhile is no kernel of ours
            captured = _captured(runner, sizes, ledger, rank, ready)
            shortage = captured.shortage(ledger.device)
            if shortage is not None:
                log(shortage)
    return Executor(
        model=model,
        weights=store,
        runner=runner,
        pooler=Pooler(program.whole_prompts.forward, sizes.max_tokens, max_length, config.vocab_size, device, ledger),
        captured=captured,
        ledger=ledger,
        costed=replace(costed, program=runner.program),
        own_kernels=own_kernels,
        kernels_are_ready=kernels_are_ready,
        experts=experts,
    )


def planned_line(plan: BufferPlan, ledger: Ledger, tokens: int) -> str:
    """What the buffers of the largest step come to, beside what was set aside for them, in words."""
    held, used = plan.peak / GIB, plan.made / max(1, plan.peak)
    return (
        f"activations of {tokens:,} tokens: {held:.3f} GiB planned, most of it alive at {plan.peak_node} ({used:.0f} "
        f"times as much is made); {ledger.activations / GIB:.3f} set aside, sampling with it"
    )


def _check_compiler(device: torch.device) -> None:
    """Raises ValueError where torch.compile has nothing to compile with."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(f"executor='compile' needs a C++ compiler on a CPU, and there is no {compiler}: install one")


def _require_alike(device: torch.device, rank: Rank) -> None:
    """Raises ValueError if ranks have GPUs of different kinds, on which they would make different choices."""
    if device.type == "cuda" and rank.size > 1:
        product = DeviceLimits.of(device).product
        known = zlib.crc32(product.encode())
        if (rank.min_over_ranks(known), -rank.min_over_ranks(-known)) != (known, known):
            raise ValueError(
                f"rank {rank.index} has the GPU {product} and others have another: choose GPUs of one kind by the "
                "environment variable CUDA_VISIBLE_DEVICES"
            )


def _captured(runner: Runner, sizes: EngineSizes, ledger: Ledger, rank: Rank, kernels_are_ready: bool) -> CapturedSteps:
    """Several ranks capture all sizes or cannot go on: in one that does not, messages of other lengths would meet."""
    if rank.size == 1:
        return runner.capture(sizes.captured, kernels_are_ready=kernels_are_ready)
    with memory_explained("capturing CUDA graphs", ledger):
        captured = runner.capture(sizes.captured, all_of_them=True)
    rank.min_over_ranks(0)
    return captured


def _sends_by_copies(axis: Axis, device: torch.device) -> Device | None:
    """The device, if ranks along an axis send large messages by copy engines and its figures are known."""
    return None if axis.copies is None else recognize(DeviceLimits.of(device).product)


def _runs_own_kernels(asked: EngineConfig, device: torch.device, log: Log) -> bool:
    """Raises ValueError if it does not, where nothing else is deterministic."""
    if device.type != "cuda":
        return False
    limit = why_not(DeviceLimits.of(device))
    if limit is None:
        return True
    if asked.deterministic:
        raise ValueError(f"{limit}: deterministic=True needs Strata's own kernels here; leave it out")
    log(f"{limit}: the library's implementations and the references run instead, without CUDA graphs")
    return False


def library_scales(model: torch.nn.Module) -> set[float]:
    """What the layers that cuDNN can attend for multiply their scores by: a plan is made for each, mostly one."""
    specs = (module.spec for module in model.modules() if isinstance(module, Attention))
    return {spec.scale for spec in specs if spec.window is None}


def has_library_plan(
    config: ModelConfig, scales: set[float], pool: KVPool, max_length: int, pure_prefill: bool, log: Log
) -> bool:
    """Make the plans that layers share, of which the first takes a second; pure_prefill: also for steps over their own
    keys. False, once a line has said why, if that fails."""
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    page_size = pool.shape.page_size
    rows = [(pure_prefill_rows_of(heads, pool.shape), MAX_TOKENS)] if pure_prefill else []
    if pool.shape.quantized is None:
        rows.append((gathered_rows_of(heads, pool.shape), table_pages(max_length, page_size) * page_size))
    try:
        for scale in sorted(scales):
            for own, longest in rows:
                vectors = own.queries, own.keys, own.values
                shape = PlanShape(pool.shape.dtype, heads, kv_heads, width, *vectors, longest, scale)
                plan_for(shape, pool.keys[0].device)
    except Exception as error:  # the library's own kinds, and those of a front end that does not fit it
        log(without_library(str(error).strip().partition("\n")[0]))
        return False
    return True


def without_library(reason: str) -> str:
    """The line that says that steps run without it."""
    return f"steps attend for prompts without cuDNN: {reason}"
