"""The plan of a training run: what to expect of the quickest step, what holds it back, and what starts it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from strata.parallel.layout import Layout
from strata.plan.training.run_file import run_file
from strata.plan.training.search import TrainingChoice, TrainingSearchResult, search
from strata.plan.training.task import TrainingTask
from strata.text.counted import counted
from strata.train.predict.min_time import TrainingStepTime

GIB = 2**30
MFU = "6 * elements of matrices a token meets * tokens + 12 * heads * head_dim * pairs seen, over time and bf16 peak"


@dataclass(frozen=True)
class TrainingPlan:
    """name: of the model, as the user gave it. price: of one device an hour, in any currency, if that is known."""

    name: str
    task: TrainingTask
    found: TrainingSearchResult
    price: float | None = None

    @property
    def best(self) -> TrainingChoice:
        return self.found.best

    def run_file(self) -> str:
        """The TOML file of the run, but for data, tokenizer, length and learning rate, which are the user's."""
        return run_file(self.name, self.task, self.best)

    @property
    def command(self) -> list[str]:
        """What starts the run from that file; with several hosts, on each."""
        task = self.task
        if task.hosts == 1:
            return ["strata", "train", "run.toml", *(["--ranks", str(task.gpus)] if task.gpus > 1 else [])]
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]
        ranks = ["--nnodes", str(task.hosts), "--nproc-per-node", str(task.per_host)]
        return ["torchrun", *ranks, *where, "-m", "strata", "train", "run.toml"]

    def lines(self) -> list[tuple[str, str]]:
        """What to expect of the best, for people."""
        choice, task = self.best, self.task
        found, time, memory = choice.estimate, choice.estimate.likely, choice.estimate.fullest
        parts = ", ".join(
            f"{name} {milliseconds(seconds)}" for name, seconds in seconds_by_cause(time).items() if seconds
        )
        lines = [
            ("layout", f"{layout_name(choice.shape.layout)}, recompute {found.recompute}, {_packs(choice)}"),
            ("step", f"{milliseconds(time.seconds)} ms ({time.origin}), at least {milliseconds(found.time.seconds)}"),
            ("ms of it", parts),
            ("tokens/s", f"{found.likely_tokens_per_second:,.0f}, each {self.tokens_per_device:,.0f}"),
            ("MFU", f"{found.likely_mfu:.1%} ({MFU})"),
            (
                "GiB a device",
                f"{memory.total / GIB:.1f} of {self.found.usable / GIB:.1f} usable: {memory.parts}",
            ),
            ("bound by", self.binding),
        ]
        if task.device.cuda is None:
            lines.append(("not in Strata", f"it has no kernels for {task.device.product}; a step would take this"))
        if self.price is not None:
            lines.append(("cost", f"{self.price_of_tokens(10**9):,.2f} for a billion tokens"))
        return [*lines, ("searched", f"{counted(self.found.searched, 'step')} of {task.gpus} x {task.device.product}")]

    @property
    def tokens_per_device(self) -> float:
        """Each second."""
        return self.best.estimate.likely_tokens_per_second / self.task.gpus

    def price_of_tokens(self, tokens: int) -> float:
        """At the price that was given. Raises ValueError without one."""
        if self.price is None:
            raise ValueError("what tokens cost is not known without the price of a device: give --price")
        return self.price * tokens / self.tokens_per_device / 3600

    @property
    def binding(self) -> str:
        """What the step waits for most; and what memory costs, where more of it would make the step quicker."""
        time = self.best.estimate.likely
        parts = seconds_by_cause(time)
        name = max(parts, key=lambda one: parts[one])
        told = f"{name} ({parts[name] / time.seconds:.0%} of the step)"
        misfit = self.found.misfit
        if misfit is None:
            return told
        missing = (misfit.memory.total - self.found.usable) / GIB
        return (
            f"{told}, and memory: {layout_name(misfit.shape.layout)}, recompute {misfit.recompute}, {missing:.1f} GiB "
            f"too large, would take {milliseconds(misfit.seconds)} ms"
        )

    def to_dict(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "best": _choice(self.best, self.task.gpus),
            "others": [_choice(one, self.task.gpus) for one in self.found.others],
            "bound_by": self.binding,
            "runs": self.task.device.cuda is not None,
            "mfu_formula": MFU,
            "searched": self.found.searched,
            "command": self.command,
            "run_file": self.run_file(),
        }


def training_plan(name: str, task: TrainingTask, price: float | None = None) -> TrainingPlan:
    """Search the task. Raises ValueError if nothing fits."""
    return TrainingPlan(name, task, search(task), price)


def seconds_by_cause(time: TrainingStepTime) -> dict[str, float]:
    """Seconds of a step by what it does."""
    return {
        "products and attention": time.products + time.attention,
        "passes over memory": time.traffic + time.update,
        "messages": time.communication,
        "the pipeline's bubble": time.bubble,
        "gaps between kernels": time.gaps,
    }


def milliseconds(seconds: float) -> str:
    """Whole ones, of a short step three digits."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def layout_name(layout: Layout) -> str:
    """What differs from one rank, as options of [parallel]."""
    usual = Layout()
    changed = ((one.name, getattr(layout, one.name)) for one in fields(Layout))
    return ", ".join(f"{name}={value}" for name, value in changed if value != getattr(usual, name)) or "one device"


def _packs(choice: TrainingChoice) -> str:
    shape = choice.shape
    return f"{shape.batches} x {counted(shape.tokens, 'token')} a replica"


def _choice(choice: TrainingChoice, gpus: int) -> dict[str, Any]:
    found, memory = choice.estimate, choice.estimate.fullest
    usual = Layout()
    layout = {one.name: getattr(choice.shape.layout, one.name) for one in fields(Layout)}
    return {
        "layout": {name: value for name, value in layout.items() if value != getattr(usual, name)},
        "recompute": found.recompute,
        "tokens_per_pack": choice.shape.tokens,
        "packs_of_replica": choice.shape.batches,
        "step_s": found.likely.seconds,
        "origin": found.likely.origin,
        "least_s": found.time.seconds,
        "parts_s": seconds_by_cause(found.likely),
        "tokens_per_second": found.likely_tokens_per_second,
        "tokens_per_second_per_device": found.likely_tokens_per_second / gpus,
        "mfu": found.likely_mfu,
        "memory_bytes": {one.name: getattr(memory, one.name) for one in fields(memory)} | {"total": memory.total},
    }
