"""What the host of an engine takes, beside the steps of the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostTimes:
    """Seconds of the host's work.

    request: from when a client sends a request until the process has it that serves HTTP. parse, parse_token: of that
    process, which takes one request after another, and for each token of a prompt. answer: from when the engine has an
    id until the client has its text. step, sequence: of the engine, to plan and launch a step, and for each of its
    sequences. report, token: to take in a step's ids and send them on, and for each id.
    """

    request: float
    parse: float
    parse_token: float
    answer: float
    step: float
    sequence: float
    report: float
    token: float

    def parsed(self, tokens: int) -> float:
        """Of a prompt of so many tokens."""
        return self.parse + self.parse_token * tokens

    def launch(self, sequences: int) -> float:
        """Of a step of so many sequences."""
        return self.step + self.sequence * sequences

    def deliver(self, tokens: int) -> float:
        """Of so many ids of a step."""
        return self.report + self.token * tokens


NO_HOST = HostTimes(*(0.0,) * 8)
# Of Strata's server beside an H200 (see docs/plan.md).
SERVER = HostTimes(1.6e-3, 4e-4, 5e-7, 4e-4, 1.5e-4, 3e-6, 5e-5, 3e-6)
