"""How far a run is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from strata.train.data.loader import DataPosition, Step


@dataclass(frozen=True)
class Position:
    """step: steps done. data_step: steps of data that these used or left out. place: where in the data the next one
    begins. tokens: trained on, over all ranks.
    """

    step: int = 0
    data_step: int = 0
    place: DataPosition = DataPosition()  # noqa: RUF009, it is frozen
    tokens: int = 0

    def after(self, step: Step) -> Position:
        """The position once this step is done."""
        return Position(self.step + 1, self.data_step + 1, step.next, self.tokens + step.tokens)

    def without(self, step: Step) -> Position:
        """The position once this step's samples are left out."""
        return Position(self.step, self.data_step + 1, step.next, self.tokens)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Position:
        return Position(**values | {"place": DataPosition(**values["place"])})
