"""Small runs whose ranks fail in given ways, and the launcher that starts them, for the tests of faults.

Usage: python -m tests.train.fault_ranks launch RANKS RESTARTS RUN FOLDER, which starts `... fault_ranks RUN FOLDER`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

HANG_SECONDS = 5.0  # fewer may pass in a first step on a machine that does much else
STEPS = 40


def sleeps(folder: Path) -> None:
    """ZeRO-2 on a small model; rank 1 stops inside the backward pass of step 5."""
    from torch import Tensor, nn, rand

    from strata.comm.launch import join_world
    from strata.comm.mesh import Mesh
    from strata.parallel.data_parallel import GradientAxes, all_ranks
    from strata.parallel.zero import ZeroGradients
    from strata.train.faults.hang import HangWatch

    with join_world("cpu") as world, HangWatch(world, folder / "faults", HANG_SECONDS) as watch:
        mesh = Mesh.of(watch.world, {"shard": world.size})
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        axes = {name: GradientAxes(mesh.axis("shard"), (), ()) for name, _ in model.named_parameters()}
        gradients = ZeroGradients(model, axes, all_ranks(mesh), world.device, reduce_every_pass=True, bucket_elements=1)

        def stop(_: Tensor) -> None:
            if world.rank == 1 and step == 5:
                time.sleep(60)

        model[0].weight.register_hook(stop)
        for step in range(1, 10):
            watch.at(step, "forward")
            loss = model(rand(4, 64)).square().mean()
            watch.at(step, "backward")
            loss.backward()
            gradients.accumulate()
            watch.at(step, "reduce")
            gradients.reduce()
            watch.at(step, "update")
            gradients.sync_weights()


def freezes(folder: Path) -> None:
    """Rank 0 is stopped by a signal in step 3: not even its threads run on."""
    import torch

    from strata.comm.collectives import start_all_reduce
    from strata.comm.launch import join_world
    from strata.comm.mesh import Mesh
    from strata.train.faults.hang import HangWatch

    with join_world("cpu") as world, HangWatch(world, folder / "faults", HANG_SECONDS) as watch:
        axis = Mesh.of(watch.world, {"dp": world.size}).axis("dp")
        for step in range(1, 6):
            watch.at(step, "data")
            if world.rank == 0 and step == 3:
                time.sleep(HANG_SECONDS / 2)  # so that a heartbeat tells of this phase
                os.kill(os.getpid(), signal.SIGSTOP)
            watch.at(step, "reduce")
            start_all_reduce(torch.zeros(4), axis).wait()


def counts(folder: Path) -> None:
    """Steps that are counted in a checkpoint of JSON; what rank 0 writes tells when."""
    import torch

    from strata.comm.collectives import start_all_reduce
    from strata.comm.launch import join_world
    from strata.comm.mesh import Mesh

    checkpoint, log = folder / "checkpoint.json", folder / "log.jsonl"
    with join_world("cpu") as world:
        axis = Mesh.of(world, {"dp": world.size}).axis("dp")
        (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
        state = json.loads(checkpoint.read_text()) if world.restarts else {"step": 0, "sum": 0.0}
        while state["step"] < STEPS:
            total = start_all_reduce(torch.tensor([float(state["step"])]), axis).wait().item()
            state = {"step": state["step"] + 1, "sum": state["sum"] + total}
            if world.is_main:
                part = checkpoint.with_suffix(".part")
                part.write_text(json.dumps(state))
                part.replace(checkpoint)
                with log.open("a") as stream:
                    note = {"step": state["step"], "at": time.time(), "attempt": world.restarts}
                    stream.write(json.dumps(note) + "\n")
            start_all_reduce(torch.zeros(1), axis).wait()  # so that no rank is ahead of the checkpoint
            time.sleep(0.02)


def raises(folder: Path) -> None:
    """Rank 1 fails by itself, and the others because of it."""
    import torch

    from strata.cli.ending import explanation
    from strata.comm.collectives import start_all_reduce
    from strata.comm.launch import join_world
    from strata.comm.mesh import Mesh
    from strata.train.launch import ended_at_once

    with ended_at_once(explanation), join_world("cpu") as world:
        axis = Mesh.of(world, {"dp": world.size}).axis("dp")
        for step in range(5):
            start_all_reduce(torch.zeros(1), axis).wait()
            if world.rank == 1 and step == 3:
                raise RuntimeError("the fault of rank 1")


def refuses(folder: Path) -> None:
    """What every rank says of bad input."""
    print("strata: error: heads do not divide", file=sys.stderr)
    sys.exit(2)


def waits(folder: Path) -> None:
    """Runs until it is told to end, with a process of its own beside it."""
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"pids-{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        (folder / f"interrupted-{os.environ['RANK']}").touch()
        sys.exit(130)


def deaf(folder: Path) -> None:
    """Says much of an interrupt, and runs on."""

    def complain(*_: object) -> None:
        print("Connection reset by peer", file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, complain)
    print("before", file=sys.stderr, flush=True)
    (folder / f"ready-{os.environ['RANK']}").touch()
    while True:
        time.sleep(60)


def main() -> None:
    if sys.argv[1] == "launch":
        from strata.train.launch import launch

        _, _, ranks, restarts, run, folder = sys.argv
        sys.exit(launch([sys.executable, "-m", "tests.train.fault_ranks", run, folder], int(ranks), int(restarts)))
    globals()[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
