"""What the steps of an engine cost and how long they take, from its own graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from strata.cache.pool import PoolShape
from strata.cache.state_pool import StateShape, meta_states
from strata.cache.tables import BufferShape
from strata.comm.mesh import Axis
from strata.cost.step_costs import StepCosts, step_costs
from strata.cost.step_floor import StepFloor
from strata.cost.step_times import LINK, MESSAGE_SECONDS, DivisionTimes, StepTimes
from strata.engine.engine_config import EngineConfig
from strata.engine.program.program import StepProgram
from strata.engine.program.sizes import LIBRARY_KEYS
from strata.engine.ranks.token_division import TokenDivision
from strata.engine.scheduling.room import StepTarget
from strata.engine.watch.step_shares import StepShares
from strata.graph.buffers import CUDA_BLOCK, BufferPlan, buffer_plan
from strata.graph.walk import meta_indices, meta_pages
from strata.hardware.figures import Device
from strata.hardware.links import Link, link_of
from strata.hardware.probe.device import device_of
from strata.hardware.probe.report import kept, newest
from strata.hardware.roofline import Workload
from strata.hardware.specs import recognize
from strata.kernels.device_limits import DeviceLimits
from strata.models.batch import Batch


def step_times(
    program: StepProgram, shape: PoolShape, product: str, recorded: int, states: StateShape | None = None
) -> StepTimes | None:
    """How long steps take on a device by the name that its driver reports; None where its peaks are not known.

    recorded: tokens of the largest step with prompts that a CUDA graph holds. states: of layers with fixed ones.

    Nothing is computed: the graphs are looked at with shapes alone.
    """
    device = recognize(product)
    if device is None:
        return None
    dtype = str(shape.dtype).removeprefix("torch.")
    costs = least_costs(program, shape, states)
    try:
        overlapped = program.min_rows("overlapped_logits") if program.sends_by_copies else 0
        return StepTimes.of(costs, device, dtype, recorded, _link(device) if costs.messages else None, overlapped)
    except ValueError:  # no peak is recorded for the dtype
        return None


def step_target(
    asked: EngineConfig, times: StepTimes | None, tokens: Sequence[int], sizes: Iterable[BufferShape]
) -> StepTarget | None:
    """What limits steps with decodes; None if nothing does, or the device's peaks are not known. tokens: to which steps
    with prompts are padded, ascending. sizes: that are recorded."""
    if times is None or asked.tpot_target_ms is None:
        return None
    seconds = asked.tpot_target_ms / 1e3 / asked.pipeline_parallel_size  # stages are alike, and a token passes them all
    library = min((size.tokens for size in sizes if size.prompts is not None and not size.fresh), default=None)
    padded = None if library is None else (LIBRARY_KEYS, library)
    return StepTarget(seconds, times, tuple(tokens), asked.ttft_target_ms / 1e3, padded)


def step_shares(
    program: StepProgram, shape: PoolShape, product: str, times: StepTimes | None, states: StateShape | None
) -> StepShares:
    """The floors of steps on a device: by what a probe of this machine found, else by the database. times: how long its
    steps take, if that is known."""
    device = known_here(product)
    if device is None:
        return StepShares(times)
    costs = least_costs(program, shape, states)
    dtype = str(shape.dtype).removeprefix("torch.")
    try:
        return StepShares(times, StepFloor.of(costs, device, dtype, _link(device) if costs.messages else None))
    except ValueError:  # no peak is recorded for the dtype
        return StepShares(times)


def known_here(product: str) -> Device | None:
    """A device by the name that its driver or system reports, with what `strata probe` has found on this machine."""
    path = newest(product)
    if path is not None:
        try:
            return device_of(kept(path))
        except ValueError:  # of another version
            pass
    return recognize(product)


def _link(device: Device) -> Link | None:
    """Between several of a device; None where none is known."""
    try:
        return link_of(device)
    except ValueError:
        return None


def token_division(
    program: StepProgram,
    shape: PoolShape,
    context: Axis,
    kind: str,
    product: str | None,
    recorded: int,
    divided: int,
) -> TokenDivision:
    """How the ranks along `context` divide the tokens of steps, and which. kind: of the device, "cuda" or "cpu";
    product: what runs the own kernels, None: nothing does. recorded: see `step_times`; divided: the same of steps that
    ranks divide."""
    division = TokenDivision.on(kind, context.size, context.index)
    if product is None:
        return division
    found, known = step_times(program, shape, product, recorded), recognize(product)
    link = _link(known) if known is not None else None
    if found is None or link is None:
        return division
    token = shape.page_bytes // shape.page_size // shape.layers
    message, way = link.seconds(context.size - 1, 0) + MESSAGE_SECONDS, token / (link.bandwidth * LINK)
    sent = shape.layers * message, shape.layers * way
    return replace(division, times=replace(found, division=DivisionTimes(context.size, division.least, *sent, divided)))


def least_costs(program: StepProgram, shape: PoolShape, states: StateShape | None) -> StepCosts:
    """The least that steps of a model cost whose keys and values lie in such pages. states: of layers with fixed
    ones."""
    return step_costs(program.logits, lambda tokens, rows: (_one_token_each(shape, states, tokens), meta_indices(rows)))


def planned_buffers(
    program: StepProgram,
    shape: PoolShape,
    states: StateShape | None,
    tokens: int,
    rows: int,
    limits: DeviceLimits | None,
) -> BufferPlan:
    """Of a step that is one prompt of so many tokens and projects so many rows onto the vocabulary. limits: of the CUDA
    device on which it runs; None: on a CPU."""
    batch = _meta_batch(shape, states, Workload((tokens,), (tokens,)))
    block = 1 if limits is None else CUDA_BLOCK
    variant = program.replayed(BufferShape(tokens, tokens + 1, rows))
    return buffer_plan(variant.graph, (batch, meta_indices(rows)), limits, block)


def _one_token_each(shape: PoolShape, states: StateShape | None, sequences: int) -> Batch:
    return _meta_batch(shape, states, Workload((1,) * sequences, (1,) * sequences))


def _meta_batch(shape: PoolShape, states: StateShape | None, workload: Workload) -> Batch:
    sequences = len(workload.new)
    pages = meta_pages(
        workload,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        page_size=shape.page_size,
        rounded=shape.rounded,
        kept=shape.kept,
    )
    tokens = meta_indices(workload.tokens)
    offsets = meta_indices(sequences + 1)
    return Batch(tokens, tokens, offsets, max(workload.new), pages, states=meta_states(states, sequences))
