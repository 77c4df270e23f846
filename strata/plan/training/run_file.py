"""The TOML file that starts a planned run: `strata.train.config` reads it as it is."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from strata.parallel.layout import Layout
from strata.plan.training.search import TrainingChoice
from strata.plan.training.task import TrainingTask

# They follow from the tokenizer, or say nothing of the mathematics.
_LEFT_OUT = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")
# It follows from the packs of a step.
_DERIVED = "micro_batches"


def run_file(name: str, task: TrainingTask, choice: TrainingChoice) -> str:
    """A fresh model's run. What only the user knows is there to be replaced, and the first lines say so."""
    layout, shape = choice.shape.layout, choice.shape
    usual = Layout()
    changed = {
        one.name: getattr(layout, one.name)
        for one in fields(Layout)
        if one.name != _DERIVED and getattr(layout, one.name) != getattr(usual, one.name)
    }
    model = {key: value for key, value in task.config.to_dict().items() if value is not None and key not in _LEFT_OUT}
    tables: dict[str, dict[str, Any]] = {
        "run": {
            "out": "runs/planned",
            "steps": 10000,
            "precision": task.precision,
            "recompute": choice.estimate.recompute,
            "deterministic": False,
        },
        "start": {"tokenizer": "TOKENIZER"},
        "model": model,
        "parallel": changed,
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
