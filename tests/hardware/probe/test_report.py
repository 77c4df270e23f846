"""What a probe found is kept as JSON and read back; what no probe wrote is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.hardware.machine import Processor
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.probe.report import Gpu, ProbeReport, file_of, keep, kept
from strata.hardware.telemetry import Summary

REPORT = ProbeReport(
    "NVIDIA H200",
    "2026-11-23",
    21.5,
    Processor("Intel", 16, 1 << 37, {"1d": 49152}, 2),
    (Gpu("NVIDIA H200", "GPU-1", 150 << 30, 60 << 20, 132, 700.0, 1.98e9, (5, 16), 18, (None, "processors"), (1,), 0),),
    (
        Ceiling("product", 8e14, 1.4e-3, "bfloat16", (8192, 8192, 8192)),
        Ceiling("all_reduce", 3.5e-6, 3.5e-6, "bfloat16", (65536,), 2, "one shot"),
    ),
    {"product, sustained": Summary(699.0, 1.7e9, 61, ("power limit",))},
    {"attention": "the time was over"},
    {"torch": "2.11.0", "driver": None},
)


def test_a_report_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    keep(REPORT, path)
    assert kept(path) == REPORT
    assert [one.name for one in path.parent.iterdir()] == ["report.json"]
    assert [one["unit"] for one in json.loads(path.read_text())["ceilings"]] == ["FLOP/s", "s"]


def test_the_name_of_the_file(tmp_path: Path) -> None:
    caches = {"XDG_CACHE_HOME": str(tmp_path)}
    assert file_of("NVIDIA H100 80GB HBM3", 1, caches) == tmp_path / "strata" / "probe" / "nvidia-h100-80gb-hbm3.json"
    assert file_of("AMD EPYC", 0, caches).name == "amd-epyc.json"
    assert file_of("NVIDIA H200", 8, caches).name == "nvidia-h200-x8.json"
    assert file_of("../..", 0, {}) == Path.home() / ".cache" / "strata" / "probe" / "unknown.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "it holds no JSON object"),
        ("{", "Expecting property name"),
        ('{"format": 2}', "format 2 is not 1; run `strata probe` again"),
        ('{"format": 1}', "a field is missing or unknown .'product'.; run `strata probe` again"),
    ],
)
def test_what_no_probe_wrote_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"report.json: .*{message}"):
        kept(path)


def test_unknown_quantities_and_absent_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT.to_dict()).replace("all_reduce", "gossip"))
    with pytest.raises(ValueError, match=r"unknown .'gossip'"):
        kept(path)
    with pytest.raises(ValueError, match=r"absent.json: No such file or directory; `strata probe` writes it"):
        kept(tmp_path / "absent.json")
