"""What a GPU does while something runs on it: power, clocks, temperature and what holds them down, read by a thread."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from strata.hardware.dcgm import Reader
from strata.hardware.nvml import NvmlDevice


@dataclass(frozen=True)
class TelemetryReading:
    """seconds: of `time.perf_counter`. power: watts. clock: Hz of the multiprocessors. temperature: degrees Celsius.
    slowed_by: see `NvmlDevice.slowed_by`. None: the driver does not tell. activity: see `activity_reader`.
    """

    seconds: float
    power: float | None
    clock: float | None
    temperature: float | None
    slowed_by: tuple[str, ...] | None
    activity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Of several readings: means, the highest temperature, every reason that was given in any, by name. activity: means
    of shares."""

    power: float | None
    clock: float | None
    temperature: float | None
    slowed_by: tuple[str, ...]
    activity: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(readings: Sequence[TelemetryReading]) -> Summary:
        """Without readings all is None."""
        powers = [one.power for one in readings if one.power is not None]
        clocks = [one.clock for one in readings if one.clock is not None]
        degrees = [one.temperature for one in readings if one.temperature is not None]
        reasons = {reason for one in readings for reason in one.slowed_by or ()}
        parts = dict.fromkeys(name for one in readings for name in one.activity)
        return Summary(
            statistics.fmean(powers) if powers else None,
            statistics.fmean(clocks) if clocks else None,
            max(degrees, default=None),
            tuple(sorted(reasons)),
            {name: statistics.fmean(one.activity[name] for one in readings if name in one.activity) for name in parts},
        )


class TelemetrySampler:
    """Reads a device every `interval` seconds, from entering to leaving; without a device it reads nothing."""

    def __init__(self, device: NvmlDevice | None, interval: float = 0.01, activity: Reader = dict) -> None:
        """activity: tells how busy it is."""
        self._device, self._activity = device, activity
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self.readings: list[TelemetryReading] = []

    def __enter__(self) -> TelemetrySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, start: float, end: float) -> list[TelemetryReading]:
        """The readings of a time, by `time.perf_counter`."""
        return [one for one in self.readings if start <= one.seconds <= end]

    def _run(self) -> None:
        device = self._device
        if device is None:
            return
        while not self._ended.wait(self._interval):
            self.readings.append(
                TelemetryReading(
                    time.perf_counter(),
                    device.power(),
                    device.clock("sm"),
                    device.temperature(),
                    device.slowed_by(),
                    self._activity(),
                )
            )
