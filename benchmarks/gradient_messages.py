"""Losses of training runs whose gradients travel in float32 and in 8 bits, on CPU ranks of one machine.

    strata data exercises --out FOLDER/data --documents 30000
    python -m benchmarks.gradient_messages FOLDER --save benchmarks/results/cpu_gradient_messages.jsonl

The built-in model's recipe, narrower (128 wide, 2 layers), over two ranks: with ZeRO-1, where what rounding loses is
added to the next step's gradients, and with FSDP2, where it is not. A second seed shows how far runs lie apart anyway.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

RUNS: dict[str, dict[str, Any]] = {
    "float32": {"zero": 1},
    "fp8 with error feedback": {"zero": 1, "message_dtype": "fp8"},
    "fp8 without (FSDP2)": {"zero": 3, "message_dtype": "fp8"},
    "float32, another seed": {"zero": 1, "seed": 1},
}
MODEL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}


def table(folder: Path, name: str, steps: int) -> dict[str, dict[str, Any]]:
    layout = RUNS[name] | {"shard": 2}
    with (Path(__file__).parents[1] / "examples/builtin.toml").open("rb") as file:
        recipe = tomllib.load(file)
    out = folder / name.replace(" ", "-").replace(",", "")
    return {
        "run": {
            "out": str(out),
            "steps": steps,
            "seed": layout.pop("seed", 0),
            "device": "cpu",
            "log_every": 5,
            "checkpoint_every": steps,
        },
        "start": {"tokenizer": str(folder / "data/tokenizer")},
        "model": recipe["model"] | MODEL,
        "parallel": layout,
        "data": {
            "sources": [{"folder": str(folder / "data")}],
            "tokens_per_pack": 1024,
            "packs_per_step": 4,
            "window": 4096,
        },
        "optimizer": recipe["optimizer"],
        "schedule": {"warmup": steps // 10, "decay": steps // 3},
    }


def toml(tables: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, values in tables.items():
        lines += [f"[{section}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items())} }}"
    return json.dumps(value)


def losses(folder: Path, name: str, steps: int) -> list[tuple[int, float]]:
    given = table(folder, name, steps)
    path = folder / "run.toml"
    path.write_text(toml(given))
    subprocess.run([sys.executable, "-m", "strata", "train", str(path), "--ranks", "2"], check=True)
    lines = map(json.loads, (Path(given["run"]["out"]) / "log.jsonl").read_text().splitlines())
    return [(line["step"], round(line["loss"], 4)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=Path, required=True)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    for name, layout in RUNS.items():
        line = {
            "test": "gradient messages",
            "run": name,
            "ranks": 2,
            "layout": layout,
            "commit": commit.stdout.strip(),
            "date": time.strftime("%Y-%m-%d"),
            "losses": losses(args.folder, name, args.steps),
        }
        with args.save.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
