"""A step that is measured on a GPU: all operations that are drawn, none faster than its floor, together the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from strata.bench.measured_step import engine_for, measure_step
from strata.hardware.roofline import Workload, floor
from strata.hardware.specs import recognize
from strata.models.shapes import SHAPES
from strata.plan.meta_model import find_config, meta_model

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

LAYERS = 4


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize(("sequences", "tokens", "cached"), [(32, 1, 1000), (1, 2048, 0), (2, 9000, 0)])
def test_operations_take_their_floors_at_least(
    sequences: int, tokens: int, cached: int, quantization: str | None, tmp_path: Path
) -> None:
    device = recognize(torch.cuda.get_device_name())
    if device is None:
        pytest.skip("the device is not in the database")
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["8B"] | {"num_hidden_layers": LAYERS}))
    meta = meta_model(find_config(str(tmp_path)), device, quantization=quantization)
    workload = Workload((tokens,) * sequences, (tokens + cached,) * sequences)
    step = meta.step(workload)
    asked = engine_for(str(tmp_path), meta, "cuda", quantization)
    found = measure_step(asked, workload, meta.choose(workload).size, step.graph)
    for part, nodes in (("inputs", step.inputs), ("model", step.model), ("draw", step.draw)):
        took = found.of(part)
        assert {node.name for node in nodes} <= set(took)
    took = found.of("model")
    for node in step.model:
        if node.cost.weights > 1 << 26 and quantization is None:  # which no cache holds
            least = floor(node.cost, device, "bfloat16").seconds
            assert took[node.name] > 0.9 * least, node.name
    # Alone a kernel starts when the one before it has ended; in a step some begin earlier.
    assert 0.7 < sum(took.values()) / found.step < 1.4
