"""Puts an engine together: from what the caller asks for to a loop that can take requests."""

from __future__ import annotations

import gc
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from strata.cache.block_tables import table_pages
from strata.cache.pages import PageAllocator
from strata.cache.pool import KVPool
from strata.cache.prefix import PrefixTree
from strata.engine.compilations import Compilations
from strata.engine.embeddings.pooling import Pooler
from strata.engine.engine_config import EngineConfig, EngineSizes, library_limit
from strata.engine.faults import memory_explained
from strata.engine.grammars.grammar import vocabulary
from strata.engine.ledger import Ledger, plan_memory
from strata.engine.loop import EngineLoop
from strata.engine.recorded_steps import REASONS, RecordedSteps
from strata.engine.runner import Runner, RunnerConfig
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.room import StepTarget
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.step_cost import step_times
from strata.engine.step_graphs import step_graphs
from strata.engine.warm_up import warm_up
from strata.kernels import tuned
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention import fixed as attention_fixed
from strata.kernels.attention.cudnn_plan import Packed, Pages, PlanShape, plan_for
from strata.kernels.device_limits import DeviceLimits, implementations_for, why_not
from strata.models import weights
from strata.models.config import ModelConfig
from strata.models.generation_config import GenerationDefaults, read_generation_config
from strata.models.layers import Attention
from strata.text.tokenizer import Tokenizer

Log = Callable[[str], None]


class StartupClock:
    """How long each phase of start-up took, in seconds."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        return f"ready in {sum(self.phases.values()):.2f} s: {parts}"


@dataclass(frozen=True)
class Engine:
    """An engine and what it was made of.

    bad_words: id sequences that no output may complete, whatever it asks for.
    compilations: what has been compiled in the process since the engine was ready.
    recorded: steps that replay CUDA graphs, and counts of those that do not; None if none is to.
    """

    loop: EngineLoop
    pages: PageAllocator
    pooler: Pooler
    model: torch.nn.Module
    config: ModelConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]
    eos_ids: frozenset[int]
    ledger: Ledger
    startup: dict[str, float]
    max_model_len: int
    device: torch.device
    compilations: Compilations
    recorded: RecordedSteps | None


def build_engine(asked: EngineConfig, log: Log, *, show_progress: bool = False) -> Engine:
    """Load the model, divide the memory, capture the graphs, and on CUDA compile kernels meanwhile and warm up.

    log: gets lines about it. show_progress: of what takes long on a new machine, with a bar on standard error.
    Raises ValueError for whatever cannot be honoured, EngineFault if the memory does not suffice after all.
    """
    with _collector_off(), ExitStack() as beside:
        return _build(asked, log, show_progress, beside)


@contextmanager
def _collector_off() -> Iterator[None]:
    """A start makes many objects and drops few: looking for cycles among them takes a third of a graph's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _build(asked: EngineConfig, log: Log, show_progress: bool, beside: ExitStack) -> Engine:
    """beside: takes what has to end with the start."""
    clock = StartupClock()
    device = asked.resolve_device()
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels, events and graphs are of the current one, whatever they are given
    with clock.phase("config"):
        config, folder = weights.resolve(asked.model, asked.load_format)
        tokenizer = None if asked.skip_tokenizer_init else Tokenizer.load(Path(asked.model))
        defaults = read_generation_config(folder) if folder is not None else GenerationDefaults()
        default_params, eos_ids = _default_params(defaults), _eos_ids(config, defaults, tokenizer)
    for line in defaults.unused:
        log(line)
    limit = why_not(DeviceLimits.of(device)) if device.type == "cuda" else None
    if limit is not None:
        if asked.deterministic:
            raise ValueError(f"{limit}: deterministic=True needs Strata's own kernels here; leave it out")
        log(f"{limit}: the library's implementations and the references run instead, without CUDA graphs")
    fast = device.type == "cuda" and limit is None
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    sizes = EngineSizes.of(asked, config, device, DeviceLimits.of(device) if fast else None)
    kernels = None
    if fast:
        from strata.engine.ahead.ahead import KernelsAhead  # needs Triton

        kernels = beside.enter_context(KernelsAhead(asked, device, log).under_way())
    pool_shape, max_length = sizes.pool, sizes.max_length
    if fast and not asked.deterministic:
        without = library_limit(DeviceLimits.of(device), config, pool_shape.dtype, asked.page_size)
        if without is not None:
            log(_without_library(without))
    ledger = plan_memory(
        config,
        pool_shape,
        device,
        weight_bytes=sizes.weight_bytes,
        max_tokens=sizes.max_tokens,
        max_sequences=asked.max_num_seqs,
        max_length=max_length,
        utilization=asked.gpu_memory_utilization,
        num_pages=asked.num_pages,
        dtype=pool_shape.dtype,
        recorded=sizes.recorded,
        scratch=max(
            (_scratch_bytes(asked, config, sizes, rows) for rows in {size.sequences for size in sizes.recorded}),
            default=0,
        ),
    )
    for line in ledger.lines():
        log(line)
    with clock.phase("weights"), memory_explained("loading the weights", ledger):
        model, _ = weights.load(asked.model, device, pool_shape.dtype, asked.load_format, max_length, asked.seed or 0)
    with clock.phase("graph"):
        kind = implementations_for(device)
        table = tuned.read(DeviceLimits.of(device).product) if kind == "cuda" else {}
        graphs = step_graphs(model, kind, asked.deterministic, table)
    with clock.phase("KV pages"), memory_explained("allocating the KV pages", ledger):
        pool = KVPool(pool_shape, ledger.pages, device)
    windows, mask_ids = frozenset(config.windows), vocabulary(tokenizer, config.vocab_size)
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    heads = config.num_heads
    runner_config = RunnerConfig(asked.max_num_seqs, sizes.max_tokens, max_length, windows, heads, mask_ids)
    runner = Runner(graphs, pool, runner_config, device)
    kernels_are_ready = False
    if kernels is not None:
        with clock.phase("kernels"):
            kernels_are_ready = kernels.finish(show=show_progress)
    recorded = None
    with clock.phase("CUDA graphs"):
        fresh, scales = any(size.fresh for size in sizes.recorded), library_scales(model)
        if sizes.library and not _has_library_plan(config, scales, pool, max_length, fresh, log):
            sizes = sizes.without_library(asked.max_num_seqs)
        if sizes.recorded:
            recorded = runner.record(sizes.recorded)
            shortage = recorded.shortage(ledger.device)
            if shortage is not None:
                log(shortage)
    mixed_tokens = recorded.mixed_tokens if recorded is not None else ()
    target = None
    if fast and asked.step_target_ms is not None:
        with clock.phase("graph"):
            name = torch.cuda.get_device_name(device)
            times = step_times(graphs, pool_shape, name, max(mixed_tokens, default=0))
            target = None if times is None else StepTarget(asked.step_target_ms / 1e3, times, mixed_tokens)
    allocator = PageAllocator(ledger.pages, asked.page_size)
    prefix = PrefixTree(allocator) if asked.enable_prefix_caching else None
    scheduler_config = SchedulerConfig(asked.max_num_seqs, sizes.max_tokens, max_length, seed, target)
    scheduler = Scheduler(scheduler_config, allocator, prefix)
    loop = EngineLoop(scheduler, runner, run_ahead=device.type == "cuda", ledger=ledger)
    compilations = Compilations(log)
    if device.type == "cuda":
        with clock.phase("warm up"):
            recorded_tokens = (size.tokens for size in recorded.sizes) if recorded is not None else ()
            warm_up(loop, allocator, config.vocab_size, max(recorded_tokens, default=0), kernels_are_ready)
        if recorded is not None:
            recorded.unrecorded = dict.fromkeys(REASONS, 0)
    # What stands now lives as long as the engine: the collector need not walk it in the middle of a step.
    gc.collect()
    gc.freeze()
    log(clock.line())
    engine = Engine(
        loop=loop,
        pages=allocator,
        pooler=Pooler(graphs.hidden.forward, sizes.max_tokens, max_length, config.vocab_size, device, ledger),
        model=model,
        config=config,
        tokenizer=tokenizer,
        default_params=default_params,
        bad_words=_bad_words(config, defaults, eos_ids),
        eos_ids=eos_ids,
        ledger=ledger,
        startup=clock.phases,
        max_model_len=max_length,
        device=device,
        compilations=compilations,
        recorded=recorded,
    )
    weakref.finalize(engine, compilations.end)
    if device.type == "cuda":
        compilations.begin()  # when nothing is left that could fail, and leave it listening
    weakref.finalize(engine, gc.unfreeze)  # at its end, or the interpreter's: from then on its cycles can be collected
    return engine


def library_scales(model: torch.nn.Module) -> set[float]:
    """What the layers that cuDNN can attend for multiply their scores by: a plan is made for each, mostly one."""
    specs = (module.spec for module in model.modules() if isinstance(module, Attention))
    return {spec.scale for spec in specs if spec.window is None}


def _has_library_plan(
    config: ModelConfig, scales: set[float], pool: KVPool, max_length: int, fresh: bool, log: Log
) -> bool:
    """Make the plans that layers share, of which the first takes a second; fresh: also for steps over their own keys.
    False, once a line has said why, if that fails."""
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    row, page_size = (heads + kv_heads) * width, pool.shape.page_size
    sources: list[Pages | Packed] = [Pages(pool.pages, page_size, table_pages(max_length, page_size))]
    if fresh:
        sources.append(Packed(row, row + kv_heads * width))
    try:
        for scale in sorted(scales):
            for source in sources:
                shape = PlanShape(pool.shape.dtype, heads, kv_heads, width, row, scale, source)
                plan_for(shape, pool.keys[0].device)
    except Exception as error:  # the library's own kinds, and those of a front end that does not fit it
        log(_without_library(str(error).strip().partition("\n")[0]))
        return False
    return True


def _without_library(reason: str) -> str:
    """The line that says that steps run without it."""
    return f"steps attend for prompts without cuDNN: {reason}"


def _scratch_bytes(asked: EngineConfig, config: ModelConfig, sizes: EngineSizes, rows: int) -> int:
    """What attention needs beside its result in a step of so many decodes."""
    keys = -(-sizes.max_length // asked.page_size) * asked.page_size
    if asked.deterministic:
        return attention_fixed.scratch_bytes(rows, keys, config.num_heads, config.head_dim)
    return decode_attention_cuda.scratch_bytes(
        rows, keys, config.num_heads, config.num_kv_heads, config.head_dim, sizes.pool.dtype
    )


def _default_params(defaults: GenerationDefaults) -> SamplingParams:
    given = defaults.sampling
    if "max_tokens" not in given:
        given["max_tokens"] = max(SamplingParams.max_tokens or 0, defaults.min_new_tokens or 0)
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise ValueError(f"{defaults.where}: {error}") from None


def _bad_words(
    config: ModelConfig, defaults: GenerationDefaults, eos_ids: frozenset[int]
) -> tuple[tuple[int, ...], ...]:
    """Without those that no output can hold, and without the ends of an output, which transformers allows too."""
    return tuple(
        word
        for word in defaults.bad_words
        if all(0 <= id < config.vocab_size for id in word) and not (len(word) == 1 and word[0] in eos_ids)
    )


def _eos_ids(config: ModelConfig, defaults: GenerationDefaults, tokenizer: Tokenizer | None) -> frozenset[int]:
    """generation_config.json's, else config.json's, else the tokenizer's."""
    own = tokenizer.eos_ids if tokenizer is not None else ()
    return frozenset(defaults.eos_ids or config.eos_ids or own)
