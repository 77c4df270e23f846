"""The few instructions of PTX that unpack values, in Python: what assembly computes where there is no GPU."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch


def run(text: str, given: int, results: int, *more: int) -> list[int]:
    """The 32-bit results of a block of assembly for 32-bit operands. Raises KeyError for other instructions."""
    registers = {f"${place}": operand for place, operand in enumerate((given, *more), results)}
    for line in text.strip("{} \n").split(";"):
        instruction, _, operands = line.strip().partition(" ")
        if instruction and not instruction.startswith(".reg"):
            target, *sources = (operand.strip() for operand in operands.split(","))
            registers[target] = _INSTRUCTIONS[instruction](*(_value(source, registers) for source in sources))
    return [registers[f"${index}"] for index in range(results)]


def halves(word: int) -> list[float]:
    """The two bfloat16 numbers of a register."""
    return [_float((word >> shift & 0xFFFF) << 16) for shift in (0, 16)]


def float16_halves(word: int) -> list[float]:
    """The two float16 numbers of a register."""
    return list(struct.unpack("<2e", word.to_bytes(4, "little")))


def _value(source: str, registers: dict[str, int]) -> int:
    if source in registers:
        return registers[source]
    return int(source[2:], 16) if source.startswith("0f") else int(source, 0)


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def _prmt(low: int, high: int, selector: int) -> int:
    source = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    return int.from_bytes(bytes(source[selector >> 4 * index & 15] for index in range(4)), "little")


def _lop3(a: int, b: int, c: int, table: int) -> int:
    """One of the 256 functions of three bits, by its truth table."""
    return sum((table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)) & 1) << bit for bit in range(32))


def _fma(*operands: int) -> int:
    """Of two bfloat16 numbers each; a float holds their product and sum, and is rounded once."""
    first, second, third = (halves(operand) for operand in operands)
    exact = torch.tensor([a * b + c for a, b, c in zip(first, second, third, strict=True)], dtype=torch.float64)
    low, high = exact.to(torch.bfloat16).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def _add(first: int, second: int) -> int:
    """Of two float16 numbers each."""
    sums = torch.tensor(float16_halves(first)).half() + torch.tensor(float16_halves(second)).half()
    return int.from_bytes(struct.pack("<2e", *sums.tolist()), "little")


def _dot(first: bool, second: bool) -> Callable[[int, int, int], int]:
    """Of four bytes each, signed or not, and what it is added to."""

    def dot(a: int, b: int, total: int) -> int:
        pairs = zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
        return total + sum(_byte(left, first) * _byte(right, second) for left, right in pairs) & 0xFFFFFFFF

    return dot


def _byte(bits: int, signed: bool) -> int:
    return bits - 256 if signed and bits > 127 else bits


def _fma_wide(*operands: int) -> int:
    """Of float32, whose product and sum a double holds here."""
    a, b, c = (_float(operand) for operand in operands)
    return _bits(a * b + c)


_INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma,
    "add.rn.f16x2": _add,
    "shr.u32": lambda a, b: a >> b,
    "mad.lo.s32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
    "dp4a.s32.u32": _dot(True, False),
    "dp4a.u32.s32": _dot(False, True),
    "dp4a.u32.u32": _dot(False, False),
    "fma.rn.f32": _fma_wide,
    "mov.b32": lambda a: a,
    "add.rn.f32": lambda a, b: _bits(_float(a) + _float(b)),
}
