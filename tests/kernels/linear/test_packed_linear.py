"""Products by packed weights on CUDA: which kernels serve which call, by which tiles; what their assembly computes."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits, as_if_on
from strata.kernels.linear.linear import linear
from strata.kernels.linear.quantized import int4_gemv
from strata.kernels.linear.quantized.small_m import quantized_tile
from strata.kernels.linear.small_m import SmallMProduct, multiply
from strata.kernels.linear.small_m_tiles import SmallMTile
from strata.kernels.quant import dequantize
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, pack, unpacked_values
from strata.kernels.quant.schemes import SCHEMES, SPARSITIES
from strata.kernels.quant.two_of_four import smallest_two_of_four

from .assembly import halves, run

# All bytes, each in each of the four places.
WORDS = [bytes((first + 64 * place) % 256 for place in range(4)) for first in range(256)]


@pytest.mark.parametrize(
    ("name", "kind", "less"),
    [("INT8", "int8", 0), ("WIDE_INT8", "int8", 0), ("INT4", "int4", 8), ("UINT4", "int4", 0), ("E2M1", "e2m1", 0)],
)
def test_assembly_unpacks_every_byte(name: str, kind: str, less: int) -> None:
    pytest.importorskip("triton")
    text = getattr(dequantize, f"{name}_ASSEMBLY").value
    words = torch.tensor([list(word) for word in WORDS], dtype=torch.uint8)
    stored = words.view(torch.int8) if kind == "int8" else words
    wanted = unpacked_values(QuantizedWeight.of(Scheme(kind, 1, 0), stored, torch.ones(256, 1))) - less
    for word, exact in zip(WORDS, wanted.tolist(), strict=True):
        results = run(text, int.from_bytes(word, "little"), 2 if name == "INT8" else 4)
        if name == "WIDE_INT8":
            found = list(struct.unpack("<4f", struct.pack("<4I", *results)))
        else:
            found = [number for result in results for number in halves(result)]
        if kind != "int8":  # the low halves of all bytes come first
            found = [found[half * 4 + place] for place in range(4) for half in range(2)]
        assert found == exact


def test_assembly_of_one_row_multiplies_exactly() -> None:
    """Codes by integers of 16 bits, and floats as such integers, the halves of an odd one to the even."""
    pytest.importorskip("triton")
    columns = [-32640.0, 32640.0, 0.0, 1.0, -1.0, 255.5, -256.0, 1234.4]
    half = 0x3F000000  # 0.5
    doubled = [struct.unpack("<I", struct.pack("<f", 2 * column))[0] for column in columns]
    *integers, total = run(int4_gemv.INTEGERS_ASSEMBLY.value, doubled[0], 5, *doubled[1:], half)
    rounded = [-32640, 32640, 0, 1, -1, 256, -256, 1234]
    assert struct.unpack("<i", struct.pack("<I", total))[0] == sum(rounded)
    for word in (0x00000000, 0xFFFFFFFF, 0x12345678, 0x9ABCDEF0):
        (found,) = run(int4_gemv.DOT_ASSEMBLY.value, word, 1, *integers, 7)
        codes = [word >> 4 * place & 15 for place in range(8)]
        exact = 7 + sum(code * column for code, column in zip(codes, rounded, strict=True))
        assert struct.unpack("<i", struct.pack("<I", found))[0] == exact


HOPPER = DeviceLimits("NVIDIA H200", (9, 0), SHARED_BYTES, 132)
AMPERE = DeviceLimits("NVIDIA A100", (8, 0), SHARED_BYTES, 108)
FEW, SPLIT, ROUNDED, SCALED = "quantized, small M", "rounded, split", "rounded, triton", "rounded, cublas"
DEQUANTIZED, UNPACKED = "dequantized, cublas", "unpacked, cublas"
EXPANDED = "2:4 expanded, cublas"


def placed(name: str, rows: int, limits: DeviceLimits, width: int = 1024) -> tuple[Tensor, QuantizedWeight, None]:
    """The arguments of `linear` on a device, without memory."""
    plain = torch.ones(256, width)
    if name == "2:4":
        plain = plain.masked_fill(smallest_two_of_four(plain), 0.0).bfloat16()
    weight = pack(plain, (SCHEMES | SPARSITIES)[name]).to("meta")
    x = as_if_on(limits, torch.empty(rows, width, dtype=torch.bfloat16, device="meta"))
    return x, weight.with_tensors({field: as_if_on(limits, one) for field, one in weight.tensors.items()}), None


@pytest.mark.parametrize(
    ("name", "limits", "served"),
    [
        ("fp8", HOPPER, ((1, FEW), (16, FEW), (17, SPLIT), (256, SPLIT), (257, SCALED))),
        ("int8", HOPPER, ((1, FEW), (16, FEW), (17, SPLIT), (257, ROUNDED))),
        ("fp8_block", HOPPER, ((1, FEW), (65, ROUNDED))),
        ("int4", HOPPER, ((1, FEW), (256, FEW), (257, DEQUANTIZED))),
        ("nvfp4", HOPPER, ((1, FEW), (257, DEQUANTIZED))),
        ("2:4", HOPPER, ((1, FEW), (256, FEW), (257, EXPANDED), (32768, EXPANDED))),
        ("fp8", AMPERE, ((1, UNPACKED), (65, UNPACKED))),
        ("int8", AMPERE, ((1, FEW), (17, FEW), (256, FEW), (257, DEQUANTIZED))),
    ],
)
def test_each_number_of_rows_is_served_by(name: str, limits: DeviceLimits, served: tuple[tuple[int, str], ...]) -> None:
    pytest.importorskip("triton")
    bound = linear.bind("cuda", packed=True)
    for rows, implementation in served:
        assert bound.choose(*placed(name, rows, limits)).name == implementation, rows
    if limits is HOPPER:
        exact = linear.bind("cuda", packed=True, deterministic=True)
        names = {exact.choose(*placed(name, rows, limits)).name for rows in (1, 64, 8192)}
        assert names == {"2:4 expanded, fixed tiles" if name == "2:4" else "dequantized, fixed tiles"}


def test_launches_are_told() -> None:
    pytest.importorskip("triton")
    bound = linear.bind("cuda", packed=True)
    assert bound.launches(*placed("fp8", 1, HOPPER)) == ("gemv_kernel",)
    assert bound.launches(*placed("fp8", 300, HOPPER)) == ("round_rows_kernel", "(cuBLAS)")
    assert bound.launches(*placed("int4", 1, HOPPER)) == ("gemv_kernel",)
    x, weight, bias = placed("int4", 4, HOPPER)
    order = as_if_on(HOPPER, torch.empty(1024, dtype=torch.int32, device="meta"))
    assert bound.launches(x, weight._replace(order=order), bias) == ("(ATen)", "dot_kernel")
    # Scales that the library does not know for activations by rows: of groups of columns, of several rows.
    x, weight, bias = placed("fp8", 300, HOPPER)
    assert bound.choose(x, weight._replace(columns=128), bias).name == DEQUANTIZED
    assert bound.choose(x, weight._replace(rows=128), bias).name == DEQUANTIZED
    # Zeros of values in a byte, and rows that do not start at multiples of 16 bytes.
    x, weight, bias = placed("int8_weights", 1, HOPPER)
    assert bound.choose(x, weight._replace(zeros=weight.scales), bias).name == DEQUANTIZED
    assert bound.choose(*placed("int4", 1, HOPPER, width=1016)).name == DEQUANTIZED


def test_tiles_of_one_row_by_bytes() -> None:
    """Of 8B: qkv, o, gate and up, down; then of a smaller model."""
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096, 1024), (1024, 3072))
    found = [quantized_tile(1, out, width, "e4m3", 0, HOPPER) for out, width in shapes]
    assert [tile and (tile.kernel, tile.columns, tile.warps) for tile in found] == [
        ("gemv", 8, 4),
        ("gemv", 8, 4),
        ("gemv", 4, 4),
        ("gemv", 2, 8),
        ("gemv", 4, 2),
        ("gemv", 4, 4),
    ]


def test_tiles_of_one_row_by_int4() -> None:
    """256 bytes of a thread, or all that there are; groups of fewer columns than a thread takes go another way."""
    for out, width, group in ((6144, 4096, 128), (28672, 4096, 128), (4096, 14336, 128), (1024, 1024, 32), (64, 96, 0)):
        tile = quantized_tile(1, out, width, "int4", group, HOPPER)
        assert tile is not None
        assert (tile.kernel, tile.early) == ("gemv", True)
        assert tile.fits(1, out, width)
        assert tile.width // 2 * tile.columns <= 256 * 32 * tile.warps
    for width, group in ((4096, 16), (4128, 48), (16400, 0), (32768, 128)):
        tile = quantized_tile(1, 4096, width, "int4", group, HOPPER)
        assert tile is None or tile.kernel == "dot"
    # Too many rows, too many columns, columns that are no whole chunks, and groups that are none.
    for rows, width, group in ((2, 64, 0), (1, 2048, 0), (1, 48, 0), (1, 96, 48), (1, 64, 16)):
        weight = pack(torch.ones(8, width), Scheme("int4", 1, group))
        with pytest.raises(ValueError, match="one row of int4"):
            multiply(SmallMProduct(torch.ones(rows, width), weight), SmallMTile("gemv", 8, 1024, 1))


def test_splits_keep_groups_whole_and_divide_the_width() -> None:
    for rows in (1, 5, 16, 64, 256):
        for out, width in ((1024, 3072), (6144, 4096), (4096, 14336), (896, 4864), (2560, 9728)):
            for kind, group in (
                ("e4m3", 0),
                ("e4m3", 128),
                ("int4", 128),
                ("int4", 32),
                ("e2m1", 32),
                ("e2m1", 16),
                ("2:4", 0),
            ):
                tile = quantized_tile(rows, out, width, kind, group, HOPPER)
                assert tile is not None
                part = width // tile.splits
                assert width % tile.splits == 0
                assert tile.kernel == "gemv" or part % tile.width == 0
                assert group == 0 or part % group == 0
                # Eight columns of 2:4 are one value, and tensor cores take 16 of these at least.
                assert kind != "2:4" or tile.width >= 128
    # 64 divides this width, 128 does not.
    assert quantized_tile(5, 512, 704, "2:4", 0, HOPPER) is None
    assert quantized_tile(5, 512, 704, "e4m3", 0, HOPPER) is not None
