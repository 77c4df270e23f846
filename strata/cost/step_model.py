"""How long the steps of a program take on a device, by the graphs that run them and all that was measured there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from strata.cost.attention_times import Attends
from strata.cost.evidence import Evidence, attainable, evidence_of
from strata.cost.nodes import NodeCost
from strata.cost.predict import StepPredictor
from strata.cost.step_costs import StepCosts
from strata.hardware.figures import Device
from strata.hardware.links import Link, known_link, link_of
from strata.hardware.prediction import Prediction
from strata.hardware.roofline import Cost, Floor, Workload, floor
from strata.kernels.device_limits import DeviceLimits

# One token behind so many others that windows are full.
_REACH = 1 << 30
_NEAR, _FAR = Workload((1,), (_REACH,)), Workload((1,), (2 * _REACH,))
# How finely sizes of steps that no graph holds are told apart: an octave in 2^3 parts.
_STEPS_OF_OCTAVE = 3


@dataclass(frozen=True)
class StepNodes:
    """What the nodes of one step cost, and what runs them.

    graph: the name of the variant that computes the logits. inputs, model, draw: in the order in which they run.
    captured: whether the engine replays them from a CUDA graph. timed: all of them with what they
    do at the size to which the step is padded, but for attention, to which padding brings no keys.
    """

    graph: str
    inputs: list[NodeCost]
    model: list[NodeCost]
    draw: list[NodeCost]
    captured: bool
    timed: list[NodeCost]

    @property
    def nodes(self) -> list[NodeCost]:
        """All, as they run."""
        return [*self.inputs, *self.model, *self.draw]

    @property
    def kernels(self) -> list[str]:
        """The kernels of the step in order: those of Strata by name, a library's by the library."""
        return [kernel for node in self.nodes for kernel in node.kernels]


class CostedProgram(Protocol):
    """What the steps of a program run, and what their nodes cost (see `strata.engine.program.meta_model.MetaModel`).

    dtype: of the model. limits: of the device; None of a processor. ranks: that divide matrices. splits_tokens: ranks
    divide those of steps. is_stage: others have its other layers.
    """

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def limits(self) -> DeviceLimits | None: ...
    @property
    def ranks(self) -> int: ...
    @property
    def splits_tokens(self) -> bool: ...
    @property
    def is_stage(self) -> bool: ...
    @property
    def step_costs(self) -> StepCosts: ...
    def choose(self, workload: Workload) -> Any: ...
    def step(self, workload: Workload) -> StepNodes: ...
    def attends(self, workload: Workload, choice: Any) -> Attends | None: ...


class _Kind(NamedTuple):
    """Steps that take as long outside attention. size: as captured, by which all follows; None: by tokens and
    sequences. has_decodes: some sequences have one token."""

    size: Hashable | None
    has_decodes: bool
    tokens: int = 0
    sequences: int = 0


class StepModel:
    """Predicts steps of a model, of one rank of several if the model is a shard.

    `predict` prices all nodes of the graph that would run. `seconds` keeps what is outside attention and recurrences,
    which follows from the captured size or from the number of tokens, and asks those alone anew, so that millions of
    steps can be asked for.
    """

    def __init__(
        self,
        model: CostedProgram,
        device: Device,
        *,
        needs_link: bool = True,
        evidence: Evidence | None = None,
        link: Link | None = None,
    ) -> None:
        """evidence: None: what this machine has. link: between the ranks; None: the device's. Raises ValueError for a
        device without a peak for the model's dtype, and for ranks without a known link, whose messages take no time if
        it is not needed."""
        found = evidence or evidence_of(device)
        self.model = model
        self.device = found.device
        self.sources = found.sources
        self.dtype = dtype_name(model.dtype)
        divides = model.ranks > 1 or model.splits_tokens
        self.link = link
        if link is None and (divides or model.is_stage):
            self.link = link_of(self.device) if needs_link and divides else known_link(self.device)
        if not found.calls and model.limits is not None:
            found = replace(found, device=attainable(self.device))
        predictor = StepPredictor.of(found, self.dtype, self.link, model.ranks)
        # What launches beside a GPU was measured there; a processor runs what it would launch.
        self.predictor = predictor if model.limits is not None else replace(predictor, launch=0.0)
        # What a kind of step takes outside attention and recurrences, in seconds: its nodes, and the host's launches.
        self._bases: dict[_Kind, tuple[float, float]] = {}

    @property
    def costs(self) -> StepCosts:
        return self.model.step_costs

    def predict(self, workload: Workload) -> Prediction:
        """A step that samples a row of each sequence, those of one token first."""
        step = self.model.step(workload)
        return self.predictor.step(step.timed, workload, captured=step.captured)

    def seconds(self, workload: Workload) -> float:
        """The same, within rounding of what it keeps: steps that no graph holds are asked for at sizes an eighth of an
        octave apart, and lie on the line between them."""
        if self.model.splits_tokens:
            return self.predict(workload).seconds
        return max(self._parts(workload))

    def on_device(self, workload: Workload) -> float:
        """The same without waiting for the host."""
        return self._parts(workload)[0]

    def _parts(self, workload: Workload) -> tuple[float, float]:
        """Seconds of the device, and of the host's launches."""
        choice = self.model.choose(workload)
        attention, size = self._attention(workload, choice), choice.size
        if size is not None:
            nodes, launches = self._base(_Kind(size, 1 in workload.new), workload)
            return nodes + attention, launches
        low, high = self._grid(workload)
        (below, launches), (above, _) = (self._eager(workload, tokens) for tokens in (low, high))
        share = 0.0 if high == low else (workload.tokens - low) / (high - low)
        return below + share * (above - below) + attention, launches

    def saved(self, distinct: int, repeated: int) -> float:
        """Seconds that the decodes of a step take less because they share keys: of those that several read, `distinct`
        are read once at least, and `repeated` beyond that. Nothing of layers whose attention is not priced by its
        programs, of windows, and on devices of whose L2 cache nothing is known."""
        times, cache = self.predictor.attention_times, self.device.known("l2")
        if times is None or cache is None or not repeated:
            return 0.0
        return sum(
            layers * times.saved(distinct * nbytes, repeated * nbytes, cache.value)
            for nbytes, layers in self._key_bytes
        )

    def floor(self, workload: Workload) -> Floor:
        """The least that the step needs: weights, keys and values moved once, and its products."""
        return floor(self.costs.step(workload, len(workload.new)), self.device, self.dtype, self.link)

    def copy_seconds(self, nbytes: int) -> float:
        """To copy so many bytes in memory."""
        return floor(Cost(read=nbytes, written=nbytes), self.device, self.dtype).seconds

    @property
    def around(self) -> float:
        """What a step takes beside its nodes: copies of inputs and ids, its start, and until the next begins."""
        return self.predictor.launches(0)

    def attention(self, workload: Workload) -> float:
        """Seconds of the attention and the recurrences of all layers."""
        return self._attention(workload, self.model.choose(workload))

    @cached_property
    def _key_bytes(self) -> list[tuple[float, int]]:
        """Bytes of a key with its value, and how many layers keep those of all tokens and attend by known programs."""
        times, attends = self.predictor.attention_times, self.model.attends(_NEAR, self.model.choose(_NEAR))
        if times is None or attends is None:
            return []
        found = []
        for cost, layers in self.costs.attentions:
            near, far = cost(_NEAR), cost(_FAR)
            nbytes = (far.cached - near.cached) / _REACH  # none behind a window
            if nbytes and times.seconds(near, _NEAR, attends) is not None:
                found.append((nbytes, layers))
        return found

    def _attention(self, workload: Workload, choice: Any) -> float:
        attends = self.model.attends(workload, choice)
        costs, predictor = self.costs, self.predictor
        attention = sum(
            layers * predictor.attention(cost(workload), workload, attends).seconds for cost, layers in costs.attentions
        )
        return attention + sum(
            layers * predictor.recurrence(cost(workload)).seconds for cost, layers in costs.recurrences
        )

    def _grid(self, workload: Workload) -> tuple[int, int]:
        """The sizes about that of a step which no graph holds: its own where a graph holds one of them."""
        tokens = workload.tokens
        octave = 1 << max(0, tokens.bit_length() - 1 - _STEPS_OF_OCTAVE)
        low = tokens // octave * octave
        high = low if low == tokens else low + octave
        if any(self.model.choose(_resized(workload, one)).size is not None for one in (low, high)):
            return tokens, tokens
        return low, high

    def _eager(self, workload: Workload, tokens: int) -> tuple[float, float]:
        resized = _resized(workload, tokens)
        return self._base(_Kind(None, 1 in resized.new, tokens, len(resized.new)), resized)

    def _base(self, kind: _Kind, workload: Workload) -> tuple[float, float]:
        """Of all steps of the kind that `workload` is one of."""
        if kind not in self._bases:
            step = self.model.step(workload)
            whole = self.predictor.step(step.timed, workload, captured=True).seconds
            launches = 0.0 if step.captured else self.predictor.launches(len(step.timed))
            self._bases[kind] = whole - self.attention(workload), launches
        return self._bases[kind]


def _resized(workload: Workload, tokens: int) -> Workload:
    """About the same sequences with so many new tokens in all: as many decodes, as many prompts in equal parts."""
    decodes = sum(1 for new in workload.new if new == 1)
    prompts = len(workload.new) - decodes
    if not prompts:
        return Workload((1,) * tokens, (1,) * tokens)
    decodes = min(decodes, max(0, tokens - 2))
    prompts = max(1, min(prompts, (tokens - decodes) // 2))
    each, more = divmod(tokens - decodes, prompts)
    new = (1,) * decodes + (each + 1,) * more + (each,) * (prompts - more)
    return Workload(new, new)


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which the device database lists a dtype."""
    return str(dtype).removeprefix("torch.")
