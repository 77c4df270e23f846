"""The least that a run's arithmetic and its update take on its device, and what its layout is predicted to add."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.cost.evidence import evidence_of
from strata.hardware.figures import Device
from strata.hardware.machine import cpu_name, processor
from strata.hardware.specs import recognize
from strata.plan.explain.ceilings import processor_device
from strata.plan.explain.explanation import Peaks
from strata.plan.training_explain.recorded_run import RecordedRun
from strata.train.log.description import RunDescription
from strata.train.predict.estimate import step_shape
from strata.train.predict.min_time import TrainingStepTime, predicted_time
from strata.train.predict.step_shape import TrainShape

# Of a parameter in an update: AdamW reads master, moments and gradient and writes all but that; Muon has one moment.
_UPDATE_BYTES = {"adamw": 28, "muon": 20}
# What fits into caches may be updated faster than memory allows. Processors have so much at least.
_CACHED = 64 << 20


@dataclass(frozen=True)
class RunFloor:
    """Of all steps of a run, in seconds. products: with the head. bytes: that the update moves.

    messages, bubble, again: what messages that nothing hides, waiting for other stages, and computing activations again
    are predicted to add; 0 where that is not known. likely: a step with full packs, None on a processor and where
    nothing tells. peaks: of the device in the run's dtype.
    """

    device: Device
    shape: TrainShape
    products: float
    attention: float
    update: float
    bytes: int
    peaks: Peaks
    messages: float = 0.0
    bubble: float = 0.0
    again: float = 0.0
    likely: TrainingStepTime | None = None
    sources: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.update


def run_floor(run: RecordedRun) -> RunFloor:
    """Raises ValueError for a device of which nothing is known here."""
    what = run.what
    device, sources = _device(what)
    shape = step_shape(what.config, what.model, what.layout)
    on_gpu = what.kind == "cuda"
    wide = device.ceiling("compute", "bfloat16" if on_gpu else "float32").value
    narrow = device.ceiling("compute", "float8").value if shape.precision != "bf16" else wide
    bandwidth = device.ceiling("bandwidth").value
    ranks, flops = what.layout.ranks, run.whole.flops
    moved = run.whole.steps * _update_bytes(what, shape)
    update = moved / bandwidth
    if not on_gpu and moved <= run.whole.steps * _cache_bytes(what, device):
        update = 0.0
    found = RunFloor(
        device,
        shape,
        (flops.products / narrow + flops.head / wide) / ranks,
        flops.attention / wide / ranks,
        update,
        moved,
        Peaks(wide, bandwidth),
        sources=sources,
    )
    return _with_layout(found, run) if on_gpu else found


def likely_time(shape: TrainShape, recompute: str, device: Device) -> TrainingStepTime | None:
    """`predicted_time`, where link, rates and precision are known."""
    try:
        return predicted_time(shape, recompute, device)
    except (ValueError, KeyError):
        return None


def _device(what: RunDescription) -> tuple[Device, tuple[str, ...]]:
    known, measured = recognize(what.device), tuple[str, ...]()
    if what.kind == "cpu" and what.device == cpu_name():
        known, measured = processor_device()
    if known is None:
        raise ValueError(
            f"the run was on {what.device!r}, of which nothing is known here; explain it on that machine, after "
            f"`strata probe`"
        )
    found = evidence_of(known)
    return found.device, (*measured, *found.sources) or (f"the database's figures of {known.product}",)


def _update_bytes(what: RunDescription, shape: TrainShape) -> int:
    """Of a step, on the rank that updates most. Adapters are small, and not counted."""
    if what.config.lora is not None:
        return 0
    return max(map(shape.updated, shape.local_parameters)) * _UPDATE_BYTES[what.config.optimizer.name]


def _cache_bytes(what: RunDescription, device: Device) -> int:
    known = device.known("l3")
    found = [_CACHED, 0 if known is None else int(known.value)]
    if what.device == cpu_name():
        found += processor().caches.values()
    return max(found)


def _with_layout(found: RunFloor, run: RecordedRun) -> RunFloor:
    """With what the layout adds, as far as it is predicted; packs that are not full have less of it."""
    recompute = run.what.recompute
    likely = likely_time(found.shape, recompute, found.device)
    kept = likely_time(found.shape, found.shape.recomputes[0], found.device)
    if likely is None or kept is None:
        return found
    again = sum(getattr(likely, name) - getattr(kept, name) for name in ("products", "attention", "traffic"))
    return replace(
        found,
        messages=run.whole.steps * likely.communication,
        bubble=run.whole.steps * likely.bubble * run.filled,
        again=run.whole.steps * max(0.0, again) * run.filled,
        likely=likely,
        sources=(*found.sources, f"a step of this layout predicted, {likely.origin}"),
    )
