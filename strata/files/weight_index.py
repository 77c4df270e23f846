"""Which files of a checkpoint folder hold its weights, without torch."""

from __future__ import annotations

from pathlib import Path

from strata.files.json_object import read_existing_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, as the index of a folder lists them. Raises ValueError if it is no index."""
    homes = read_existing_object(path).get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise ValueError(f"{path} is not an index with a weight_map: it lists no tensor")
    for home in homes.values():
        if not isinstance(home, str) or Path(home).name != home:
            raise ValueError(f"{path} names {home!r}, which is not a file of the same folder")
    return homes
