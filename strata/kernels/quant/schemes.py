"""The schemes that weights can be packed by, by the names that users give them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from strata.kernels.quant.quantized import MX_GROUP, NV_GROUP, TWO_OF_FOUR, Scheme
from strata.kernels.quant.two_of_four import BYTE_COLUMNS

# Columns that share a scale of int4 unless something else is asked for, as AWQ and GPTQ checkpoints have it.
INT4_GROUP = 128
# Rows and columns of a block of DeepSeek's and Qwen's checkpoints in 8 bits.
BLOCK = 128

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "fp8": Scheme("e4m3", 1, 0, "row"),
        "fp8_block": Scheme("e4m3", BLOCK, BLOCK, "block"),
        "fp8_weights": Scheme("e4m3", 1, 0),
        "int8": Scheme("int8", 1, 0, "row"),
        "int8_weights": Scheme("int8", 1, 0),
        "int4": Scheme("int4", 1, INT4_GROUP),
        "mxfp4": Scheme("e2m1", 1, MX_GROUP),
        "nvfp4": Scheme("e2m1", 1, NV_GROUP),
    }
)


# Of weights that have zeros already: none are made here.
SPARSITIES: Mapping[str, Scheme] = MappingProxyType({TWO_OF_FOUR: Scheme(TWO_OF_FOUR, 1, BYTE_COLUMNS)})


def scheme_of(name: str) -> Scheme:
    """The scheme of that name. Raises ValueError, with the names there are, for another."""
    if name not in SCHEMES:
        raise ValueError(f"quantization = {name!r} is not known; accepted are {', '.join(map(repr, SCHEMES))}")
    return SCHEMES[name]


def sparsity_of(name: str) -> Scheme:
    """The scheme of weights with that pattern of zeros. Raises ValueError for another than 2:4."""
    if name not in SPARSITIES:
        raise ValueError(f"sparsity = {name!r} is not known; accepted is {', '.join(map(repr, SPARSITIES))}")
    return SPARSITIES[name]
