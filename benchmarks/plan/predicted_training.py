"""Predicted steps of training beside those that were measured on H200s, as a Markdown table.

    python -m benchmarks.plan.predicted_training

Reads benchmarks/results/h200_train.jsonl and runs nothing on a device. Rows of Muon, which
is not predicted, are left out. Rows of one commit are of one code: what got faster since is in docs/train.md.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from strata.hardware.specs import device
from strata.models.config import ModelConfig
from strata.models.shapes import SHAPES
from strata.parallel.layout import Layout
from strata.plan.meta_model import find_config
from strata.train.predict.estimate import Estimate, estimate
from strata.train.predict.step_shape import TrainShape

BENCHMARKS = Path(__file__).parents[1]
GIB = 2**30


def rows() -> list[dict[str, Any]]:
    """The measured steps that can be predicted."""
    lines = (BENCHMARKS / "results/h200_train.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["optimizer"] == "adamw"]


def predicted(row: dict[str, Any]) -> Estimate:
    """What the model of costs says of a measured step."""
    layout = Layout(**row["layout"])
    tokens = row["batch"] * row["sequence"]
    shape = TrainShape(
        config(row), tokens, row["sequence"], layout.micro_batches, row["precision"], layout, row["offload"]
    )
    return estimate(shape, device("h200"), row["recompute"])


def config(row: dict[str, Any]) -> ModelConfig:
    """Of a named shape, or of a file beside this one."""
    name = row["shape"]
    layers = 8 if "8_layers" in name else 16
    return find_config(name if name in SHAPES else str(BENCHMARKS / f"qwen3_moe_{layers}_layers.json"))


def table() -> str:
    """A line for each measured step."""
    lines = [
        "| shape | layout | recompute | precision | commit | measured ms | predicted | GiB | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        found = predicted(row)
        seconds, memory = found.tokens / row["value"] / row["ranks"], row["memory_gib"]
        step = f"{found.likely.seconds * 1e3:.0f} ({found.likely.seconds / seconds - 1:+.1%})"
        room = f"{found.fullest.total / GIB:.1f} ({found.fullest.total / GIB / memory - 1:+.1%})"
        cells = (
            f"{_model(row)}, {row['batch']} x {row['sequence']}",
            named(row["layout"]) + (", state on the host" if row["offload"] else ""), row["recompute"],
            row["precision"], row["commit"], f"{seconds * 1e3:.0f}", step, f"{memory:.1f}", room,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _model(row: dict[str, Any]) -> str:
    return row["shape"] if row["shape"] in SHAPES else f"{config(row).num_layers} layers of 30B-A3B"


def named(layout: dict[str, Any]) -> str:
    """What differs from one rank."""
    usual = {one.name: one.default for one in fields(Layout)}
    return ", ".join(f"{name}={value}" for name, value in layout.items() if value != usual[name]) or "one GPU"


if __name__ == "__main__":
    print(table())
