"""What several files ask: an H200 with the steps of 0.6B on it, and hosts of eight."""

from __future__ import annotations

import pytest

from strata.cost.step_model import StepModel
from strata.hardware.specs import device
from strata.plan.meta_model import find_config, meta_model
from strata.plan.search.machine import Machine


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine.of(device("h200"), "bfloat16", per_host=8, network=50e9)


@pytest.fixture(scope="session")
def times() -> StepModel:
    spec = device("h200")
    return StepModel(meta_model(find_config("0.6B"), spec), spec)
