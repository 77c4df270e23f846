"""Devices and hosts of a plan: what was measured of them, and what stands in where nothing was."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.cost.evidence import MEMORY, PRODUCTS, STAND_IN, Evidence, evidence_of
from strata.hardware.figures import Device
from strata.hardware.links import LINKS, Link, link_of, network_link
from strata.hardware.specs import check_planned, device


@dataclass(frozen=True)
class Machine:
    """evidence: what was measured of the device. network: bytes/s each way of a device to other hosts. per_host:
    devices of a host.
    """

    listed: Device
    evidence: Evidence
    network: float
    per_host: int

    @staticmethod
    def of(listed: Device, dtype: str, per_host: int, network: float) -> Machine:
        """listed: of the database. Raises ValueError, naming it, for a device whose peak in `dtype`, bandwidth or
        memory is not known."""
        check_planned(listed, dtype)
        return Machine(listed, evidence_of(listed), network, per_host)

    @property
    def runs(self) -> bool:
        """Whether the device runs Strata's kernels."""
        return self.listed.cuda is not None

    @property
    def kernels(self) -> Device:
        """For which the graphs are made."""
        return self.listed if self.runs else device(STAND_IN)

    @property
    def sources(self) -> tuple[str, ...]:
        """Of all that is known, in words."""
        sources = list(self.evidence.sources)
        if not self.evidence.calls:
            sources.append(
                f"stated efficiency, {PRODUCTS:.0%} of the peak and {MEMORY:.0%} of the bandwidth, as kernels reach "
                "on an H200: nothing was measured of this device"
            )
        if not self.runs:
            sources.append(f"graphs as on {STAND_IN}: Strata has no kernels for {self.listed.product}")
        return tuple(sources)

    def link(self, ranks: int) -> Link | None:
        """Between so many ranks: of the host, or of the network if they are on several; None of one. Raises ValueError
        if the device's is not known."""
        if ranks == 1:
            return None
        if ranks > self.per_host:
            return network_link(self.network)
        if self.listed.key in LINKS:
            return LINKS[self.listed.key]
        return replace(link_of(self.evidence.device, by_host=True), latency=LINKS[STAND_IN].latency)

    def evidence_of(self, ranks: int) -> Evidence:
        """For so many ranks: sums were measured between those of a host."""
        if ranks <= self.per_host:
            return self.evidence
        calls = {operation: found for operation, found in self.evidence.calls.items() if operation != "all_reduce"}
        return replace(self.evidence, calls=calls)
