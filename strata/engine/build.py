"""Puts an engine together: from what the caller asks for to a loop that can take requests."""

from __future__ import annotations

import gc
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from strata.cache.pages import PageAllocator
from strata.cache.pool import KVPool, PoolShape
from strata.cache.prefix import PrefixTree
from strata.engine.compilations import Compilations
from strata.engine.embeddings.pooling import Pooler
from strata.engine.faults import memory_explained
from strata.engine.grammars.grammar import vocabulary
from strata.engine.ledger import Ledger, plan_memory
from strata.engine.loop import EngineLoop
from strata.engine.recorded_steps import REASONS, RecordedSteps, recorded_sizes
from strata.engine.runner import Runner, RunnerConfig
from strata.engine.sampling_params import RANGES, SamplingParams, check_integer
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.room import StepTarget
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.step_cost import step_times
from strata.engine.step_graphs import step_graphs
from strata.engine.warm_up import warm_up
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention import fixed as attention_fixed
from strata.kernels.device_limits import DeviceLimits, implementations_for, why_not
from strata.models import weights
from strata.models.config import DTYPES, ModelConfig
from strata.models.families import build
from strata.models.folder import located
from strata.models.generation_config import GenerationDefaults, read_generation_config
from strata.text.tokenizer import Tokenizer

Log = Callable[[str], None]


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is asked for; the names and meanings are vLLM's where it has them.

    model: a checkpoint folder, or the name of a shape ("8B", "0.6B") for random weights with load_format="dummy".
    dtype: "auto" (the checkpoint's, see `strata.models.weights.load`), "float32", "bfloat16" or "float16".
    device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
    max_model_len: the most tokens of a sequence, prompt and output; None is the model's own.
    load_format: "auto" reads safetensors, "dummy" makes random weights from config.json alone.
    skip_tokenizer_init: prompts and outputs are ids only.
    enable_prefix_caching: keep and reuse the pages of prompts that begin alike.
    gpu_memory_utilization: share of the GPU's memory that may be in use with the engine, other processes' included, in
        (0, 1].
    max_num_seqs: most sequences that run at once.
    max_num_batched_tokens: most tokens of one step; longer prompts are prefilled in chunks. None: 8192 on CUDA, 2048 on
        a CPU or where the own kernels cannot run.
    seed: of the requests that bring none, and of dummy weights; None draws anew in every engine (weights as for 0).
    deterministic: a request's bits depend on nothing else that runs (see docs/engine.md).
    page_size: tokens of a KV page.
    num_pages: KV pages; None takes what memory allows.
    step_target_ms: what a step with decodes is to take at most, so that prompts do not stall those who read along; None
        fills steps up to max_num_batched_tokens, which ends a batch sooner. It needs a device whose peaks are known.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    seed: int | None = None
    deterministic: bool = False
    page_size: int = 16
    num_pages: int | None = None
    step_target_ms: float | None = None

    @classmethod
    def from_options(cls, model: str | Path | None, options: Mapping[str, Any]) -> EngineConfig:
        """`model` None or "builtin" is the built-in model, `org/model` a download in the Hugging Face cache.

        Raises ValueError for an unknown option, and for a download that is not there.
        """
        known = {field.name for field in fields(cls)} - {"model"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; LLM takes model, {', '.join(sorted(known))}")
        return cls(located(model), **options)

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype {self.dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        target = self.step_target_ms
        if target is not None and not (isinstance(target, int | float) and 0 < target < math.inf):
            raise ValueError(f"step_target_ms must be a number over 0, or None for no target, got {target!r}")
        if self.seed is not None:
            check_integer("seed", self.seed, RANGES["seed"])
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")

    def resolve_device(self) -> torch.device:
        """Raises ValueError if the device asked for is not there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ValueError(f"device {self.device!r} is unknown; use auto, cpu, cuda or cuda:N") from None
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is not supported; use auto, cpu, cuda or cuda:N")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device {self.device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
            )
        return device


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


def build_engine(asked: EngineConfig, log: Log) -> Engine:
    """Load the model, divide the memory, capture the graphs, and on CUDA warm up.

    Raises ValueError for whatever cannot be honoured, EngineFault if the memory does not suffice after all.
    """
    clock = StartupClock()
    device = asked.resolve_device()
    with clock.phase("config"):
        config, folder = weights.resolve(asked.model, asked.load_format)
        tokenizer = None if asked.skip_tokenizer_init else Tokenizer.load(Path(asked.model))
        defaults = read_generation_config(folder) if folder is not None else GenerationDefaults()
        default_params, eos_ids = _default_params(defaults), _eos_ids(config, defaults, tokenizer)
    for line in defaults.unused:
        log(line)
    max_length = _max_length(asked, config)
    limit = why_not(DeviceLimits.of(device)) if device.type == "cuda" else None
    if limit is not None:
        if asked.deterministic:
            raise ValueError(f"{limit}: deterministic=True needs Strata's own kernels here; leave it out")
        log(f"{limit}: the library's implementations and the references run instead, without CUDA graphs")
    fast = device.type == "cuda" and limit is None
    max_tokens = asked.max_num_batched_tokens or (8192 if fast else 2048)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = weights.resolve_dtype(asked.dtype, config, device)
    pool_shape = PoolShape(config.num_layers, asked.page_size, config.num_kv_heads, config.head_dim, dtype)
    weight_bytes = _weight_bytes(config, dtype, max_length)
    sizes = recorded_sizes(asked.max_num_seqs, max_tokens, weight_bytes // dtype.itemsize) if fast else []
    ledger = plan_memory(
        config,
        pool_shape,
        device,
        weight_bytes=weight_bytes,
        max_tokens=max_tokens,
        max_sequences=asked.max_num_seqs,
        max_length=max_length,
        utilization=asked.gpu_memory_utilization,
        num_pages=asked.num_pages,
        dtype=dtype,
        recorded=sizes,
        scratch=max(
            (_scratch_bytes(asked, config, dtype, rows, max_length) for rows in {size.sequences for size in sizes}),
            default=0,
        ),
    )
    for line in ledger.lines():
        log(line)
    with clock.phase("weights"), memory_explained("loading the weights", ledger):
        model, _ = weights.load(asked.model, device, dtype, asked.load_format, max_length, asked.seed or 0)
    with clock.phase("graph"):
        graphs = step_graphs(model, implementations_for(device), asked.deterministic)
    with clock.phase("KV pages"), memory_explained("allocating the KV pages", ledger):
        pool = KVPool(pool_shape, ledger.pages, device)
    windows, mask_ids = frozenset(config.windows), vocabulary(tokenizer, config.vocab_size)
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    runner_config = RunnerConfig(asked.max_num_seqs, max_tokens, max_length, windows, mask_ids)
    runner = Runner(graphs, pool, runner_config, device)
    recorded = None
    with clock.phase("CUDA graphs"):
        if sizes:
            recorded = runner.record(sizes)
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
    scheduler_config = SchedulerConfig(asked.max_num_seqs, max_tokens, max_length, seed, target)
    scheduler = Scheduler(scheduler_config, allocator, prefix)
    loop = EngineLoop(scheduler, runner, run_ahead=device.type == "cuda", ledger=ledger)
    compilations = Compilations(log)
    if device.type == "cuda":
        with clock.phase("warm up"):
            recorded_tokens = (size.tokens for size in recorded.sizes) if recorded is not None else ()
            warm_up(loop, allocator, config.vocab_size, max(recorded_tokens, default=0))
        if recorded is not None:
            recorded.unrecorded = dict.fromkeys(REASONS, 0)
    # What stands now lives as long as the engine: the collector need not walk it in the middle of a step.
    gc.collect()
    gc.freeze()
    log(clock.line())
    engine = Engine(
        loop=loop,
        pages=allocator,
        pooler=Pooler(graphs.hidden.forward, max_tokens, max_length, config.vocab_size, device, ledger),
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


def _max_length(asked: EngineConfig, config: ModelConfig) -> int:
    if asked.max_model_len is None:
        return config.longest
    if asked.max_model_len > config.longest and not config.rope.grows:
        raise ValueError(
            f"max_model_len={asked.max_model_len} is over the model's longest sequence of {config.longest} tokens: "
            f"max_position_embeddings={config.max_length}, rope_type={config.rope.rope_type!r}"
        )
    return asked.max_model_len


def _weight_bytes(config: ModelConfig, dtype: torch.dtype, max_length: int) -> int:
    with torch.device("meta"):
        return weights.weight_bytes(build(config, max_length), dtype)


def _scratch_bytes(asked: EngineConfig, config: ModelConfig, dtype: torch.dtype, rows: int, max_length: int) -> int:
    """What attention needs beside its result in a step of so many decodes."""
    keys = -(-max_length // asked.page_size) * asked.page_size
    if asked.deterministic:
        return attention_fixed.scratch_bytes(rows, keys, config.num_heads, config.head_dim)
    return decode_attention_cuda.scratch_bytes(
        rows, keys, config.num_heads, config.num_kv_heads, config.head_dim, dtype
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
