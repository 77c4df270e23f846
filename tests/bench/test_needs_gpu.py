"""What would take hours on a processor is not begun there, unless somebody asks for it."""

from __future__ import annotations

import pytest
import torch

from strata.bench.needs_gpu import require_gpu, why_no_processor
from strata.plan.meta_model import find_config


@pytest.mark.parametrize(
    ("model", "device", "has_gpu", "refused"),
    [
        ("8B", "auto", False, True),
        ("8B", "auto", True, False),
        ("8B", "cpu", False, False),
        ("0.6B", "auto", False, False),
        ("30B-A3B", "auto", False, True),
    ],
)
def test_large_models_need_a_gpu_where_nobody_named_a_device(
    model: str, device: str, has_gpu: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = find_config(model)
    assert (why_no_processor(config, device) is not None) == refused
    if refused:
        with pytest.raises(ValueError, match=f"{model}: it needs a GPU, and .* billion parameters take hours; "):
            require_gpu(model, config, device)
