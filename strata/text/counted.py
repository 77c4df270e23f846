"""How many there are of something, in words."""

from __future__ import annotations


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """Such as "1 token" or "1,000 tokens". number: rounded to a whole one. plural: where it is not `noun` with an s."""
    shown = f"{number:,.0f}"
    return f"{shown} {noun if shown == '1' else plural or noun + 's'}"
