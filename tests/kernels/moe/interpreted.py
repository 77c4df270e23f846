"""The Triton kernels of routing in Triton's interpreter, against references: run by `test_interpreted`."""

from __future__ import annotations

import torch

from strata.kernels.moe.route import SOFTMAX, in_one_launch, route

from .routes import ROUTES, assert_no_number_leads_astray, assert_routed, assert_ties_go_to_the_lower_number, distinct


def routes() -> None:
    for count, per_token, biased, normalized, choice in ROUTES.values():
        bias = torch.randn(count) * 0.3 if biased else None
        how, logits = (per_token, normalized, choice), torch.randn(3, count + 3)[:, 1 : count + 1]
        assert route.bind("cuda").choose(logits, bias, *how).run is in_one_launch
        assert_routed(in_one_launch, logits, bias, *how)
        assert_routed(in_one_launch, logits[:0], bias, *how)


if __name__ == "__main__":
    torch.manual_seed(0)
    routes()
    assert_routed(in_one_launch, distinct(3, 64, torch.float16, "cpu"), None, 6, True, SOFTMAX)
    assert_ties_go_to_the_lower_number(in_one_launch, "cpu")
    for name in ("odd", "V2", "odd groups"):
        assert_no_number_leads_astray(in_one_launch, "cpu", *ROUTES[name])
    print("equal")
