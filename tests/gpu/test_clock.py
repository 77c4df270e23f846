"""Event timing agrees with the memory bandwidth that a device can have."""

from __future__ import annotations

import pytest
import torch

from strata.hardware.clock import time_cuda
from strata.hardware.specs import recognize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_copy_takes_no_less_than_the_bandwidth_allows() -> None:
    device = recognize(torch.cuda.get_device_name())
    if device is None:
        pytest.skip("the device is not in the database")
    source = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timing = time_cuda(lambda: target.copy_(source))
    rate = 2 * source.nbytes / timing.seconds
    promised = device.ceiling("bandwidth", measured=False).value
    assert 0.5 * promised < rate <= promised
