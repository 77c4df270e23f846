"""What ran, beside a run's log: `run.json`, from which the run can be explained without its files and its machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from strata.files.json_object import read_existing_object
from strata.files.toml_tables import read_table
from strata.models.config import ModelConfig, config_from_dict
from strata.parallel.layout import Layout
from strata.train.config import TrainConfig

DESCRIPTION = "run.json"


@dataclass(frozen=True)
class RunDescription:
    """A run as its first rank began it. model: what was trained. layout: with the micro-batches that followed.
    recompute: one of `strata.train.config.RECOMPUTE`, chosen if the config left it open. device: as driver or system
    names it; kind: "cuda" or "cpu". threads: of a CPU, on each rank.
    """

    config: TrainConfig
    model: ModelConfig
    layout: Layout
    recompute: str
    device: str
    kind: str
    threads: int

    def write(self, folder: Path) -> None:
        """Raises OSError if the folder takes no files."""
        values = vars(self) | {
            "config": _given(asdict(self.config)),
            "model": self.model.to_dict(),
            "layout": asdict(self.layout),
        }
        (folder / DESCRIPTION).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path) -> RunDescription:
    """Of the run in a folder. Raises ValueError, naming the file, if there is none or it is not such a file."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"{folder} holds no {DESCRIPTION}: it is not the folder of a run of this version of Strata")
    values, known = read_existing_object(path), {one.name for one in fields(RunDescription)}
    if values.keys() != known:
        wrong = sorted(values.keys() ^ known)[0]
        raise ValueError(f"{path}: the key {wrong!r} is {'unknown' if wrong in values else 'missing'}")
    try:
        return RunDescription(
            read_table(TrainConfig, values["config"]),
            config_from_dict(values["model"], "model"),
            read_table(Layout, values["layout"]),
            recompute=str(values["recompute"]),
            device=str(values["device"]),
            kind=str(values["kind"]),
            threads=int(values["threads"]),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _given(value: Any) -> Any:
    """Without what was left out: a table of a config has no null."""
    if isinstance(value, dict):
        return {key: _given(one) for key, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list | tuple) else value
