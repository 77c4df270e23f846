"""What decides the numbers of a run: a checkpoint keeps it, and a resumed run must share it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from strata.train.config import TrainConfig
from strata.train.data.loader import ORDER
from strata.train.data.shards import TokenDataset


def recipe_of(config: TrainConfig, datasets: Sequence[TokenDataset], device: str) -> dict[str, Any]:
    """By section, as JSON gives it back. Where ranks and state lie, the length of a run and its intervals are no part
    of it: those may change when a run is resumed.

    datasets: that are trained on. device: "cpu" or "cuda", which round differently.
    """
    values = asdict(config)
    del values["optimizer"]["offload"]
    for source in values["data"]["sources"]:
        del source["folder"]  # its fingerprint says what is in it
    recipe = {
        "run": {"seed": config.run.seed, "device": device, "precision": config.run.precision},
        **{name: values[name] or {} for name in ("start", "model", "data", "optimizer", "balance", "lora", "dpo")},
        "validation": {"share": None if config.validation is None else config.validation.share},
        "order": {"version": ORDER} | ({} if config.run.epochs is None else {"by_epoch": True}),
        "fingerprints": dict(enumerate(one.fingerprint for one in datasets)),
    }
    read: dict[str, Any] = json.loads(json.dumps(recipe))
    return read
