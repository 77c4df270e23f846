"""How weights are to be rounded, checked before any of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from strata.kernels.quant.packed import Scheme
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


@dataclass(frozen=True)
class Rounding:
    """scheme: a name of `METHODS`. method: one of those. group: columns that share a scale of int4. skip: patterns of
    names of matrices that stay as they are."""

    scheme: str
    method: str
    group: int
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
        has_groups = SCHEMES[scheme].rows == 1 and SCHEMES[scheme].columns > 0
        if group is not None and not has_groups:
            raise ValueError(f"group = {group}: the scheme {scheme!r} has no groups of columns; leave it out")
        if group is not None and (group < 2 or group % 2):
            raise ValueError(f"group = {group} must be an even number of columns, such as 32, 64 or 128")
        columns = SCHEMES[scheme].columns if group is None else group
        return Rounding(scheme, method or methods[0], columns, skip)

    @property
    def packing(self) -> Scheme:
        return SCHEMES[self.scheme]._replace(columns=self.group)

    @property
    def needs_text(self) -> bool:
        """Whether the method looks at activations; rounding to nearest may."""
        return self.method != RTN
