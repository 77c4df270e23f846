"""What the steps of an engine cost and how long they take, from its own graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from strata.cache.tables import BufferShape
from strata.comm.mesh import Axis
from strata.cost.evidence import evidence_of
from strata.cost.linear import linear, linear_floor
from strata.cost.step_model import StepModel, dtype_name
from strata.cost.step_times import LINK, MESSAGE_SECONDS, ShardingTimes, StepTimes
from strata.engine.engine_config import EngineConfig
from strata.engine.program.meta_model import MetaModel
from strata.engine.program.sizes import LIBRARY_KEYS
from strata.engine.ranks.prefill_context_parallel import TokenSharding
from strata.engine.scheduling.prompt_budget import StepTarget
from strata.engine.watch.step_shares import StepShares
from strata.hardware.figures import Device
from strata.hardware.links import known_link
from strata.hardware.probe.device import device_of
from strata.hardware.probe.report import kept, newest
from strata.hardware.specs import recognize


def step_times(model: MetaModel, product: str, captured: int) -> StepTimes | None:
    """How long steps take on a device by the name that its driver reports; None where its peaks are not known.

    captured: tokens of the largest step with prompts that a CUDA graph holds.

    Nothing is computed: the graphs are looked at with shapes alone.
    """
    device = recognize(product)
    if device is None:
        return None
    program = model.program
    undivided = replace(model, program=replace(program, division=None)) if model.splits_tokens else model
    overlapped = program.min_rows("overlapped_logits") if program.sends_by_copies else 0
    try:
        found = evidence_of(device, must_read=False)
        exact = StepModel(undivided, device, needs_link=False, evidence=found)
        sizes = model.sizes
        return linear(exact, sizes.max_tokens, sizes.max_sequences, sizes.max_length, captured, overlapped)
    except ValueError:  # no peak is recorded for the dtype
        return None


def step_target(
    asked: EngineConfig, times: StepTimes | None, tokens: Sequence[int], sizes: Iterable[BufferShape]
) -> StepTarget | None:
    """What limits steps with decodes; None if nothing does, or the device's peaks are not known. tokens: to which steps
    with prompts are padded, ascending. sizes: that are captured."""
    if times is None or asked.tpot_target_ms is None:
        return None
    seconds = asked.tpot_target_ms / 1e3 / asked.pipeline_parallel_size  # stages are alike, and a token passes them all
    library = min((size.tokens for size in sizes if size.prompts is not None and not size.pure_prefill), default=None)
    padded = None if library is None else (LIBRARY_KEYS, library)
    return StepTarget(seconds, times, tuple(tokens), asked.ttft_target_ms / 1e3, padded)


def step_shares(model: MetaModel, product: str, times: StepTimes | None) -> StepShares:
    """The floors of steps on a device: by what a probe of this machine found, else by the database. times: how long its
    steps take, if that is known."""
    device = known_here(product)
    if device is None:
        return StepShares(times)
    costs = model.step_costs
    try:
        link = known_link(device) if costs.messages else None
        return StepShares(times, linear_floor(costs, device, dtype_name(model.dtype), link))
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


def token_sharding(model: MetaModel, context: Axis, kind: str, product: str | None) -> TokenSharding:
    """How the ranks along `context` divide the tokens of steps, and which. kind: of the device, "cuda" or "cpu";
    product: what runs the own kernels, None: nothing does."""
    division = TokenSharding.on(kind, context.size, context.index)
    if product is None:
        return division
    shape, sizes = model.sizes.pool, model.sizes
    found, known = step_times(model, product, sizes.captured.max_tokens), recognize(product)
    link = known_link(known) if known is not None else None
    if found is None or link is None:
        return division
    token = shape.page_bytes // shape.page_size // shape.layers
    message, way = link.seconds(context.size - 1, 0) + MESSAGE_SECONDS, token / (link.bandwidth * LINK)
    most = max(sizes.captured.sharded_tokens, default=0)
    times = ShardingTimes(context.size, division.min_tokens, shape.layers * message, shape.layers * way, most)
    return replace(division, times=replace(found, division=times))
