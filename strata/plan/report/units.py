"""Figures as people read them."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def seconds(value: float) -> str:
    """A time with three figures, in seconds, milliseconds or microseconds: "3.83 ms"."""
    scale, unit = next((one for one in _SECONDS if abs(value) >= 0.9995 * one[0]), _SECONDS[-1])
    return f"{_three(value / scale)} {unit}"


def quantity(value: float, unit: str) -> str:
    """With three figures and a prefix: "757 TFLOP/s"."""
    scale, prefix = next((one for one in _PREFIXES if abs(value) >= 0.9995 * one[0]), (1.0, ""))
    return f"{_three(value / scale)} {prefix}{unit}"


def share(part: float, whole: float) -> str:
    """In percent; a dash of nothing."""
    return f"{part / whole:.1%}" if whole else "-"


def _three(value: float) -> str:
    """Three figures, or as many as stand before the point."""
    if value == 0:
        return "0"
    decimals = next((places for places, most in ((2, 9.995), (1, 99.95)) if abs(value) < most), 0)
    return f"{value:,.{decimals}f}"
