"""How weights are to be rounded, checked before any of them is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from strata.kernels.quant.quantized import Scheme
from strata.kernels.quant.schemes import SCHEMES

RTN, GPTQ, AWQ, SMOOTHQUANT = "rtn", "gptq", "awq", "smoothquant"
# Of each scheme that is written, the methods that suit it, its default first.
METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp8": (RTN, SMOOTHQUANT, GPTQ),
        "fp8_block": (RTN, GPTQ),
        "fp8_weights": (RTN, AWQ, GPTQ),
        "int8": (SMOOTHQUANT, RTN, GPTQ),
        "int8_weights": (RTN, AWQ, GPTQ),
        "int4": (GPTQ, AWQ, RTN),
    }
)
# Columns of a group, where those of a scheme do not divide a model's widths.
FEWER = (64, 32)


def _has_groups(scheme: str) -> bool:
    return SCHEMES[scheme].rows == 1 and SCHEMES[scheme].columns > 0


@dataclass(frozen=True)
class Rounding:
    """scheme: a name of `METHODS`. method: one of those. group: columns that share a scale of int4; None: as many as
    the scheme has, or fewer that divide the model's widths. skip: patterns of names of matrices that stay as they are.
    """

    scheme: str
    method: str
    group: int | None
    skip: tuple[str, ...] = ()

    @staticmethod
    def of(scheme: str, method: str | None, group: int | None, skip: tuple[str, ...]) -> Rounding:
        """None: the default of the scheme. Raises ValueError for what is not known or does not suit the scheme."""
        if scheme not in METHODS:
            raise ValueError(f"scheme = {scheme!r} cannot be written; accepted are {', '.join(map(repr, METHODS))}")
        methods = METHODS[scheme]
        if method is not None and method not in methods:
            accepted = ", ".join(map(repr, methods))
            raise ValueError(f"method = {method!r} is not one for scheme {scheme!r}; accepted are {accepted}")
        if group is not None and not _has_groups(scheme):
            raise ValueError(f"group = {group}: the scheme {scheme!r} has no groups of columns; leave it out")
        if group is not None and (group < 2 or group % 2):
            raise ValueError(f"group = {group} must be an even number of columns, such as 32, 64 or 128")
        return Rounding(scheme, method or methods[0], group, skip)

    @property
    def packing(self) -> Scheme:
        scheme = SCHEMES[self.scheme]
        return scheme if self.group is None else scheme._replace(columns=self.group)

    def with_group(self, widths: Collection[int]) -> Rounding:
        """With groups that divide these numbers of columns, where none were asked for and some do."""
        if self.group is not None or not _has_groups(self.scheme):
            return self
        own = self.packing.columns
        fitting = (size for size in (own, *FEWER) if not any(width % size for width in widths))
        return replace(self, group=next(fitting, own))

    @property
    def needs_text(self) -> bool:
        """Whether the method looks at activations; rounding to nearest may."""
        return self.method != RTN
