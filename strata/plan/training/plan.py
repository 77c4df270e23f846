"""The plan of a training run: what to expect of the quickest step, what holds it back, and what starts it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from strata.parallel.layout import Layout
from strata.plan.training.search import TrainingSearchResult, search
from strata.plan.training.task import TrainingTask
from strata.text.counted import counted
from strata.train.predict.estimate import GIB, Estimate
from strata.train.predict.min_time import TrainingStepTime

# Of a model's config: they follow from the tokenizer, or say nothing of the mathematics.
_LEFT_OUT = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")
MFU = "6 * elements of matrices a token meets * tokens + 12 * heads * head_dim * pairs seen, over time and bf16 peak"


@dataclass(frozen=True)
class TrainingPlan:
    """name: of the model, as the user gave it. price: of one device an hour, in any currency, if that is known."""

    name: str
    task: TrainingTask
    found: TrainingSearchResult
    price: float | None = None

    @property
    def best(self) -> Estimate:
        return self.found.best

    def run_file(self) -> str:
        """The TOML file of the run, but for data, tokenizer, length and learning rate, which are the user's."""
        return _run_file(self.name, self.task, self.best)

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
        found, task, time, memory = self.best, self.task, self.best.likely, self.best.fullest
        parts = [f"{name} {milliseconds(seconds)}" for name, seconds in seconds_by_cause(time).items() if seconds]
        packs = f"{found.shape.batches} x {counted(found.shape.tokens, 'token')} a replica"
        lines = [
            ("layout", f"{layout_name(found.shape.layout)}, recompute {found.recompute}, {packs}"),
            ("step", f"{milliseconds(time.seconds)} ms ({time.origin}), at least {milliseconds(found.time.seconds)}"),
            ("ms of it", ", ".join(parts)),
            ("tokens/s", f"{found.likely_tokens_per_second:,.0f}, each {self.tokens_per_device:,.0f}"),
            ("MFU", f"{found.likely_mfu:.1%} ({MFU})"),
            (
                "GiB a device",
                f"{memory.total / GIB:.1f} of {self.found.usable / GIB:.1f} usable: {memory.in_words}",
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
        return self.best.likely_tokens_per_second / self.task.gpus

    def price_of_tokens(self, tokens: int) -> float:
        """At the price that was given. Raises ValueError without one."""
        if self.price is None:
            raise ValueError("what tokens cost is not known without the price of a device: give --price")
        return self.price * tokens / self.tokens_per_device / 3600

    @property
    def binding(self) -> str:
        """What the step waits for most; and what memory costs, where more of it would make the step quicker."""
        time = self.best.likely
        parts = seconds_by_cause(time)
        name = max(parts, key=lambda one: parts[one])
        told = f"{name} ({parts[name] / time.seconds:.0%} of the step)"
        larger = self.found.misfit
        if larger is None:
            return told
        missing = (larger.fullest.total - self.found.usable) / GIB
        return (
            f"{told}, and memory: {layout_name(larger.shape.layout)}, recompute {larger.recompute}, {missing:.1f} GiB "
            f"too large, would take {milliseconds(larger.likely.seconds)} ms"
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


def changed(layout: Layout) -> dict[str, Any]:
    """What differs from one rank, as options of [parallel]."""
    usual = Layout()
    values = {one.name: getattr(layout, one.name) for one in fields(Layout)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def layout_name(layout: Layout) -> str:
    """The same in words."""
    return ", ".join(f"{name}={value}" for name, value in changed(layout).items()) or "one device"


def _choice(found: Estimate, gpus: int) -> dict[str, Any]:
    memory = found.fullest
    return {
        "layout": changed(found.shape.layout),
        "recompute": found.recompute,
        "tokens_per_pack": found.shape.tokens,
        "packs_of_replica": found.shape.batches,
        "step_s": found.likely.seconds,
        "origin": found.likely.origin,
        "least_s": found.time.seconds,
        "parts_s": seconds_by_cause(found.likely),
        "tokens_per_second": found.likely_tokens_per_second,
        "tokens_per_second_per_device": found.likely_tokens_per_second / gpus,
        "mfu": found.likely_mfu,
        "memory_bytes": asdict(memory) | {"total": memory.total},
    }


def _run_file(name: str, task: TrainingTask, found: Estimate) -> str:
    """The TOML file of a fresh model's run. What only the user knows is there to be replaced, and the first lines say
    so."""
    shape = found.shape
    layout = shape.layout
    model = {key: value for key, value in task.config.to_dict().items() if value is not None and key not in _LEFT_OUT}
    tables: dict[str, dict[str, Any]] = {
        "run": {
            "out": "runs/planned",
            "steps": 10000,
            "precision": task.precision,
            "recompute": found.recompute,
            "deterministic": False,
        },
        "start": {"tokenizer": "TOKENIZER"},
        "model": model,
        # The micro-batches follow from the packs of a step.
        "parallel": {key: value for key, value in changed(layout).items() if key != "micro_batches"},
        "data": {
            "sources": [{"folder": "DATA"}],
            "tokens_per_pack": shape.tokens,
            "packs_per_step": shape.batches * layout.dp * layout.shard,
        },
        "optimizer": {"learning_rate": 3e-4},
        "schedule": {"warmup": 1000, "decay": 2000},
    }
    lines = [
        f"# {name}: {task.batch_tokens} tokens a step in sequences of {task.sequence}, {task.gpus} x "
        f"{task.device.product}.",
        "# DATA is a folder of `strata data`, TOKENIZER one with a tokenizer; steps, rates and schedule are yours.",
        "# cuDNN's attention, by which the step was predicted, repeats no run bit for bit: deterministic = false.",
    ]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items() if one is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
