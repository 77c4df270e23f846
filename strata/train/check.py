"""Errors of a run that can be found before its ranks start, which takes them seconds."""

from __future__ import annotations

from pathlib import Path

import torch

from strata.comm.launch import World
from strata.train.config import TrainConfig
from strata.train.data.loader import check_room
from strata.train.layout import chosen_layout
from strata.train.start import lasting, open_data, resumed, starting_point, training_loader
from strata.train.trainable import check_trainable


def check_run(config: TrainConfig, ranks: int, *, resume: bool) -> None:
    """Raise ValueError, as `ranks` ranks would, for what they would not begin with: folder, data, start, layout.

    What depends on their devices is left to them, and so are the checksums of the data, which take long.
    """
    resumed(Path(config.run.out), wanted=resume)
    found = open_data(config, _ignored, checksums=False)
    start = starting_point(config, found.every)
    check_trainable(start.config)
    ways = ranks
    if config.parallel is not None:  # otherwise chosen by the memory of the devices
        layout = chosen_layout(config, start.config, World(0, 0, ranks, torch.device("cpu"), None), _ignored)
        ways = layout.dp * layout.shard
    lasting(config, training_loader(config, found, rank=0, ranks=ways))
    check_room(found.validation, config.data.tokens_per_pack)


def _ignored(_: str) -> None:
    """The ranks report it."""
