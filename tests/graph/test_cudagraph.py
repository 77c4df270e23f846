"""What keeps recordings on CUDA, as far as it can be seen without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata.graph import cudagraph


def test_what_kernels_share_is_there_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters that are zeroed within a recording are so after its replay; others that run before it would count on."""
    made: list[Any] = []
    cuda = SimpleNamespace(graph_pool_handle=lambda: (0, 1), Stream=lambda: None, current_device=lambda: 3)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(cudagraph, "split_counters", made.append)
    cudagraph.CudaGraphs()
    assert made == [torch.device("cuda", 3)]
