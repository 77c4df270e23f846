"""Products with packed weights that are not trained: adapters beside them are (QLoRA, Dettmers et al. 2023).

Nothing is kept in floats: the backward pass makes floats of a weight once more, in a buffer that is gone after the
product.
"""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strata.kernels.quant.dequantize import floats
from strata.kernels.quant.quantized import QuantizedWeight

Product = Callable[[Tensor, QuantizedWeight, Tensor | None], Tensor]


def frozen_product(product: Product, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`product(x, weight, bias)`, of which x and the bias have gradients and the weight has none.

    Where the scheme rounds x, its gradient is that of x as it is (straight through).
    """
    return _FrozenProduct.apply(x, bias, weight, product)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: QuantizedWeight, product: Product) -> Tensor:
        ctx.weight = weight
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,), (of_x, of_bias) = upstream, ctx.needs_input_grad[:2]
        through = grad @ floats(ctx.weight, grad.dtype) if of_x else None
        return through, grad.flatten(0, -2).sum(0) if of_bias else None, None, None


def frozen_call(run: Callable[..., Tensor], *args: Any) -> Tensor:
    """`run(*args)` with floats for the packed weights among the arguments, in the dtype of the first, a tensor.

    All other tensors of floats have gradients. The backward pass computes the call again, so that nothing of it is kept
    but its arguments.
    """
    return _FrozenCall.apply(run, *args)


class _FrozenCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *args: Any) -> Tensor:
        places = [place for place, one in enumerate(args) if isinstance(one, Tensor)]
        ctx.run, ctx.places = run, places
        ctx.others = [None if place in places else one for place, one in enumerate(args)]
        ctx.save_for_backward(*(args[place] for place in places))
        return run(*_with_floats(args))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        args: list[Any] = list(ctx.others)
        wanted = [place for place in ctx.places if ctx.needs_input_grad[1 + place]]
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = tensor.detach().requires_grad_(place in wanted)
        with torch.enable_grad():
            result = ctx.run(*_with_floats(args))
        found = torch.autograd.grad(result, [args[place] for place in wanted], upstream)
        gradients = dict(zip(wanted, found, strict=True))
        return None, *(gradients.get(place) for place in range(len(args)))


def _with_floats(args: Sequence[Any]) -> list[Any]:
    dtype = args[0].dtype
    return [floats(one, dtype) if isinstance(one, QuantizedWeight) else one for one in args]
