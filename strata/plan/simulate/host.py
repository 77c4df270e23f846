"""What the host of an engine takes, beside the steps of the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostTimes:
    """Seconds of the host's work.

    request: from when a client sends a request until the engine has it. answer: from when the engine has an id until
    the client has its text. step, sequence: to plan and launch a step, and for each of its sequences. report, token:
    to take in a step's ids and send them on, and for each id.
    """

    request: float
    answer: float
    step: float
    sequence: float
    report: float
    token: float

    def launch(self, sequences: int) -> float:
        """Of a step of so many sequences."""
        return self.step + self.sequence * sequences

    def deliver(self, tokens: int) -> float:
        """Of so many ids of a step."""
        return self.report + self.token * tokens


NO_HOST = HostTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
# Of Strata's server beside an H200 (see docs/plan.md).
SERVER = HostTimes(request=1.2e-3, answer=3e-4, step=1.5e-4, sequence=3e-6, report=5e-5, token=3e-6)
