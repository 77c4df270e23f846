"""What a gradient is multiplied by before an update: clipping by its norm, and 0 for a step that is skipped."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_scale(norm: Tensor, most: float) -> Tensor:
    """min(1, most / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` has it, and 0 where the norm is not finite; []
    as `norm`, on its device, not waited for.
    """
    return torch.where(norm.isfinite(), (most / (norm + 1e-6)).clamp(max=1.0), 0)
