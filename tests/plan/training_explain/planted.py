"""Folders of runs as H200s might have left them, in which one thing holds the run back."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from strata.files.toml_tables import read_table
from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.parallel.layout import Layout
from strata.train.config import TrainConfig
from strata.train.log.description import RunDescription
from strata.train.log.step_times import TIMES
from strata.train.predict.estimate import step_shape
from strata.train.predict.flops import document_flops
from strata.train.predict.min_time import TrainingStepTime, predicted_time
from strata.train.predict.step_shape import TrainShape
from strata.train.profile import STEP

H200 = device("h200")
# Of each line of the log, and how many lines.
STEPS, LINES = 10, 5


@dataclass(frozen=True)
class Planted:
    """Steps as they are likely, and what is wrong with them, in shares of a likely step.

    data, checkpoint, between: of the host while the device waits. device: the work of a step. waits: how long the host
    waits for the device. first: what the first line takes beside. slowest: the share that other ranks lose to rank 1.
    trace: microseconds by kernel.
    """

    model: str = "1B"
    layout: Layout = field(default_factory=Layout)
    recompute: str = "none"
    tokens: int = 16384
    packs: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    offload: bool = False
    data: float = 0.0
    checkpoint: float = 0.0
    between: float = 0.0
    device: float = 1.0
    waits: float = 0.5
    phase: str = "replayed passes"
    first: float = 0.0
    slowest: float | None = None
    trace: Mapping[str, float] | None = None

    @cached_property
    def config(self) -> TrainConfig:
        table: dict[str, Any] = {
            "run": {"out": "runs/planted", "steps": 100, **self.changes},
            "start": {"tokenizer": "builtin"},
            "data": {
                "sources": [{"folder": "text"}],
                "tokens_per_pack": self.tokens,
                "packs_per_step": self.packs,
            },
            "optimizer": {"learning_rate": 1e-3, "offload": self.offload},
            "schedule": {"warmup": 0, "decay": 0},
            "model": {"architectures": ["LlamaForCausalLM"]},
        }
        return replace(read_table(TrainConfig, table), parallel=replace(self.layout, micro_batches=1))

    @cached_property
    def shape(self) -> TrainShape:
        return step_shape(self.config, config_from_dict(SHAPES[self.model], self.model), self.layout)

    @cached_property
    def likely(self) -> TrainingStepTime:
        return predicted_time(self.shape, self.recompute, H200)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.likely.seconds * (self.device + self.data + self.checkpoint + self.between)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        layout, shape = self.layout, self.shape
        RunDescription(
            self.config, shape.config, layout, self.recompute, H200.product, "cuda", 8
        ).write(folder)  # fmt: skip
        packs = shape.batches * layout.dp * layout.shard
        sequences = max(1, shape.tokens // shape.length)
        flops = document_flops(shape.config, [shape.length] * sequences, shape.tokens)
        lines, logged = [], []
        for number in range(LINES):
            each = self.likely.seconds
            first = self.first * each * (number == 0)
            phases = {
                "data": self.data * each,
                "checkpoint": self.checkpoint * each,
                "log": (self.waits + self.between) * each,
                self.phase: (self.device - self.waits) * each,
            }
            lines.append(
                {
                    "step": (number + 1) * STEPS,
                    "steps": STEPS,
                    "seconds": STEPS * self.step + first,
                    "device": STEPS * self.device * each + first,
                    "phases": {name: STEPS * seconds for name, seconds in phases.items()},
                    "tokens": STEPS * packs * shape.tokens,
                    "sequences": STEPS * packs * sequences,
                    "packs": STEPS * packs,
                    **{
                        name: STEPS * packs * getattr(flops, name) for name in ("products", "attention", "head")
                    },
                }
            )  # fmt: skip
            ranks = {} if self.slowest is None else {"slowest_rank": 1, "slowest_share": self.slowest}
            logged.append({"step": lines[-1]["step"], "loss": 2.0, **ranks})
        for name, made in ((TIMES, lines), ("log.jsonl", logged)):
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in made))
        if self.trace is not None:
            self._write_trace(folder / "profile")
        return folder

    def _write_trace(self, folder: Path) -> None:
        """One step, kernels one after another, then nothing until the step has taken as long as others."""
        assert self.trace is not None
        each = 1e6 * self.likely.seconds
        mark = {
            "ph": "X",
            "cat": "user_annotation",
            "name": STEP,
            "pid": 0,
            "tid": 0,
            "ts": 0.0,
            "dur": each * self.device,
        }
        events, at = [mark], 0.0
        for name, share in self.trace.items():
            duration = share * each
            events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 1, "tid": 7, "ts": at, "dur": duration})
            at += duration
        folder.mkdir()
        with gzip.open(folder / "trace.json.gz", "wt") as stream:
            json.dump({"traceEvents": events}, stream)
