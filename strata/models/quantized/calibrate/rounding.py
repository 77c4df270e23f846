"""Round to nearest, with scales that may cut off what few weights have too much of."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.quant.quantized import QuantizedWeight, Scheme, pack, pack_values, spread, to_nearest

# Of integers, how far below the largest magnitude a scale may reach: so many steps, down to this share.
_STEPS, _LEAST = 20, 0.6
_INTEGERS = ("int4", "int8")


def find_scales(weight: Tensor, scheme: Scheme, dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
    """Scales [out / rows, width / columns] for a float32 weight [out, width], in the dtype that they are stored in.

    Of floats they follow from the largest magnitude of each group. Of integers they are the best of those and of 19
    smaller ones, which cut off the largest weights so that the others are rounded more finely: those with the least
    sum of `importance * error^2` over the group, as the MSE observer of llm-compressor 0.14 searches them.
    importance: [width], the mean square of what each column is multiplied by; None: all alike.
    """
    largest = largest_scales(weight, scheme, dtype)
    if scheme.values not in _INTEGERS:
        return largest
    factors = None if importance is None else importance.to(weight.device)
    best, least = largest, _errors(weight, scheme, largest, factors)
    for step in range(1, _STEPS):
        tried = _stored(largest.float() * (1 - (1 - _LEAST) * step / _STEPS), dtype)
        errors = _errors(weight, scheme, tried, factors)
        best = torch.where(errors < least, tried, best)
        least = torch.minimum(errors, least)
    return best


def largest_scales(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Scales by which nothing is cut off, as `find_scales` gives them."""
    return _stored(pack(weight, scheme).scales, dtype)


def round_to(weight: Tensor, scheme: Scheme, scales: Tensor) -> QuantizedWeight:
    """The weight [out, width] in the values of the scheme that are nearest, by these scales."""
    scaled = weight.float() / spread(scales.float(), scheme, weight.shape)
    return QuantizedWeight.of(scheme, pack_values(to_nearest(scaled, scheme.values), scheme.values), scales)


def round_trip(weight: Tensor, scheme: Scheme, scales: Tensor) -> Tensor:
    """What `round_to` stands for, in float32."""
    wide = spread(scales.float(), scheme, weight.shape)
    return to_nearest(weight.float() / wide, scheme.values) * wide


def nearest(weight: Tensor, scheme: Scheme, dtype: torch.dtype, importance: Tensor | None = None) -> QuantizedWeight:
    """Round to nearest, by the scales of `find_scales`."""
    return round_to(weight, scheme, find_scales(weight, scheme, dtype, importance))


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as a checkpoint has them; none is 0, of which a group of zeros would make NaN."""
    # Of float16 the least that it has at all, since scales of small weights lie below its normal numbers.
    least = 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
    return scales.to(dtype).clamp(min=least)


def _errors(weight: Tensor, scheme: Scheme, scales: Tensor, importance: Tensor | None) -> Tensor:
    """The weighted sum of squared errors of each group, shaped like scales."""
    errors = (round_trip(weight, scheme, scales) - weight).square()
    if importance is not None:
        errors = errors * importance
    for dim, group in ((-2, scheme.rows), (-1, scheme.columns)):
        if group == 0:
            errors = errors.sum(dim, keepdim=True)
        elif group > 1:
            last = -errors.shape[dim] % group
            errors = torch.nn.functional.pad(errors, (0, last) if dim == -1 else (0, 0, 0, last))
            errors = errors.unflatten(dim, (-1, group)).sum(dim)
    return errors
