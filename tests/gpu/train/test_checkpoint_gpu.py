"""Checkpoints of tensors on a GPU: the copies keep up with the stream, and the host does not wait for them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from strata.comm.launch import World
from strata.train.checkpoints.checkpointer import Checkpointer
from strata.train.checkpoints.state import StateShard

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ELEMENTS = 100_000_001  # 400 MB: two chunks of the buffer, and an odd end
BUSY_CYCLES = 1_000_000_000  # about half a second


def test_copies_lie_between_the_updates_before_and_after(tmp_path: Path) -> None:
    world = World(0, 0, 1, torch.device("cuda", 0), None)
    on_device = torch.ones(ELEMENTS, device="cuda")  # loads the kernel that fills: later, that may wait for the device
    on_host = torch.zeros(1000).pin_memory()
    shards = [
        StateShard(kind, "weight", tuple(tensor.shape), ((0, tensor.numel()),), 0, tensor)
        for kind, tensor in (("master", on_device), ("exp_avg", on_host))
    ]
    checkpointer = Checkpointer(tmp_path, world, keep=1, warn=_fail)
    checkpointer.prepare(shards)
    for step in (1, 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(BUSY_CYCLES)
        on_device.fill_(step)
        on_host.copy_(on_device[:1000], non_blocking=True)
        checkpointer.start(step, {"recipe": {}}, shards)
        assert time.perf_counter() - began < 0.1  # the device has not even come to the update
        checkpointer.before_update()
        on_device.fill_(-1)
        on_host.fill_(-1)
        checkpointer.finish()
        assert checkpointer.restore(shards, {}) == {"recipe": {}}
        assert all((shard.tensor == step).all() for shard in shards)


def _fail(message: str) -> None:
    raise AssertionError(message)
