"""What prompts are made of: ids, and content that is no text, such as an image or soft embeddings.

Everywhere behind this a prompt is one number for each position: an id, or a negative key of the content that stands
there. So lengths, pages and the prefix tree count positions, and tell content apart as they tell ids apart.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """A segment that is no text. positions: how many it takes. digest: of all that the vectors there depend on."""

    positions: int
    digest: bytes

    def keys(self) -> array[int]:
        """A negative number for each position, that no other content has there but by a collision of 63 bits."""
        hashed = hashlib.shake_256(self.positions.to_bytes(8, "little") + self.digest)
        keys = array("q", hashed.digest(8 * self.positions))
        return array("q", [key if key < 0 else ~key for key in keys])


def positions(segments: Iterable[Collection[int] | Content]) -> tuple[int, ...]:
    """A prompt of these segments, one after the other: ids as they are, and the keys of contents."""
    prompt: tuple[int, ...] = ()
    for segment in segments:
        prompt += tuple(segment.keys() if isinstance(segment, Content) else segment)
    return prompt
