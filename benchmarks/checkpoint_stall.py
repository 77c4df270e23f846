"""How long checkpoints keep steps waiting: copy, write and read, of as many bytes a rank as wanted.

    torchrun --nproc-per-node 4 benchmarks/checkpoint_stall.py FOLDER --gib 11.2     # a rank's share of 8B over 8

Steps here are products; the bytes are those of 288 parameters of one size, in three kinds. Two checkpoints are written
and the last is read. Prints a line of JSON for each. The share of time that stalls take counts while a checkpoint is
under way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from strata.comm.launch import World, join_world
from strata.train.checkpoints.checkpointer import Checkpointer
from strata.train.checkpoints.state import Piece

PARAMETERS = 288
KINDS = ("master", "exp_avg", "exp_avg_sq")


def pieces_of(world: World, gib: float) -> list[Piece]:
    """This rank's parts of tensors that all ranks share equally."""
    part = int(gib * 2**30 / 4 / (PARAMETERS * len(KINDS)))
    whole = part * world.size
    return [
        Piece(
            kind,
            f"weight{number}",
            (whole,),
            ((0, whole),),
            part * world.rank,
            torch.full((part,), float(number), device=world.device),
        )
        for kind in KINDS
        for number in range(PARAMETERS)
    ]


def make_step(world: World, checkpointer: Checkpointer, pieces: list[Piece]) -> Callable[[], None]:
    """What stands for a training step: products, then a change of what is written."""
    on_gpu = world.device.type == "cuda"
    matrix = torch.randn(*((8192, 8192) if on_gpu else (512, 512)), device=world.device)
    matrix = matrix.to(torch.bfloat16 if on_gpu else torch.float32)

    def step() -> None:
        product = matrix
        for _ in range(200 if on_gpu else 5):
            product = matrix @ product
        checkpointer.before_update()
        for piece in pieces[:10]:
            piece.tensor.add_(0)
        if on_gpu:
            torch.cuda.synchronize()

    return step


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
        pieces = pieces_of(world, options.gib)
        checkpointer = Checkpointer(options.folder, world, keep=1, warn=print)

        def say(line: dict[str, object]) -> None:
            if world.is_main:
                print(json.dumps({"ranks": world.size, "gib": options.gib} | line), flush=True)

        say({"prepare_s": seconds(lambda: checkpointer.prepare(pieces))})
        step = make_step(world, checkpointer, pieces)
        step()
        plain = min(seconds(step) for _ in range(3))
        for number in (1, 2):
            before, began = checkpointer.stalled_seconds, time.perf_counter()
            started = seconds(lambda number=number: checkpointer.start(number, {"recipe": {}}, pieces))
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
            say(
                {
                    "checkpoint": number,
                    "start_s": started,
                    "plain_step_s": plain,
                    "first_step_s": first,
                    "longest_poll_s": round(longest, 4),
                    "stalled_s": round(stalled, 4),
                    "stalled_share": round(stalled / took, 4),
                    "seconds": round(took, 2),
                    "steps": steps,
                }
            )
        say({"restore_s": seconds(lambda: checkpointer.restore(pieces, {}))})
        checkpointer.finish()


if __name__ == "__main__":
    main()
