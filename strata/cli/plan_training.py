"""`strata plan --train`: how to train a model on given devices."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from strata.bench.result import writable
from strata.cli.plan import named
from strata.hardware.figures import Device
from strata.plan.meta_model import find_config
from strata.plan.training.plan import layout_name, milliseconds, training_plan
from strata.plan.training.task import Task


def plan_training(
    model: str,
    file: str,
    on: tuple[Device, int, int, int, int, float, str],
    price: float | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print the plan, and write the run file of the best. on: device, devices, tokens of a batch and of a sequence,
    devices of a host, bytes/s between hosts, precision.

    Raises ValueError for a task that cannot be fulfilled, and for an `out` that exists; OSError for one that cannot be
    written.
    """
    if out is not None and out.exists():
        raise ValueError(f"{out} exists; give --out another name, or remove it")
    writable(out)
    found = training_plan(model, Task(find_config(file), *on), price)
    if out is not None:
        out.write_text(found.run_file(), encoding="utf-8")
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    for name, value in found.lines():
        print(named(name, value))
    print(f"\n{'run.toml' if out is None else out}:\n\n{found.run_file()}")
    print(shlex.join(str(out) if out is not None and one == "run.toml" else one for one in found.command))
    if found.found.others:
        print("\nThe quickest of other divisions among devices:")
    for one in found.found.others:
        how = f"{layout_name(one.shape.layout)}, recompute {one.estimate.recompute}"
        print(f"  {milliseconds(one.seconds):>9} ms  {one.estimate.likely_mfu:>6.1%}  {how}")
