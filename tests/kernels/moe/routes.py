"""What routers of models ask for, and what must hold of experts that were chosen, on whatever device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strata.kernels.moe.route import SOFTMAX, ExpertChoice, route

# Experts, how many a token has, whether there is a bias and weights are divided by their sum, and the choice.
ROUTES: dict[str, tuple[int, int, bool, bool, ExpertChoice]] = {
    "one": (1, 1, False, True, SOFTMAX),
    "odd": (7, 3, False, False, SOFTMAX),
    "Qwen2-MoE": (60, 4, False, False, SOFTMAX),
    "V2-Lite": (64, 6, False, False, ExpertChoice(scale=2.0)),
    "Qwen3-MoE": (128, 8, False, True, SOFTMAX),
    "balanced": (128, 8, True, True, SOFTMAX),
    "V2": (160, 6, False, False, ExpertChoice(groups=8, kept=3, scale=16.0)),
    "V3": (256, 8, True, True, ExpertChoice("sigmoid", 8, 4, "top2", 2.5)),
    "odd groups": (15, 4, True, True, ExpertChoice("sigmoid", 5, 2, "top2")),
    "GLM-4.5": (160, 8, True, True, ExpertChoice("sigmoid", 1, 1, "top2")),
    "Qwen3-Next": (512, 10, False, True, SOFTMAX),
    "most": (1024, 16, False, True, SOFTMAX),
}


def distinct(tokens: int, count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Logits of which no two of a token are equal in 16 bits, where a tie may go either way."""
    magnitudes = torch.arange(0x3E80, 0x4080, dtype=torch.int16, device=device).view(torch.bfloat16)  # 0.25 to 4
    places = torch.rand(tokens, 1024, device=device).argsort(1)[:, :count]
    return torch.cat((magnitudes, -magnitudes)).to(dtype)[places]


def assert_routed(run: Callable[..., Any], logits: Tensor, bias: Tensor | None, *how: Any) -> None:
    """The reference's weights, and its choice but for scores that are equal to the last bits but one; of a thousand
    tokens one may have groups that are."""
    weights, chosen = run(logits, bias, *how)
    wanted, experts = route.reference(logits, bias, *how)
    assert (weights.dtype, chosen.dtype, weights.shape) == (torch.float32, torch.int64, wanted.shape)
    scores, ranked = route.reference(logits, None, logits.shape[1], False, ExpertChoice(how[2].scoring))
    of_experts = torch.zeros_like(scores).scatter(1, ranked, scores) + (0 if bias is None else bias)
    ours, theirs = (of_experts.gather(1, one) for one in (chosen, experts))
    is_same = ((ours - theirs).abs() <= 1e-6 * theirs.abs() + 1e-8).all(1)
    assert (~is_same).sum() <= len(logits) // 1000
    if bias is not None:  # of equal sums the weights may differ
        is_same = (chosen == experts).all(1)
        assert (~is_same).sum() <= len(logits) // 500
    torch.testing.assert_close(weights[is_same], wanted[is_same], rtol=1e-5, atol=1e-7)


def assert_ties_go_to_the_lower_number(run: Callable[..., Any], device: str) -> None:
    logits = torch.randint(-2, 3, (6, 60), device=device).float()
    _, chosen = run(logits, None, 9, True, SOFTMAX)
    assert torch.equal(chosen, logits.sort(dim=1, descending=True, stable=True).indices[:, :9])


def assert_no_number_leads_astray(
    run: Callable[..., Any], device: str, count: int, per_token: int, biased: bool, *how: Any
) -> None:
    """Whatever logits hold, a token's experts are as many as it is to have, and there are such."""
    logits = torch.randn(10, count, device=device)
    logits[0], logits[1], logits[2], logits[3] = math.nan, math.inf, -math.inf, -math.nan
    logits[4, ::2], logits[5, 1::3], logits[6, : count // 2 + 1] = math.nan, math.inf, -math.inf
    logits[7], logits[8, 1:] = 0, -math.inf
    # The NaN whose bits are all set.
    logits[9] = torch.full((count,), -1, dtype=torch.int32, device=device).view(torch.float32)
    bias = torch.randn(count, device=device) if biased else None
    if bias is not None:
        bias[::3], bias[1::4] = -math.inf, math.nan
    _, chosen = run(logits, bias, per_token, *how)
    assert chosen.min() >= 0
    assert chosen.max() < count
    assert (chosen.sort(1).values.diff(dim=1) > 0).all()
