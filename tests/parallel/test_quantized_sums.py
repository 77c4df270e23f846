"""Sums of gradients in 8 bits against sums in float64, in every layout that has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.launch import World
from strata.comm.observer import CollectiveCall
from strata.parallel.layout import Layout
from strata.parallel.parallelize import parallelize
from strata.parallel.quantized_sums import QuantizedSums, Sum, message_bytes
from tests.parallel.models import config_of, gradients_of, loss_of, random_batch, random_model
from tests.parallel.ranks import relative_error, run_ranks
from tests.parallel.steps import accumulate

VALUES, STEPS = 40_002, 12
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"dp": 2}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"shard": 2, "zero": 3}],
    4: [
        {"dp": 2, "shard": 2, "zero": 1},
        {"dp": 2, "shard": 2, "zero": 3},
        {"shard": 2, "tp": 2, "zero": 2, "sequence_parallel": True},
    ],
}
CONFIG = config_of("llama")


def summed(one: Sum) -> torch.Tensor:
    try:
        while True:
            next(one)
    except StopIteration as end:
        found: torch.Tensor = end.value
        return found


def values_of(rank: int) -> torch.Tensor:
    """As gradients are: of sizes that differ from place to place."""
    made = torch.Generator().manual_seed(rank)
    return torch.randn(VALUES, generator=made) * torch.logspace(-6, 0, VALUES)


def sums(world: World, folder: Path) -> dict[str, Any]:
    axis = Layout(dp=world.size).mesh(world).axis("dp")
    parts = [values_of(rank).double() for rank in range(world.size)]
    exact, sizes = sum(parts), sum(one.abs() for one in parts)
    sums = QuantizedSums()
    once = summed(sums.everywhere(values_of(world.rank), axis, "a"))
    own = summed(QuantizedSums().scattered(values_of(world.rank), axis))
    first = VALUES // world.size * world.rank
    shard = exact[first : first + VALUES // world.size]
    # Half a unit of e4m3 of each, and, on the way back, of their sum; or of the largest of 128.
    largest = torch.nn.functional.max_pool1d(sizes[None], 255, 1, 127)[0]
    floor = largest * 2.0**-16
    total = once.double()
    for _ in range(STEPS - 1):
        total += summed(sums.everywhere(values_of(world.rank), axis, "a")).double()
    stray = (total - STEPS * exact).abs() / (sizes / 8 + floor)
    spoiled = values_of(world.rank)
    spoiled[100] = torch.inf
    is_lost = not summed(sums.everywhere(spoiled, axis, "a")).isfinite().all()
    after = summed(sums.everywhere(values_of(world.rank), axis, "a"))
    return {
        "there and back": float(((once - exact).abs() / (sizes * 0.129 + floor)).max()),
        "there": float(((own - shard).abs() / (sizes / 16 + floor)[first : first + len(shard)]).max()),
        "after many": float(stray.max()),
        "bits": once.view(torch.int32).sum().item(),
        "a step that is not finite": [is_lost, bool(after.isfinite().all())],
    }


@pytest.mark.parametrize("world", [2, 3])
def test_sums_and_what_is_left_over_steps(world: int, tmp_path: Path) -> None:
    found = run_ranks(sums, world, tmp_path)
    assert len({one["bits"] for one in found}) == 1
    for one in found:
        assert one["there and back"] <= 1
        assert one["there"] <= 1
        # Twelve sums of the same are off by what one is, because what each loses is in the next.
        assert one["after many"] <= 1.5
        assert one["a step that is not finite"] == [True, True]


class Counted:
    """Bytes that ranks hand in for sums of gradients, by collective."""

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}

    def started(self, operation: str, axis: str, ranks: tuple[int, ...], nbytes: int) -> CollectiveCall:
        self.nbytes[operation] = self.nbytes.get(operation, 0) + nbytes
        return CollectiveCall(operation, axis, ranks, 1, nbytes)

    def waits(self, call: CollectiveCall | None) -> None:
        """Nobody asks."""


def reduced(world: World, folder: Path) -> list[dict[str, Any]]:
    """Of every layout how far the gradient, its norm and its direction are from those of one process."""
    found = []
    for given in LAYOUTS[world.size]:
        layout = Layout(**given, message_dtype="fp8")  # type: ignore[arg-type]
        layout.check(CONFIG, world.size)
        counted = Counted()
        mesh = layout.mesh(replace(world, observer=counted))
        documents = mesh.flattened("dp", "shard")
        batches = [random_batch(CONFIG, [9, 6], seed=rank) for rank in range(documents.size)]
        alone, model = random_model(CONFIG), random_model(CONFIG).float()
        tokens = sum(int((targets >= 0).sum()) for _, targets in batches)
        sum(loss_of(alone, *one) for one in batches).div(tokens).backward()
        wanted = gradients_of(alone)
        parallel = parallelize(model, CONFIG, layout, mesh, bucket_elements=1)
        counted.nbytes.clear()
        accumulate(model, CONFIG, parallel, [batches[documents.index]], tokens)
        parallel.gradients.reduce()
        norm = torch.cat([one.flatten() for one in wanted.values()]).norm()
        errors = (
            [0.0]
            if layout.tp > 1
            else [
                relative_error(
                    part.master.grad,
                    wanted[part.name].flatten()[part.start :][: part.master.numel()].view_as(part.master),
                )
                for part in parallel.gradients.shards
            ]
        )
        found.append({"norm": float(parallel.gradients.norm() / norm) - 1, "errors": max(errors), **counted.nbytes})
    return found


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_sums_in_8_bits(world: int, tmp_path: Path) -> None:
    values = sum(parameter.numel() for parameter in random_model(CONFIG).parameters())
    for layout, *found in zip(LAYOUTS[world], *run_ranks(reduced, world, tmp_path), strict=True):
        for one in found:
            assert abs(one["norm"]) < 0.02, layout
            assert one["errors"] < 0.1, layout
            if layout.get("zero", 0) in (1, 2) and "tp" not in layout and "dp" not in layout:
                assert "reduce_scatter" not in one
                # Buckets end at whole rows of messages, of each rank.
                assert message_bytes(values) <= one["all_to_all"] < 1.3 * message_bytes(values) + 8 * 4128


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="message_dtype = 'int3' is unknown; accepted are 'auto' and 'fp8'"):
        Layout(dp=2, message_dtype="int3").check(CONFIG, 2)
    with pytest.raises(ValueError, match="dp, shard and cp are 1; set one above 1"):
        Layout(tp=2, message_dtype="fp8").check(CONFIG, 2)
