"""Which variants of kernels an engine launches, from its config alone: a start on the meta device, where none runs.

The same graphs, captured sizes, runner and warm-up as in a real start meet the same shapes, strides and addresses,
counted from where memory begins. What is derived wrongly costs time and nothing else: it is compiled when launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from strata.cache.groups import books, pools
from strata.cache.pages import PageAllocator
from strata.cache.state_pool import StatePool
from strata.comm.join_heads import join_heads
from strata.comm.operations import Along, all_gather
from strata.comm.peer_copies import PendingSum
from strata.comm.symmetric import imagined
from strata.comm.under_way import start_all_reduce
from strata.engine.compatibility import check_gathered_heads
from strata.engine.engine_config import EngineConfig, EngineSizes, groups_of
from strata.engine.ledger import PROMPT_LOGPROB_ROWS, Ledger
from strata.engine.loop import EngineLoop
from strata.engine.plan import StepPlan
from strata.engine.program.program import StepProgram
from strata.engine.program.source import Target
from strata.engine.ranks.expert_balance import expert_tables
from strata.engine.ranks.prefill_context_parallel import CONTEXT_AXIS, TokenSharding
from strata.engine.ranks.rank import share_of_all_layers
from strata.engine.ranks.vocabulary_shard import VocabularyShard
from strata.engine.request import Request
from strata.engine.runner import Launched, Runner, ScoredPrompt
from strata.engine.sampler import DrawInputs, LogprobTensors, Sampler, draw_ids
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.startup.packing import Packing
from strata.engine.startup.sparse_attention import attention_choice
from strata.engine.warm_up import warm_up
from strata.graph.cudagraph import CudaGraphStore
from strata.graph.deferred import make_code
from strata.hardware.specs import recognize
from strata.kernels.collective.joined_heads import pack_heads, unpack_heads
from strata.kernels.compiling.noting import Variant, noting
from strata.kernels.device_limits import DeviceLimits, implementations_for, meta_means
from strata.kernels.op import NCCL, Bound
from strata.models import weights
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard

META = torch.device("meta")
# More than any prompt of the warm-up fills; how many there are really is known once memory is measured.
_PAGES = 1 << 16
# Of a prompt, so that others are computed beside its decodes.
_OUTPUTS = 8


def target_of(limits: DeviceLimits) -> GPUTarget:
    """What Triton compiles for."""
    major, minor = limits.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


@dataclass(frozen=True)
class DryEngine:
    """An engine whose launches are noted, with the graphs of its steps and its pages."""

    program: StepProgram
    loop: EngineLoop
    pages: PageAllocator


def note_variants(asked: EngineConfig, limits: DeviceLimits, note: Callable[[Variant], None]) -> DryEngine:
    """Tell `note` of each variant that such an engine launches on such a device, once. For a process of its own.

    Raises ValueError for whatever the engine would refuse.
    """
    config, _ = weights.resolve(asked.model, asked.load_format)
    # All ranks launch what the first does, or a part of it, where stages divide the layers.
    axis = imagined(TENSOR_AXIS, asked.tensor_parallel_size)
    whole, shard = (share_of_all_layers(asked, one, axis) for one in (config, shortened(config)))
    own = config if whole is None else whole.config
    # A checkpoint that is packed already is taken as floats: what else it launches is compiled when it first is.
    sizes = EngineSizes.of(replace(asked, load_format="dummy"), own, torch.device("cuda"), limits, whole)
    sizes.packing.check_kernels("cuda", deterministic=asked.deterministic)
    check_gathered_heads(asked, own, "cuda")
    with as_if_launched(limits, note):
        part = _part(shard)
        _note_draws(own.vocab_size, sizes.pool.dtype, part)  # among them what takes longest to compile
        engine = _start(asked, shortened(config), sizes, shard)
        _note_embedded_prompts(engine.program, sizes)
        _note_scored_prompts(engine.program, config.hidden_size, sizes)
        _note_long_prompts(engine, sizes, asked)
        warm_up(engine.loop, engine.pages, config.vocab_size, sizes.captured.max_tokens)
        _note_logprobs(own.vocab_size, part)
    return engine


def shortened(config: ModelConfig) -> ModelConfig:
    """With as few layers as have a first, a last and one of each kind between: all others launch what these do."""
    kinds = config.layer_kinds
    kept = (0, *dict.fromkeys(kinds.index(kind) for kind in kinds), config.num_layers - 1)
    return config if len(kept) >= config.num_layers else config.with_layers(kept)


@contextmanager
def as_if_launched(limits: DeviceLimits, note: Callable[[Variant], None]) -> Iterator[None]:
    """Inside, work on the meta device tells `note` what it would launch on such a device."""
    with noting(target_of(limits), note), meta_means(limits), torch.inference_mode():
        yield


def _start(asked: EngineConfig, config: ModelConfig, sizes: EngineSizes, shard: RankShard | None) -> DryEngine:
    """All that an engine does before its warm-up. shard: of a rank, if there are several."""
    own = config if shard is None else shard.config
    with META:
        model = build(own, sizes.max_length).to(sizes.pool.dtype)
    limits = DeviceLimits.of(META)
    experts = expert_tables(shard, META) if shard is not None and asked.enable_eplb else None
    has_copies = asked.tensor_parallel_size == 2  # as `with_peer_copies` finds if the machine allows it
    copies = recognize(limits.product) if has_copies else None
    parts = asked.prefill_context_parallel_size
    context = Along(CONTEXT_AXIS, parts) if parts > 1 else None
    packed = Packing.of(asked.quantization, model, shard, sparsity=asked.sparsity, dtype=sizes.pool.dtype).planned
    sparse = attention_choice(asked, own, "cuda")
    target = Target(implementations_for(META), limits, copies, shard, experts, context, packed, sparse)
    program = StepProgram.of(model, replace(asked, executor="graph"), target, sizes)  # what is compared compiles itself
    if parts > 1:
        program = replace(program, division=TokenSharding.on("cuda", parts, 0))
    if asked.ranks > 1:
        _leave_messages_out(program, has_copies)
    if shard is not None:
        program = replace(program, part=_part(shard))
    groups = groups_of(asked, own, sizes.pool, sizes.max_length)
    pages = [asked.num_pages or _PAGES] * len(groups)
    held = books(groups, pages, asked.max_sequences, sizes.max_length, None if sizes.states is None else 0)
    kept = pools(groups, pages, own.num_layers, META)
    states = None if sizes.states is None else StatePool(sizes.states, asked.max_sequences + 1, META)
    runner = _NotingRunner(program, replace(sizes, groups=groups), own, kept, META, config.vocab_size, states)
    runner.capture(sizes.captured)
    scheduler_config = SchedulerConfig(asked.max_sequences, sizes.max_tokens, sizes.max_length, 0, None)
    scheduler = Scheduler(scheduler_config, held.pages, None, held.windows, held.snapshots)
    return DryEngine(program, EngineLoop(scheduler, runner, run_ahead=True, ledger=_NO_LEDGER), held.filled)


def _leave_messages_out(program: StepProgram, has_copies: bool) -> None:
    """Ranks that are not there answer no library: of its collectives only the shape of the result is made. has_copies:
    sums beside products arrive by copy engines."""
    for graph in program.graphs().values():
        for node in graph.graph.nodes:
            bound = node.meta.get("bound")
            if bound is not None and bound.operation.collective:
                is_copied = has_copies and bound.operation is start_all_reduce
                node.target = _start_copy if is_copied else _WithoutLibrary(bound)
                if bound.operation is join_heads:
                    node.target = _join_heads
        make_code(graph)


class _Copied(PendingSum):
    """As if the other rank had sent something."""

    def __init__(self, result: Tensor) -> None:
        object.__setattr__(self, "result", result)

    def received(self) -> Tensor:
        return torch.empty_like(self.result)


def _start_copy(x: Tensor, along: Along, slot: int) -> PendingSum:
    return _Copied(x)


def _join_heads(mixed: Tensor, along: Along, sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernels before and behind the message."""
    if not mixed.numel():
        empty: Tensor = join_heads.meta(mixed, along, sums, dtype)
        return empty
    return unpack_heads(pack_heads(mixed, sums, along.size), mixed.shape[2], dtype)


@dataclass(frozen=True, eq=False)
class _WithoutLibrary:
    """A collective that runs as bound if kernels of our own do all of it."""

    bound: Bound

    @property
    def __name__(self) -> str:  # of which torch.fx makes the graph's code
        return self.bound.__name__

    def __call__(self, *args: Any) -> Any:
        return self.bound.operation.meta(*args) if NCCL in self.bound.launches(*args) else self.bound(*args)


_NO_LEDGER = Ledger("meta", *(0,) * 11)


class _Unanswered(VocabularyShard):
    """Draws and log-probabilities of a rank, without the others."""

    def gather(self, columns: Tensor) -> Tensor:
        bound = all_gather.bind(implementations_for(columns.device))
        gathered: Tensor = _WithoutLibrary(bound)(columns, self.along, -1)
        return gathered


def _part(shard: RankShard | None) -> VocabularyShard | None:
    return None if shard is None or shard.attention_dp else _Unanswered.of(shard)


class _NotingRunner(Runner):
    """Draws the id 0 everywhere."""

    def _captured_graphs(self) -> CudaGraphStore:
        return _RunOnce()

    def _finish(
        self,
        plan: StepPlan,
        ids: Tensor,
        reported: LogprobTensors | None = None,
        prompt_logprobs: tuple[ScoredPrompt, ...] = (),
    ) -> Launched:
        return Launched(plan, torch.zeros(len(ids), dtype=torch.int32, device="cpu"))


class _RunOnce:
    """In the place of CUDA graphs: what would be captured is run, and nothing is replayed."""

    def capture_graph(
        self, key: object, run: Callable[[], None], between: Callable[[], None] = lambda: None, warm: bool = False
    ) -> None:
        run()

    def discard(self, keys: object) -> None: ...

    def replay(self, key: object) -> None: ...

    def lend(self, tensor: Tensor) -> Tensor:
        return tensor


def _note_long_prompts(engine: DryEngine, sizes: EngineSizes, asked: EngineConfig) -> None:
    """Prompts that take several steps, beside a decode and alone: later steps attend over what is cached."""
    longest = min(sizes.max_length, engine.pages.num_pages * sizes.pool.page_tokens) - _OUTPUTS
    sparse = 0 if asked.sparse_prefill is None else asked.sparse_prefill_min_keys
    most = max(3 * sizes.max_tokens, sparse)
    for number, length in enumerate((1, most, 2 * sizes.max_tokens + 101)):
        params = SamplingParams(max_tokens=_OUTPUTS, ignore_eos=True)
        engine.loop.add(Request(str(number), (0,) * min(length, longest), params))
        engine.loop.step()
    for _ in engine.loop.outputs():
        pass


def _note_draws(ids: int, dtype: torch.dtype, part: VocabularyShard | None) -> None:
    """From logits as they are and as they are edited, and their masks, which grammars give any number of words.

    ids: whose logits there are; part: of a rank, if there are several.
    """
    reals, numbers = (torch.zeros(2, dtype=kind, device=META) for kind in (torch.float32, torch.int32))
    inputs = DrawInputs(reals, numbers.long(), numbers, numbers, reals, reals)
    for kind in dict.fromkeys((dtype, torch.float32)):
        logits = torch.empty((2, ids), dtype=kind, device=META)
        for filtered in (True, False):
            draw_ids(logits, inputs, filtered, part)
        for words in (16, 17):
            masks = torch.zeros((2, words), dtype=torch.int32, device=META)
            Sampler(2, 1, META, part).mask(logits, (masks, numbers))


def _note_embedded_prompts(program: StepProgram, sizes: EngineSizes) -> None:
    """Prompts whose vectors are asked for, which are launched in all their lengths."""
    ends = torch.zeros(2, dtype=torch.int32, device=META)
    for tokens in _lengths(min(sizes.max_tokens, sizes.max_length)):
        numbers = torch.zeros(tokens, dtype=torch.int32, device=META)
        program.whole_prompts.forward(Batch(numbers, numbers, ends, tokens))


def _note_scored_prompts(program: StepProgram, hidden_size: int, sizes: EngineSizes) -> None:
    """Prompts whose log-probabilities are asked for: what gives the logits of any number of rows."""
    assert program.head is not None
    for rows in _lengths(PROMPT_LOGPROB_ROWS):
        program.head.forward(torch.empty((rows, hidden_size), dtype=sizes.pool.dtype, device=META))


def _note_logprobs(ids: int, part: VocabularyShard | None) -> None:
    for rows in _lengths(PROMPT_LOGPROB_ROWS):
        logits = torch.empty((rows, ids), dtype=torch.float32, device=META)
        Sampler(rows, 1, META, part).logprobs(logits, torch.zeros(rows, dtype=torch.int32, device=META), 1)


def _lengths(longest: int) -> Iterator[int]:
    """Around each power of two: kernels have tiles for numbers of rows, and variants for multiples of 16."""
    for power in range(longest.bit_length() + 1):
        yield from sorted({length for length in ((1 << power) - 1, 1 << power, 3 << power) if 0 < length <= longest})
