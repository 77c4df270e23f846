"""Rows that go to the ranks of their experts alone on several GPUs become what all experts on one make of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from strata.comm.experts.sent_rows import return_rows, send_rows, slot_span
from strata.comm.mesh import Axis, Mesh
from strata.kernels.moe.combine import combine
from strata.kernels.moe.experts import experts
from tests.gpu.ranks import found_by_ranks
from tests.largest import largest

pytestmark = pytest.mark.gpu

COUNT, HIDDEN, WIDTH, PER_TOKEN = 16, 1024, 256, 4


def errors(axis: Axis, device: torch.device) -> list[float]:
    """Of rows of any number, of none but padding, and of some that all want the experts of one rank."""
    generator, found = torch.Generator(device).manual_seed(0), []
    shapes = (COUNT, 2 * WIDTH, HIDDEN), (COUNT, HIDDEN, WIDTH)
    gate_up, down = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) / 16 for shape in shapes
    )
    first, end = slot_span(COUNT, axis.size, axis.index)
    own = torch.Generator(device).manual_seed(1 + axis.index)
    for tokens, padding, taste in ((500, 0, 0.0), (64, 64 * (axis.index == 1), 0.0), (3, 0, 0.0), (200, 7, 9.0)):
        x = torch.randn(tokens, HIDDEN, generator=own, device=device, dtype=torch.bfloat16)
        scores = torch.rand(tokens, COUNT, generator=own, device=device)
        scores[:, :PER_TOKEN] += taste
        weights, chosen = scores.topk(PER_TOKEN)
        mapping = torch.arange(tokens, dtype=torch.int32, device=device)
        mapping[tokens - padding :] = -1
        wanted = experts.reference(x, weights, chosen, gate_up, down).float()
        wanted[mapping < 0] = 0
        arrived = send_rows.bind("cuda")(x, axis, weights, chosen, axis.index, COUNT, None, mapping)
        given = arrived.rows, arrived.weights, arrived.numbers
        made = experts.bind("cuda")(*given, gate_up[first:end], down[first:end], arrived.products)
        back = return_rows.bind("cuda")(made, axis, arrived.sent, arrived.received)
        result = combine.bind("cuda")(back, arrived.source, arrived.inverse, None).float()
        found.append(float((result - wanted).norm() / wanted.norm().clamp(min=1e-6)))
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_come_back_as_sums_of_their_experts(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(__name__, ranks, tmp_path, timeout=200):
        assert largest(found) < 2e-2


def main() -> None:
    """One rank."""
    from strata.comm.launch import join_world

    with torch.inference_mode(), join_world("cuda", timeout_seconds=60) as world:
        axis = Mesh.of(world, {"tp": world.size}).axis("tp")
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(errors(axis, world.device)))


if __name__ == "__main__":
    main()
