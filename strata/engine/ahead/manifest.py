"""What a start of one kind compiled, kept beside the kernels: the next one need not find out again."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import triton

import strata
from strata.engine.engine_config import EngineConfig
from strata.kernels.compiling.disk_cache import CheckedCache
from strata.kernels.compiling.noting import Variant
from strata.kernels.device_limits import DeviceLimits
from strata.models import weights

_FILE = "variants.json"
# What no kernel depends on.
_TARGETS = {"tpot_target_ms", "ttft_target_ms"}
_ELSEWHERE = {"model", "device", "seed", "gpu_memory_utilization", "skip_tokenizer_init", *_TARGETS}


@dataclass(frozen=True)
class Manifest:
    """The variants of a start, and the entries of the cache that they lie in."""

    variants: tuple[Variant, ...]
    entries: tuple[str, ...]

    @property
    def is_on_disk(self) -> bool:
        """Whether all entries are there still; what is in them is checked when it is read."""
        return all(CheckedCache(entry).exists() for entry in self.entries)


def key_of(asked: EngineConfig, limits: DeviceLimits) -> str:
    """The name of a kind of start: all that decides which variants it launches, and what they are compiled from."""
    config, _ = weights.resolve(asked.model, asked.load_format)
    options = {name: value for name, value in asdict(asked).items() if name not in _ELSEWHERE}
    versions = (sys.version, torch.__version__, triton.__version__, _source())
    parts = (repr(config), options, asdict(limits), versions)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read(key: str) -> Manifest | None:
    """None if there is none that is whole."""
    content = CheckedCache(key).read(_FILE)
    if content is None:
        return None
    fields = json.loads(content)
    return Manifest(tuple(map(Variant, fields["variants"])), tuple(fields["entries"]))


def write(key: str, variants: Iterable[Variant], entries: Iterable[str]) -> None:
    fields = {"variants": sorted(variant.text for variant in variants), "entries": sorted(set(entries))}
    CheckedCache(key).put(json.dumps(fields).encode(), _FILE)


@cache
def _source() -> str:
    """A sum over all of Strata's own files that decide what is launched."""
    root = Path(strata.__file__).parent
    found = hashlib.sha256()
    for path in sorted((*root.rglob("*.py"), *root.glob("kernels/*/*.json"))):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()
