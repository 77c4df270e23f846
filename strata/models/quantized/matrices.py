"""The matrices that are packed each by itself, of a tensor of a checkpoint, which may hold those of all experts."""

from __future__ import annotations

from typing import NamedTuple

from strata.models.shard import Box, Boxes


class LocalMatrix(NamedTuple):
    """A matrix with scales of its own. boxes: of it, that are wanted. expert, first_row: where it lies in a tensor
    [experts, rows, columns]; None, 0: it is the tensor."""

    shape: tuple[int, int]
    boxes: Boxes
    expert: int | None = None
    first_row: int = 0

    def in_tensor(self, box: Box) -> Box:
        """Where a box of the matrix lies in the tensor."""
        (first, end), columns = box
        if self.expert is None:
            return box
        return (self.expert, self.expert + 1), (first + self.first_row, end + self.first_row), columns


def local_matrices(name: str, shape: tuple[int, ...], boxes: Boxes) -> list[LocalMatrix]:
    """Of a tensor of `shape`, of the parameter `name`, the matrices that boxes of it reach into.

    Of [experts, rows, columns] (Granite) each expert has its own, gate and up apart, as of checkpoints that have them
    in tensors of their own; experts in the order of the boxes.
    """
    if len(shape) == 2:
        return [LocalMatrix((shape[0], shape[1]), boxes)]
    rows = shape[1] // (2 if name.endswith("gate_up_proj") else 1)
    found = []
    for expert in dict.fromkeys(number for numbers, *_ in boxes for number in range(*numbers)):
        for start in range(0, shape[1], rows):
            own = tuple(
                ((max(first - start, 0), min(end - start, rows)), columns)
                for numbers, (first, end), columns in boxes
                if expert in range(*numbers) and first < start + rows and end > start
            )
            found.append(LocalMatrix((rows, shape[2]), own, expert, start))
    return found
