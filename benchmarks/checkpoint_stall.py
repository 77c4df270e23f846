"""How long checkpoints keep steps waiting: two are written beside steps that change all of it, the last is read back.

torchrun --nproc-per-node 4 benchmarks/checkpoint_stall.py FOLDER --gib 11.2     # a rank's share of 8B over 8
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from strata.comm.launch import World, join_world
from strata.train.checkpoints.checkpointer import Checkpointer
from strata.train.checkpoints.state import StateShard

PARAMETERS = 288
KINDS = ("master", "exp_avg", "exp_avg_sq")


def state_shards(world: World, gib: float) -> list[StateShard]:
    """This rank's parts of tensors that all ranks share equally, each full of a number of its own."""
    part = int(gib * 2**30 / 4 / (PARAMETERS * len(KINDS)))
    whole = part * world.size
    places = [(kind, f"weight{number}") for kind in KINDS for number in range(PARAMETERS)]
    return [
        StateShard(
            kind,
            name,
            (whole,),
            ((0, whole),),
            part * world.rank,
            torch.full((part,), first_value(number, world), device=world.device),
        )
        for number, (kind, name) in enumerate(places)
    ]


def first_value(number: int, world: World) -> float:
    """What this rank's shard of that number holds before the first step."""
    return float(number * world.size + world.rank)


def check(shards: Sequence[StateShard], steps: int, world: World) -> None:
    """End the run if shards are not as so many steps have left them."""
    for number, shard in enumerate(shards):
        if not (shard.tensor == first_value(number, world) + steps).all():
            fail(f"{shard.kind} of {shard.name}, as rank {world.rank} has read it, is not what step {steps} left")


def fail(message: str) -> NoReturn:
    """What goes wrong ends the run: its figures would be those of something else."""
    raise SystemExit(message)


class Steps:
    """What stands for training steps: products, then a change of all that is written, by one a step. done: how many."""

    def __init__(self, world: World, checkpointer: Checkpointer, shards: Sequence[StateShard]) -> None:
        self.done = 0
        self._on_gpu = world.device.type == "cuda"
        self._checkpointer, self._tensors = checkpointer, [shard.tensor for shard in shards]
        matrix = torch.randn(*((8192, 8192) if self._on_gpu else (512, 512)), device=world.device)
        self._matrix = matrix.to(torch.bfloat16 if self._on_gpu else torch.float32)

    def __call__(self) -> None:
        product = self._matrix
        for _ in range(200 if self._on_gpu else 5):
            product = self._matrix @ product
        self._checkpointer.before_update()
        for tensor in reversed(self._tensors):  # towards a copy that is still under way, which would be torn
            tensor.add_(1)
        self.done += 1
        if self._on_gpu:
            torch.cuda.synchronize()


def write(number: int, checkpointer: Checkpointer, shards: Sequence[StateShard], step: Steps) -> dict[str, float]:
    """The figures of a checkpoint that is written beside steps. stalled_share: of the time until it is whole."""
    before, began = checkpointer.stalled_seconds, time.perf_counter()
    started = seconds(lambda: checkpointer.start(number, {"recipe": {}}, shards))
    first, steps, longest, path = seconds(step), 1, 0.0, None
    while path is None:
        stalled = checkpointer.stalled_seconds
        path = checkpointer.poll()
        longest = max(longest, checkpointer.stalled_seconds - stalled)
        if path is None:
            step()
            steps += 1
    took = time.perf_counter() - began
    stalled = checkpointer.stalled_seconds - before
    return {
        "checkpoint": number,
        "start_s": started,
        "first_step_s": first,
        "longest_poll_s": round(longest, 4),
        "stalled_s": round(stalled, 4),
        "stalled_share": round(stalled / took, 4),
        "seconds": round(took, 2),
        "steps": steps,
    }


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return round(time.perf_counter() - began, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=11.2, help="bytes of a rank")
    options = parser.parse_args()
    with join_world("auto") as world:
        shards = state_shards(world, options.gib)
        checkpointer = Checkpointer(options.folder, world, keep=1, warn=fail)

        def say(line: dict[str, float]) -> None:
            if world.is_main:
                print(json.dumps({"ranks": world.size, "gib": options.gib} | line), flush=True)

        say({"prepare_s": seconds(lambda: checkpointer.prepare(shards))})
        step = Steps(world, checkpointer, shards)
        step()
        plain = min(seconds(step) for _ in range(3))
        written = 0
        for number in (1, 2):
            written = step.done
            say({"plain_step_s": plain} | write(number, checkpointer, shards, step))
        restoring = seconds(lambda: checkpointer.restore(shards, {}))
        check(shards, written, world)  # also if nothing was found: each checkpoint is followed by a step
        say({"restore_s": restoring})
        checkpointer.finish()


if __name__ == "__main__":
    main()
