"""Weights in fewer bits: packed values, the scales that they are multiplied by, and the scheme that says how.

Every product takes one in the place of a plain weight. All tensors of a packed weight have its rows (outputs) in the
dimension before the last, so that weights are merged and divided among ranks field by field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.quant.two_of_four import BYTE_COLUMNS, compress, expand

# Of an E8M0 scale, 2^(s - 127) (OCP Microscaling Formats specification 1.0, 2023).
E8M0_BIAS = 127
# What is subtracted from packed int4 that has no zeros of its own.
INT4_ZERO = 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TWO_IN_A_BYTE = ("int4", "e2m1")
# Of values that gradients are rounded to (`strata.kernels.linear.fp8`): wider and coarser than e4m3.
E5M2 = "e5m2"
# Values are floats, two of each four columns: see `two_of_four`.
TWO_OF_FOUR = "2:4"
_HALF_AS_WIDE = (*_TWO_IN_A_BYTE, TWO_OF_FOUR)


class Scheme(NamedTuple):
    """How a weight [out, width] is packed, and how what it multiplies is rounded.

    values: "e4m3", "int8", "int4" or "e2m1"; the last two lie two in a byte, that of the even column in its low half.
        Gradients may be "e5m2", which nothing here packs. "2:4" are the floats that 2:4 sparsity leaves, of which eight
        columns share a byte that says where they are.
    rows, columns: of the weight, that share a scale; 0: all of them. The last of a dimension may be fewer.
    activations: what is multiplied is rounded to the same kind of values, "row": with a scale for each row, or the one
        that the weight has for all (`QuantizedWeight.input_scale`), "block": with one for each `columns` of a row; "":
        it is not rounded.
    """

    values: str
    rows: int
    columns: int
    activations: str = ""


def multiplied_in(scheme: Scheme) -> str:
    """The dtype, by its name in the device database, of products whose activations a scheme rounds; empty: those of
    the activations as they are."""
    return {"e4m3": "float8", "int8": "int8"}.get(scheme.values, "") if scheme.activations else ""


class QuantizedWeight(NamedTuple):
    """A weight [out, width], or of experts [experts, out, width], of which each element is
    `(value - zero) * scale * row_scale`; of 2:4 sparsity the value that stands there, or 0.

    values: float8_e4m3fn or int8 [..., out, width]; or uint8, of 2:4 any floats, [..., out, width / 2].
    scales: [..., out / rows, width / columns], of any float type or uint8, which is E8M0; of 2:4 instead the places of
        values as `compress` makes them, uint8 [..., out, width / 8].
    zeros: like scales, of any type, for int4 that is not symmetric; None: 8 for int4 and 0 for others.
    row_scales: float32 [..., out, 1], where scales alone are too narrow (NVFP4); None: 1.
    order: int32 [width]; the product is with x[..., order], so that groups of columns can be any; None: with x.
    kind, rows, columns, activations: the scheme, its fields one by one, since torch.fx writes no tuple within another.
    input_scale: that of all rows which are multiplied, found ahead (static), of a scheme that rounds them by rows;
        None: each row has its own, found as it is rounded.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    row_scales: Tensor | None
    order: Tensor | None
    kind: str
    rows: int
    columns: int
    activations: str
    input_scale: float | None = None

    @staticmethod
    def of(
        scheme: Scheme,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        row_scales: Tensor | None = None,
        order: Tensor | None = None,
    ) -> QuantizedWeight:
        return QuantizedWeight(values, scales, zeros, row_scales, order, *scheme)

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.kind, self.rows, self.columns, self.activations)

    @property
    def shape(self) -> torch.Size:
        """That of the weight which this stands for."""
        *experts, out, width = self.values.shape
        return torch.Size((*experts, out, 2 * width if self.kind in _HALF_AS_WIDE else width))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        return {name: field for name, field in self._asdict().items() if isinstance(field, Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dim(self) -> int:
        return self.values.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def with_tensors(self, tensors: Mapping[str, Any]) -> QuantizedWeight:
        """The same weight with other tensors in these fields, or with what stands for them in a graph."""
        return self._replace(**tensors)

    def to(self, device: str | torch.device) -> QuantizedWeight:
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors.items()})


def dense(weight: Tensor | QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a packed weight stands for, computed in float32; a plain one as it is."""
    if isinstance(weight, Tensor):
        return weight
    if weight.kind == TWO_OF_FOUR:
        return expand(weight.values, weight.scales).to(dtype)
    values, scheme = unpacked_values(weight), weight.scheme
    if weight.zeros is not None:
        values = values - spread(weight.zeros.float(), scheme, values.shape)
    elif scheme.values == "int4":
        values = values - INT4_ZERO
    values = values * spread(wide_scales(weight), scheme, values.shape)
    if weight.order is not None:
        # Column j of the values belongs to column order[j] of the weight.
        values = torch.empty_like(values).index_copy_(-1, weight.order.long(), values)
    return values.to(dtype)


def unpacked_values(weight: QuantizedWeight) -> Tensor:
    """The values [..., out, width] in float32, as they are stored."""
    values, kind = weight.values, weight.kind
    if kind not in _TWO_IN_A_BYTE:
        return values.float()
    halves = torch.stack((values & 15, values >> 4), -1).flatten(-2)
    if kind == "int4":
        return halves.float()
    return torch.tensor([*_E2M1, *(-one for one in _E2M1)], device=values.device)[halves.long()]


def wide_scales(weight: QuantizedWeight) -> Tensor:
    """The scales in float32, those of rows among them unless several rows share one."""
    scales = weight.scales
    if scales.dtype == torch.uint8:
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - E8M0_BIAS)
    return scales.float() if weight.row_scales is None else scales.float() * weight.row_scales


def spread(scales: Tensor, scheme: Scheme, shape: Sequence[int]) -> Tensor:
    """Scales (or zeros) for each element, or of a size that broadcasts to `shape`, that of the weight."""
    for dim, group in ((-2, scheme.rows), (-1, scheme.columns)):
        if scales.shape[dim] > 1 and group > 1:
            scales = scales.repeat_interleave(group, dim).narrow(dim, 0, shape[dim])
    return scales


def each_expert(weight: Tensor | QuantizedWeight) -> Sequence[Tensor | QuantizedWeight]:
    """The weights [out, width] of all experts."""
    if isinstance(weight, Tensor):
        return weight.unbind(0)
    fields = {name: tensor.unbind(0) for name, tensor in weight.tensors.items() if name != "order"}
    return [
        weight.with_tensors({name: field[number] for name, field in fields.items()})
        for number in range(weight.shape[0])
    ]


def pack(weight: Tensor, scheme: Scheme, like: QuantizedWeight | None = None) -> QuantizedWeight:
    """A float weight [..., out, width] in a scheme: scales from largest magnitudes, values rounded to the nearest.

    like: one in whose place it can be put, with its order of columns, type of scales and zeros, and input scale. Of
    2:4 nothing is rounded. Raises ValueError where two values do not fill a byte, where there is nothing to pack,
    and for a weight that is not 2:4 sparse.
    """
    if scheme.values == TWO_OF_FOUR:
        return QuantizedWeight.of(scheme, *compress(weight))
    if weight.shape[-1] % 2 and scheme.values in _TWO_IN_A_BYTE:
        raise ValueError(f"{scheme.values} packs two columns in a byte, and {list(weight.shape)} has an odd number")
    wide = weight.float()
    if like is not None and like.order is not None:
        wide = wide[..., like.order.long()]
    largest = group_maxima(wide.abs(), scheme).clamp(min=torch.finfo(torch.float32).tiny)
    scales, row_scales = _scales_of(largest, scheme)
    made = QuantizedWeight.of(scheme, wide, scales, row_scales=row_scales)
    if like is not None:
        scales = scales_as(scales, like.scales.dtype)
        middle = INT4_ZERO if scheme.values == "int4" else 0
        zeros = None if like.zeros is None else torch.full_like(scales, middle, dtype=like.zeros.dtype)
        made = made._replace(scales=scales, zeros=zeros, order=like.order, input_scale=like.input_scale)
    scaled = wide / spread(wide_scales(made), scheme, wide.shape)
    return made._replace(values=pack_values(to_nearest(scaled, scheme.values), scheme.values))


def group_maxima(magnitudes: Tensor, scheme: Scheme) -> Tensor:
    """The largest of each group [..., out / rows, width / columns]; the last of a dimension may be smaller."""
    for dim, group in ((-2, scheme.rows), (-1, scheme.columns)):
        size = magnitudes.shape[dim]
        if group == 0:
            magnitudes = magnitudes.amax(dim, keepdim=True)
        elif group > 1:
            last = -size % group
            padding = (0, last) if dim == -1 else (0, 0, 0, last)
            padded = torch.nn.functional.pad(magnitudes, padding)
            magnitudes = padded.unflatten(dim, (-1, group)).amax(dim)
    return magnitudes


# The largest that values of a kind stand for. Of integers half a step more: as many of them are below 0 as not, and
# what is largest is rounded or cut by at most half a step either way.
LARGEST = {"e4m3": 448.0, "int8": 127.0, "int4": 7.5, "e2m1": 6.0}
MX_GROUP, NV_GROUP = 32, 16
# Of rows of activations: the smallest normal number in float32.
MIN_SCALE = 2.0**-126


def _scales_of(largest: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Of groups with these largest magnitudes: scales, and those of rows."""
    if scheme.values == "e2m1" and scheme.columns == MX_GROUP:
        # Powers of two: the exponent of the largest becomes that of the largest value, 2 (OCP, section 6.3).
        exponents = torch.floor(torch.log2(largest)) - 2 + E8M0_BIAS
        return exponents.clamp(0, 254).to(torch.uint8), None
    scales = largest / LARGEST[scheme.values]
    if scheme.values == "e2m1":
        whole = (scales.amax((-2, -1), keepdim=True) / LARGEST["e4m3"]).expand(*scales.shape[:-1], 1).contiguous()
        return (scales / whole).to(torch.float8_e4m3fn), whole
    return scales, None


def scales_as(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of another type, none of them 0; of uint8 (E8M0) the next power of two."""
    if scales.dtype == dtype:
        return scales
    if dtype != torch.uint8:
        return scales.to(dtype).clamp(min=torch.finfo(dtype).tiny)
    return (torch.ceil(torch.log2(scales)) + E8M0_BIAS).clamp(0, 254).to(torch.uint8)


def to_nearest(scaled: Tensor, kind: str) -> Tensor:
    """Values in float32 to the nearest that a kind has, in float32; ties to even."""
    if kind == "e4m3":
        return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    if kind == "e2m1":
        steps = torch.where(scaled.abs() < 2, 0.5, torch.where(scaled.abs() < 4, 1.0, 2.0))
        return (torch.round(scaled / steps) * steps).clamp(-6.0, 6.0)
    least, most = (-127, 127) if kind == "int8" else (-8, 7)
    return torch.round(scaled).clamp(least, most)


def pack_values(values: Tensor, kind: str) -> Tensor:
    """Values in float32 that a kind has, as they are stored; int4 from -8 to 7."""
    if kind == "e4m3":
        return values.to(torch.float8_e4m3fn)
    if kind == "int8":
        return values.to(torch.int8)
    if kind == "int4":
        codes = (values + INT4_ZERO).to(torch.uint8)
    else:
        codes = torch.searchsorted(torch.tensor(_E2M1, device=values.device), values.abs()).to(torch.uint8)
        codes = codes + 8 * torch.signbit(values).to(torch.uint8)
    pairs = codes.unflatten(-1, (-1, 2))
    packed: Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed


def round_activations(x: Tensor, scheme: Scheme, input_scale: float | None = None) -> Tensor:
    """x [..., width] as a product with a weight of the scheme sees it, in float32. input_scale: the weight's."""
    if not scheme.activations:
        return x.float()
    wide = x.float()
    groups = scheme._replace(rows=1, columns=scheme.columns if scheme.activations == "block" else 0)
    rows = wide.reshape(-1, wide.shape[-1])
    scales = scales_of_rows(rows, groups, input_scale)
    values = to_nearest(rows * spread(1 / scales, groups, rows.shape), scheme.values)
    return (values * spread(scales, groups, rows.shape)).view(wide.shape)


def scales_of_rows(rows: Tensor, groups: Scheme, static: float | None = None) -> Tensor:
    """Of float32 rows [rows, width], for each group of columns of each: the largest becomes the largest value.

    None is so small that its inverse, by which rows are multiplied, is not finite. static: instead the scale of every
    row, with NaN for a row in which something is no finite number.
    """
    if static is not None:
        return static + (rows * 0.0).sum(-1, keepdim=True)
    largest = group_maxima(rows.abs(), groups)
    return (largest / torch.full_like(largest, LARGEST[groups.values])).clamp(min=MIN_SCALE)


def quantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """`x @ weight^T + bias` with x rounded by the scheme: sums in float32, rounded once to x's dtype, then the bias."""
    return product_of(round_activations(x, weight.scheme, weight.input_scale), weight, bias, x.dtype)


def product_of(rows: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`rows @ weight^T + bias` of float32 rows [..., width] that are rounded already: see `quantized_product`."""
    product = torch.nn.functional.linear(rows, dense(weight)).to(dtype)
    return product if bias is None else product + bias


def join(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The rows of all parts as one weight. All have one scheme, rows that share a scale aside, and one `order`. What
    they multiply has the largest of their input scales."""
    if scaled_apart(parts):
        parts = [with_scale_per_row(part) for part in parts]
    first = parts[0]
    fields = {name: torch.cat([getattr(part, name) for part in parts], -2) for name in first.tensors if name != "order"}
    return first.with_tensors(fields)._replace(input_scale=shared_input_scale(parts))


def shared_input_scale(parts: Sequence[QuantizedWeight]) -> float | None:
    """Of rows that all parts multiply, each of which has a scale for them, or none has: the largest, so that no part
    is given values cut off where its own scale leaves them."""
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    return max(scales) if scales else None


def scaled_apart(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether rows of all parts as one weight need a scale each: a block would hold rows of two parts, or blocks
    differ."""
    group = parts[0].rows
    return not group or any(part.rows != group for part in parts) or any(part.shape[-2] % group for part in parts[:-1])


def joinable(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether rows of both can be those of one weight."""
    alike = one.scheme._replace(rows=1) == other.scheme._replace(rows=1) and one.tensors.keys() == other.tensors.keys()
    alike = alike and (one.input_scale is None) == (other.input_scale is None)
    kinds = alike and all(one.tensors[name].dtype == other.tensors[name].dtype for name in one.tensors)
    return kinds and (one.order is None or (other.order is not None and torch.equal(one.order, other.order)))


def with_scale_per_row(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with scales for each row."""
    scheme, out = weight.scheme, weight.shape[-2]
    if scheme.rows == 1:
        return weight

    def each(grouped: Tensor) -> Tensor:
        if grouped.is_meta:  # where an operation would import a package for symbolic algebra
            return torch.empty((*grouped.shape[:-2], out, grouped.shape[-1]), dtype=grouped.dtype, device="meta")
        group = scheme.rows or out
        return grouped.repeat_interleave(group, -2).narrow(-2, 0, out)

    fields = {name: each(tensor) for name, tensor in weight.tensors.items() if name in ("scales", "zeros")}
    return weight.with_tensors(fields)._replace(rows=1)


def shard_of(weight: QuantizedWeight, rows: tuple[int, int], columns: tuple[int, int]) -> QuantizedWeight:
    """The rows and columns [first, end) of a weight, with their scales; copied.

    Groups that a cut divides become smaller ones with the same scales. Raises ValueError where columns in an order of
    their own are divided, or a byte is.
    """
    _, width = weight.shape[-2:]
    (low, high), scheme = columns, weight.scheme
    if columns == (0, width):
        cut = weight
    elif weight.order is not None:
        raise ValueError("the columns of a weight with an order of its own (act-order) cannot be divided")
    elif scheme.values == TWO_OF_FOUR and (low % BYTE_COLUMNS or high % BYTE_COLUMNS):
        raise ValueError(f"columns {low} to {high} divide eight that share a byte; divide the width by fewer ranks")
    elif scheme.values in _TWO_IN_A_BYTE and (low % 2 or high % 2):
        raise ValueError(f"columns {low} to {high} divide a byte of two values; divide the width by fewer ranks")
    else:
        cut = _columns_of(weight, low, high)
    if rows == (0, weight.shape[-2]):
        return cut
    first, end = rows
    group = scheme.rows or weight.shape[-2]
    if first % group or (end % group and end != weight.shape[-2]):
        cut = with_scale_per_row(cut)
        group = 1
    grouped = {"scales", "zeros"}
    fields = {
        name: tensor.narrow(-2, first // group, -(-end // group) - first // group).clone()
        if name in grouped
        else tensor.narrow(-2, first, end - first).clone()
        for name, tensor in cut.tensors.items()
        if name != "order"
    }
    return cut.with_tensors(fields)


def _columns_of(weight: QuantizedWeight, low: int, high: int) -> QuantizedWeight:
    scheme, width = weight.scheme, weight.shape[-1]
    group = gcd(gcd(scheme.columns, low), high - low) if scheme.columns else 0
    fields = {}
    for name, tensor in weight.tensors.items():
        if name == "values":
            each = 2 if scheme.values in _HALF_AS_WIDE else 1
            fields[name] = tensor[..., low // each : high // each].clone()
        elif name in ("scales", "zeros") and group:
            finer = tensor.repeat_interleave(scheme.columns // group, -1)[..., : -(-width // group)]
            fields[name] = finer[..., low // group : -(-high // group)].clone()
    return weight.with_tensors(fields)._replace(columns=group)
