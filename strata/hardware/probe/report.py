"""What a probe found, as it is kept: JSON in the user's cache folder, one file for a kind and number of devices."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from strata.hardware.machine import Processor
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.telemetry import Summary

_FORMAT = 1


@dataclass(frozen=True)
class Gpu:
    """One GPU as driver and system tell of it. links: NVLinks that are up. pcie: generation and lanes while it works.
    ways: over PCIe to each GPU, in their order; peers: of which it can read the memory. numa: its NUMA node.
    """

    product: str
    uuid: str
    memory: int
    l2: int
    processors: int
    power_limit: float | None = None
    max_clock: float | None = None
    pcie: tuple[int, int] | None = None
    links: int | None = None
    ways: tuple[str | None, ...] = ()
    peers: tuple[int, ...] = ()
    numa: int | None = None


@dataclass(frozen=True)
class ProbeReport:
    """product: what was measured, by the name of its driver or system. seconds: that the probe took. summaries: what
    the device told while a product was held. missing: what was not measured, and why. versions: of driver and torch.
    """

    product: str
    date: str
    seconds: float
    processor: Processor
    gpus: tuple[Gpu, ...]
    ceilings: tuple[Ceiling, ...]
    summaries: dict[str, Summary] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; every ceiling with its unit."""
        ceilings = [asdict(one) | {"unit": one.unit} for one in self.ceilings]
        return asdict(self) | {"format": _FORMAT, "ceilings": ceilings}


def file_of(product: str, count: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the report of so many devices of a product is kept: `strata/probe` in XDG_CACHE_HOME or ~/.cache."""
    name = re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-") or "unknown"
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "strata" / "probe" / f"{name}{f'-x{count}' if count > 1 else ''}.json"


def newest(product: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The report of a product that was kept last, of however many devices; None if there is none."""
    of_one = file_of(product, 1, environment)
    files = [path for path in (of_one, *of_one.parent.glob(f"{of_one.stem}-x*.json")) if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def keep(report: ProbeReport, path: Path) -> None:
    """Write it whole or not at all. Raises OSError if the folder takes no files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
    partial.replace(path)


def lost(report: ProbeReport, path: Path) -> list[str]:
    """What the file has and this report, which did not measure all, has not: quantities with their dtypes. Nothing if
    the file is none of this version's."""
    try:
        before = kept(path) if path.is_file() else None
    except ValueError:
        before = None
    if before is None or not report.missing:
        return []
    found = {(one.quantity, one.dtype) for one in report.ceilings}
    more = dict.fromkeys((one.quantity, one.dtype) for one in before.ceilings)
    return [
        f"{quantity} in {dtype}" if dtype else quantity for quantity, dtype in more if (quantity, dtype) not in found
    ]


def kept(path: Path) -> ProbeReport:
    """What `keep` wrote. Raises ValueError, naming the file, if it is none of this version's."""
    try:
        values = msgspec.json.decode(path.read_bytes())
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise ValueError(f"it is no JSON object of format {_FORMAT}")
        return msgspec.convert(values, ProbeReport)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; `strata probe` writes it") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}; run `strata probe` again") from None
