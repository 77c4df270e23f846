"""Puts an engine together: from what the caller asks for to a loop that can take requests."""

from __future__ import annotations

import gc
import secrets
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from strata.cache.groups import books
from strata.cache.pages import PageAllocator
from strata.engine.captured_steps import REASONS
from strata.engine.compatibility import check_states, without_effect
from strata.engine.embeddings.pooling import PromptPooler
from strata.engine.engine_config import EngineConfig
from strata.engine.grammars.grammar import vocabulary
from strata.engine.loop import EngineLoop
from strata.engine.ranks.attention_dp_runner import AttentionDpRunner
from strata.engine.ranks.expert_balance import ExpertBalance
from strata.engine.ranks.followers import Followers
from strata.engine.ranks.rank import OneRank, share_of
from strata.engine.ranks.ranked_runner import RankedPooler, RankedRunner
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.rank_schedulers import RankPages, RankSchedulers
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.startup.clock import Log, StartupClock, collector_off
from strata.engine.startup.executor import Executor, build_executor
from strata.engine.step_cost import step_shares, step_target, step_times
from strata.engine.warm_up import warm_up
from strata.engine.watch.step_shares import StepShares
from strata.hardware.machine import cpu_name
from strata.kernels.compiled import KINDS, Compiled, Kind, listen
from strata.models.config import ModelConfig
from strata.models.generation_config import GenerationDefaults, read_generation_config
from strata.models.weights import resolve
from strata.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Engine(Executor):
    """An engine and what it was made of; of several ranks with the executor of the first, whose weights tell the others
    what changes them.

    bad_words: id sequences that no output may complete, whatever it asks for.
    compilations: what has been compiled in the process since the engine was ready.
    ranks: what runs steps on all of several ranks; None where there is one.
    shares: what can be told of a step by its plan.
    """

    loop: EngineLoop
    pages: PageAllocator | RankPages
    config: ModelConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]
    eos_ids: frozenset[int]
    startup: dict[str, float]
    device: torch.device
    compilations: Compilations
    ranks: RankedRunner | None
    shares: StepShares

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.costed.sizes.max_length

    def ready_line(self) -> str:
        """How it stands once it is made, in a line."""
        seconds, ledger = sum(self.startup.values()), self.ledger
        return f"ready on {ledger.device} after {seconds:.1f} s, with KV pages for {ledger.tokens:,} tokens"


def build_engine(asked: EngineConfig, log: Log, *, details: Log | None = None, show_progress: bool = False) -> Engine:
    """Load the model, divide the memory, trace the graphs, and on CUDA compile kernels meanwhile and warm up.

    log: gets lines about it. details: gets those of an ordinary start (the memory ledger, times), `log` if left out.
    show_progress: of what takes long on a new machine, with a bar on standard error.
    Raises ValueError for whatever cannot be honoured, EngineFault if the memory does not suffice after all.
    """
    with collector_off(), ExitStack() as beside, ExitStack() as with_engine:
        engine = _build(asked, log, details or log, show_progress, beside, with_engine)
        weakref.finalize(engine, with_engine.pop_all().close)
        return engine


def _build(
    asked: EngineConfig, log: Log, details: Log, show_progress: bool, beside: ExitStack, with_engine: ExitStack
) -> Engine:
    """beside: takes what has to end with the start; with_engine: what has to end with the engine, or if that fails."""
    clock = StartupClock()
    device = asked.resolve_device()
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels, events and graphs are of the current one, whatever they are given
    unused = without_effect(asked)
    if unused is not None:
        log(unused)
    with clock.phase("config"):
        config, folder = resolve(asked.model, asked.load_format)
        followers = None
        if asked.ranks > 1:
            # What cannot be is said before anything is started.
            check_states(asked, config)
            share_of(asked, config, 0)
            followers = Followers(asked, log)  # they load beside this one
            with_engine.callback(followers.stop)
        tokenizer = None if asked.skip_tokenizer_init else Tokenizer.load(Path(asked.model))
        defaults = read_generation_config(folder) if folder is not None else GenerationDefaults()
        default_params, eos_ids = _default_params(defaults), _eos_ids(config, defaults, tokenizer)
    for line in defaults.unused:
        log(line)
    mask_ids = vocabulary(tokenizer, config.vocab_size)
    rank = followers or OneRank()
    place = mask_ids, log, clock, beside, rank
    executor = build_executor(asked, config, device, *place, details=details, show_progress=show_progress)
    ranks: RankedRunner | None = None
    pooler: PromptPooler = executor.pooler
    if followers is not None:
        experts = executor.experts
        balance = None if experts is None else ExpertBalance(experts, asked.eplb_step_interval, log)
        if asked.enable_dp_attention:
            slots = executor.costed.sizes.max_sequences
            ranks = AttentionDpRunner(executor.runner, followers, experts, balance, mask_ids, slots, device)
        else:
            ranks = RankedRunner(executor.runner, followers, experts, balance)
        pooler = RankedPooler(executor.pooler, followers)
        executor.weights.everywhere = ranks.update_weight
    with clock.phase("graph"):
        shares = _step_shares(executor, device)
        replayed = executor.program.sizes
        target = step_target(asked, shares.times, replayed.padded_tokens, replayed)
    captured, ledger = executor.captured, executor.ledger
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    stages = asked.pipeline_parallel_size
    sizes = executor.costed.sizes
    scheduler_config = SchedulerConfig(
        sizes.max_sequences, sizes.max_tokens, sizes.max_length, seed, target, stages=stages
    )
    scheduler, pages = _scheduler(asked, scheduler_config, executor)
    loop = EngineLoop(scheduler, ranks or executor.runner, run_ahead=device.type == "cuda", ledger=ledger)
    compilations = Compilations(log)
    if device.type == "cuda":
        with clock.phase("warm up"):
            warm_up(loop, pages, config.vocab_size, executor.program.sizes.max_tokens, executor.kernels_are_ready)
        if captured is not None:
            captured.uncaptured = dict.fromkeys(REASONS, 0)
    # What stands now lives as long as the engine: the collector need not walk it in the middle of a step. Nobody has
    # looked for garbage only among what came since the collector went off; to walk all objects takes 0.3 s.
    gc.collect(0)
    gc.freeze()
    details(clock.line())
    engine = Engine(
        **vars(executor) | {"pooler": pooler},
        loop=loop,
        pages=pages,
        config=config,
        tokenizer=tokenizer,
        default_params=default_params,
        bad_words=_bad_words(config, defaults, eos_ids),
        eos_ids=eos_ids,
        startup=clock.phases,
        device=device,
        compilations=compilations,
        ranks=ranks,
        shares=shares,
    )
    if followers is not None and captured is not None:
        followers.before_leaving(captured.drop)
    weakref.finalize(engine, compilations.end)
    if device.type == "cuda":
        compilations.begin()  # when nothing is left that could fail, and leave it listening
    weakref.finalize(engine, gc.unfreeze)  # at its end, or the interpreter's: from then on its cycles can be collected
    return engine


def _scheduler(
    asked: EngineConfig, config: SchedulerConfig, executor: Executor
) -> tuple[Scheduler, PageAllocator] | tuple[RankSchedulers, RankPages]:
    """With the pages whose use tells how full the memory is. executor: of a rank."""
    counts = executor.ledger.group_pages
    if asked.enable_dp_attention:
        config = replace(config, ranks=asked.tensor_parallel_size)
        of_ranks = RankSchedulers(config, counts[0], asked.page_size, caches=asked.enable_prefix_caching)
        return of_ranks, of_ranks.pages
    snapshots = executor.ledger.snapshots if executor.ledger.state_bytes else None
    held = books(executor.costed.sizes.groups, counts, config.max_sequences, config.max_length, snapshots)
    tree = held.tree() if asked.enable_prefix_caching else None
    return Scheduler(config, held.pages, tree, held.windows, held.snapshots), held.filled


def _step_shares(executor: Executor, device: torch.device) -> StepShares:
    """What can be told of steps before they run: how long they take, where own kernels run, and their floors."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    times, program = None, executor.program
    if executor.own_kernels:
        times = step_times(executor.costed, name, max(program.sizes.mixed_tokens, default=0))
        division = program.division
        if times is not None and division is not None and division.times is not None:
            times = replace(times, division=division.times.division)
    return step_shares(executor.costed, name, times)


def _default_params(defaults: GenerationDefaults) -> SamplingParams:
    given = {**defaults.sampling}
    if "max_tokens" not in given:
        given["max_tokens"] = max(SamplingParams.max_tokens or 0, given.get("min_tokens", 0))
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


_DONE: dict[Kind, str] = {"kernel": "compiled", "cached kernel": "read from the disk"}


class Compilations:
    """Counts what the process compiles and reads from the disk, by kind, between `begin` and `end`.

    The process is one: if it has several engines that are ready, each counts what any of them brings about.

    log: gets a line when something of a kind and name is met for the first time.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.counts: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._log = log
        self._logged: set[tuple[Kind, str]] = set()
        self._stop: Callable[[], None] = lambda: None

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def begin(self) -> None:
        self._stop()
        self._stop = listen(self._count)

    def end(self) -> None:
        """Count no more; others who count go on."""
        self._stop()

    def _count(self, compiled: Compiled) -> None:
        self.counts[compiled.kind] += 1
        if (compiled.kind, compiled.name) not in self._logged:
            self._logged.add((compiled.kind, compiled.name))
            variant = f" ({compiled.variant})" if compiled.variant else ""
            self._log(f"{_DONE[compiled.kind]} while serving: {compiled.name}{variant}")
