"""The search for the best way to serve a model: every layout, and of its steps a few that are priced."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter

import torch

from strata.engine.ledger import GIB
from strata.engine.scheduling.prompt_budget import SERVER_TPOT_MS
from strata.models.config import ModelConfig
from strata.plan.search.batching import Batching, LoadPoint, at_concurrency, at_rate
from strata.plan.search.choice import ServingChoice, Settings
from strata.plan.search.layer_prices import LayerPrices
from strata.plan.search.layout import ServingLayout, layouts
from strata.plan.search.machine import Machine
from strata.plan.search.memory import Memory, needed_tokens
from strata.plan.search.precision import AS_CHECKPOINT, IN_FEWER_BITS, Precision
from strata.plan.search.step_table import Anchors, StepTable
from strata.plan.search.traffic import Objectives, Traffic
from strata.text.counted import counted

# What is tried of an engine: sequences at once, most tokens of a step, milliseconds that one may take (0: no target).
SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 1000)
BUDGETS = (8192, 2048, 4096, 16384)
TARGETS = (SERVER_TPOT_MS, 0.0)
# Of tokens a second, as a logarithm: what is closer is told apart by latency, and not by how well steps are predicted.
_ALIKE = 0.005
# Of the room that steps have for prompts: if more is taken, these wait for each other.
_FULL = 0.9


@dataclass(frozen=True)
class Question:
    """What is planned. dtype: of weights, keys and values that are not in fewer bits. devices: how many there are.
    precision: of the best; if it is the checkpoint's, others are looked at beside it."""

    model: str
    config: ModelConfig
    dtype: torch.dtype
    machine: Machine
    devices: int
    traffic: Traffic
    objectives: Objectives
    precision: Precision = AS_CHECKPOINT


@dataclass(frozen=True)
class SearchResult:
    """best: the most tokens a second of those that Strata runs; if it runs none that fits, of those that lack the
    least. others: the best of each other layout that it runs. packed: of each precision in fewer bits. refused: such
    precisions, and why the engine has them in no layout. blocked: the best with each thing that Strata lacks. seen: all
    that were priced, whether or not they meet the objectives.
    """

    best: ServingChoice
    others: tuple[ServingChoice, ...]
    packed: tuple[ServingChoice, ...]
    refused: tuple[tuple[Precision, str], ...]
    blocked: tuple[ServingChoice, ...]
    seen: tuple[ServingChoice, ...]


class Search:
    """Keeps what was priced."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.memory = Memory(question.config, question.machine, question.traffic, question.model)
        asked = question.precision
        self.precisions = (asked, *(() if asked.options else IN_FEWER_BITS))
        self.why_not = cache(self._why_not)
        self._anchors: dict[ServingLayout, Anchors] = {}
        self._tables: dict[tuple[ServingLayout, Precision], StepTable] = {}

    def run(self) -> SearchResult:
        """Raises ValueError if the model fits on no layout of the devices, or none is quick enough."""
        fitting = self.fitting()
        self._check_floors(fitting)
        seen = [choice for layout, precision in fitting for choice in self.choices(layout, precision)]
        meeting = [choice for choice in seen if self.meets(choice)]
        asked, others = self.question.precision, best_of_each((one for one in meeting if not one.blocked), _precision)
        looked_at = (self._by_own_graphs(one) for one in others if _precision(one) != asked)
        packed = best_of_each(chain.from_iterable(looked_at), _precision)
        as_asked = [choice for choice in meeting if _precision(choice) == asked]
        runs = best_of_each((choice for choice in as_asked if not choice.blocked), attrgetter("settings.layout"))
        blocked = best_of_each((choice for choice in as_asked if choice.blocked), attrgetter("blocked"))
        running = [choice for choice in seen if not choice.blocked and _precision(choice) == asked]
        if not as_asked or (running and not runs):
            raise ValueError(too_slow(self.question, running or seen, blocked, packed))
        best = runs[0] if runs else min(blocked, key=lambda one: (len(one.blocked), rank(one)))
        best = replace(best, binds=self.binds(best))
        blocked = [one for one in blocked if one.settings != best.settings]
        refused = [(one, self._refused(one, fitting)) for one in self.precisions]
        told = tuple((one, why) for one, why in refused if why is not None)
        return SearchResult(best, tuple(runs[1:]), tuple(packed), told, tuple(blocked), tuple(seen))

    def _by_own_graphs(self, choice: ServingChoice) -> list[ServingChoice]:
        """Of the layout in the precision of a choice all settings that meet the objectives, as a plan that asks for the
        precision prices them."""
        layout, precision = choice.settings.layout, choice.settings.precision
        own = Search(replace(self.question, precision=precision))
        return [one for one in own.choices(layout, precision) if own.meets(one)]

    def fitting(self) -> list[tuple[ServingLayout, Precision]]:
        """What has room for a sequence at least. Raises ValueError, with the bytes that are missing, if nothing has."""
        possible = [layout for layout in self._layouts(self.question.devices) if self._is_linked(layout)]
        asked = self.question.precision
        taken = [layout for layout in possible if self.why_not(layout, asked) is None]
        if not taken:
            why = self.why_not(possible[0], asked)
            raise ValueError(f"{self.question.model} is served in {asked.name} on no layout of the devices: {why}")
        near = [layout for layout in taken if layout.ranks <= self.question.machine.per_host]
        if any(not self.lacking(layout, asked) for layout in near):
            # Stages on several hosts are for what one host has no room for; experts gain by more of them.
            possible = [layout for layout in possible if layout in near or layout.attention_dp]
        elif all(self.lacking(layout, asked) for layout in taken):
            raise ValueError(self._does_not_fit(taken))
        pairs = ((layout, precision) for layout in possible for precision in self.precisions)
        return [(layout, precision) for layout, precision in pairs if self._fits(layout, precision)]

    def _fits(self, layout: ServingLayout, precision: Precision) -> bool:
        return self.why_not(layout, precision) is None and not self.lacking(layout, precision)

    def _why_not(self, layout: ServingLayout, precision: Precision) -> str | None:
        """Why the engine refuses a precision on a layout; None if it does not."""
        try:
            self.memory.rank_memory(layout, 1, min(BUDGETS), precision)
        except ValueError as error:
            return str(error)
        return None

    def _refused(self, precision: Precision, fitting: list[tuple[ServingLayout, Precision]]) -> str | None:
        """Why the engine refuses a precision on every layout that fits in any; None if it does not."""
        reasons = [self.why_not(layout, precision) for layout, _ in fitting]
        return None if None in reasons else reasons[0]

    def lacking(self, layout: ServingLayout, precision: Precision) -> int:
        """Bytes of a device that are missing for one sequence of the longest request."""
        held = self.memory.rank_memory(layout, 1, min(BUDGETS), precision)
        return held.lacking(self.question.traffic.longest)

    def choices(self, layout: ServingLayout, precision: Precision) -> Iterator[ServingChoice]:
        """All settings of a layout whose sequences have room; of precisions that were not asked for a server's."""
        ways = [(budget, target) for budget in BUDGETS for target in TARGETS]
        for way, (budget, target) in enumerate(ways if precision == self.question.precision else ways[:1]):
            for sequences in SEQUENCES:
                choice = self.choice(Settings(layout, precision, sequences, budget, target))
                # More sequences take no less time for a token; the first way shows how much.
                if choice is None or (way and choice.point.tpot > (self.question.objectives.tpot or math.inf)):
                    break
                yield choice

    def choice(self, settings: Settings) -> ServingChoice | None:
        """What settings are predicted to give; None if their sequences do not fit."""
        question, layout = self.question, settings.layout
        held = self.memory.rank_memory(layout, settings.sequences, settings.budget, settings.precision)
        need = needed_tokens(question.traffic, settings.sequences, held.page_size)
        if held.tokens < max(need, question.traffic.longest):
            return None
        table, batching = self.table(layout, settings.precision), _batching(settings)
        point = at_concurrency(table.seconds, question.traffic, batching, settings.sequences * batching.ranks)
        replicas = layout.replicas(question.devices, question.machine.per_host)
        analytic = table.analytic(point.decoding / batching.stages / batching.ranks, point.chunk, point.prompt_steps)
        return ServingChoice(settings, replicas, point, held, question.traffic.output, self.blocked(layout), analytic)

    def at_rate(self, choice: ServingChoice, rate: float) -> LoadPoint | None:
        """An engine of several that share so many requests a second; None if they are more than these end."""
        settings, batching = choice.settings, _batching(choice.settings)
        table, most = self.table(settings.layout, settings.precision), settings.sequences * batching.ranks
        return at_rate(table.seconds, self.question.traffic, batching, rate / choice.replicas, most)

    def blocked(self, layout: ServingLayout) -> tuple[str, ...]:
        """Why Strata cannot run it yet; nothing if it can."""
        machine, found = self.question.machine, []
        if not machine.runs:
            found.append("kernels")
        if layout.ranks > machine.per_host:
            found.append("engines on several hosts")
        return tuple(found)

    def meets(self, choice: ServingChoice) -> bool:
        """The objectives."""
        wanted, point = self.question.objectives, choice.point
        return point.ttft <= (wanted.ttft or math.inf) and point.tpot <= (wanted.tpot or math.inf)

    def table(self, layout: ServingLayout, precision: Precision) -> StepTable:
        """Times of the layout's steps."""
        key = layout, precision
        if key not in self._tables:
            self._tables[key] = StepTable(self.anchors(layout), self.question.config, layout, precision)
        return self._tables[key]

    def anchors(self, layout: ServingLayout) -> Anchors:
        """Stages of a pipeline share them."""
        whole = replace(layout, stages=1)
        if whole not in self._anchors:
            question = self.question
            asked = question.precision
            prices = LayerPrices(question.config, question.machine, whole, question.dtype, asked)
            decodes = None if whole.context == 1 else self.anchors(replace(whole, context=1))
            allowed = [one for one in self.precisions if self.why_not(layout, one) is None]
            self._anchors[whole] = Anchors(prices, question.traffic, allowed, decodes)
        return self._anchors[whole]

    def _check_floors(self, fitting: list[tuple[ServingLayout, Precision]]) -> None:
        """Raises ValueError for objectives below the floor of a prompt, or of a token alone, on every layout."""
        question, wanted, steps = self.question, self.question.objectives, {"ttft": (0, self._prompt), "tpot": (1, 0)}
        floors: dict[str, tuple[float, Precision]] = {}
        for name in (name for name in steps if getattr(wanted, name) is not None):
            each = ((self.table(layout, one).price(*steps[name]).bounds.seconds, one) for layout, one in fitting)
            floors[name] = min(each, key=itemgetter(0))
        where = f"{question.model} on {question.devices} x {question.machine.listed.key}"
        if (below := below_floors(wanted, floors, where)) is not None:
            raise ValueError(below)

    @property
    def _prompt(self) -> int:
        """Tokens of a mean one that are computed, two at least: a step of one decodes."""
        return max(2, round(self.question.traffic.computed))

    def binds(self, choice: ServingChoice) -> str:
        """What keeps an engine from more sequences at once."""
        settings = choice.settings
        at = SEQUENCES.index(settings.sequences) + 1
        if at == len(SEQUENCES):
            return f"most sequences that are tried at once, {SEQUENCES[-1]}"
        more = self.choice(replace(settings, sequences=SEQUENCES[at]))
        if more is None:
            return "memory for keys and values" + ", and for states" * bool(choice.held.state_bytes)
        wanted = self.question.objectives
        if more.point.tpot > (wanted.tpot or math.inf):
            return "the objective of TPOT"
        if more.point.ttft > (wanted.ttft or math.inf):
            return "the objective of TTFT"
        if more.point.filled > _FULL:
            return "prompts, which take all the room of steps"
        return "the time of steps: with more sequences they take longer, and tokens come no faster"

    def _layouts(self, devices: int) -> Iterator[ServingLayout]:
        question = self.question
        found = layouts(question.config, devices, question.machine.per_host)
        # Ranks that divide prompts all decode: what they win is the first token.
        return (one for one in found if one.context == 1 or question.objectives.ttft is not None)

    def _is_linked(self, layout: ServingLayout) -> bool:
        """Whether the link between the ranks is known."""
        try:
            self.question.machine.link(layout.ranks)
        except ValueError:
            return False
        return True

    def _does_not_fit(self, possible: list[ServingLayout]) -> str:
        question = self.question
        asked = question.precision
        missing, layout = min(((self.lacking(one, asked), one) for one in possible), key=lambda pair: pair[0])
        held = self.memory.rank_memory(layout, 1, min(BUDGETS), asked)
        devices, name = question.devices, question.machine.listed.key
        advice = self._enough(devices) or "a device with more memory is needed"
        smaller = (precision for precision in self.precisions if any(self._fits(one, precision) for one in possible))
        if (precision := next(smaller, None)) is not None:
            advice += f", and so have these with {' '.join(precision.words)}"
        if not question.machine.runs:
            advice += f"; Strata cannot run it there yet, as it lacks kernels for {name}, and plans what it would take"
        weights, workspace, over, budget = (
            f"{size / GIB:,.2f}" for size in (held.weights, held.workspace, missing, held.budget)
        )
        return (
            f"{question.model} does not fit on {devices} x {name}: by {layout.name} each needs {weights} GiB of "
            f"weights, {workspace} GiB of workspace and keys and values of a sequence of {question.traffic.longest:,} "
            f"tokens, {over} GiB more than the {budget} GiB that it may use; {advice}"
        )

    def _enough(self, devices: int) -> str | None:
        """The fewest, doubled again and again, that have room, in words, and what Strata lacks to run them beside
        kernels; None if not even a thousand times as many have."""
        for power in range(1, 11):
            more = devices << power
            larger = (one for one in self._layouts(more) if one.ranks > devices and self._is_linked(one))
            fitting = [one for one in larger if self._fits(one, self.question.precision)]
            if fitting:
                near = any(one.ranks <= self.question.machine.per_host for one in fitting)
                lacks = "" if near else " (Strata lacks engines on several hosts)"
                return f"--gpus {more} has room for it{lacks}"
        return None


def _batching(settings: Settings) -> Batching:
    layout = settings.layout
    ranks = layout.tensor if layout.attention_dp else 1
    return Batching(settings.budget, settings.target / 1e3 or None, layout.stages, ranks)


def best_of_each(choices: Iterable[ServingChoice], kind: Callable[[ServingChoice], Hashable]) -> list[ServingChoice]:
    """Of each kind the one with the most tokens a second; the best first."""
    found: dict[Hashable, ServingChoice] = {}
    for choice in sorted(choices, key=rank):
        found.setdefault(kind(choice), choice)
    return list(found.values())


def _precision(choice: ServingChoice) -> Precision:
    return choice.settings.precision


def rank(choice: ServingChoice) -> tuple[int, float, int]:
    """What comes first is better: more tokens a second, and of those within half a percent the quickest request."""
    whole = choice.point.ttft + (choice.output - 1) * choice.point.tpot
    return -round(math.log(choice.tokens) / _ALIKE), whole, choice.settings.layout.ranks


def below_floors(objectives: Objectives, floors: Mapping[str, tuple[float, Precision]], where: str) -> str | None:
    """Which objectives nothing can meet, and what could, in words; None if none is below its floor. floors: seconds
    and the precision that they are of, by the names of `Objectives`."""
    wanted = {"ttft": objectives.ttft, "tpot": objectives.tpot}
    below = [
        (name, asked, *floors[name]) for name, asked in wanted.items() if asked is not None and asked < floors[name][0]
    ]
    if not below:
        return None
    asked = " and ".join(f"--{name} {value * 1e3:g}" for name, value, *_ in below)
    least = " and ".join(f"{floor * 1e3:.3g} ms ({precision.name})" for *_, floor, precision in below)
    are, floor = ("are", "floors") if len(below) > 1 else ("is", "floor")
    return (
        f"{asked} {are} below the {floor} of {where}, {least}: the devices read weights, compute and send no "
        "faster; ask for more than that"
    )


def too_slow(
    question: Question, seen: list[ServingChoice], blocked: list[ServingChoice], packed: list[ServingChoice]
) -> str:
    """Which of `seen` comes nearest to the objectives that none meets, in words. blocked, packed: what would."""
    wanted = question.objectives
    where = f"{question.model} on {question.devices} x {question.machine.listed.key}"

    def excess(choice: ServingChoice) -> float:
        point = choice.point
        return max(point.ttft / (wanted.ttft or math.inf), point.tpot / (wanted.tpot or math.inf))

    if not seen:
        return f"{where} has no room for the requests' keys and values: give more devices or shorter requests"
    near = min(seen, key=excess)
    asked = " and ".join(
        f"{name} {value * 1e3:g}"
        for name, value in (("--ttft", wanted.ttft), ("--tpot", wanted.tpot))
        if value is not None
    )
    return (
        f"{where} is not predicted to meet {asked} (ms) in any way: {near.settings.layout.name} comes nearest, with "
        f"TTFT {near.point.ttft * 1e3:.4g} and TPOT {near.point.tpot * 1e3:.4g} ms at "
        f"{counted(near.settings.sequences, 'sequence')} at once; ask for no less, or give more devices"
        + (f"; {' '.join(packed[0].settings.precision.words)} would do" if packed else "")
        + (f"; {', '.join(blocked[0].blocked)} would do, which Strata lacks" if blocked else "")
    )
