"""Devices and hosts of a plan: what was measured of them, and what stands in where nothing was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strata.cost.all_reduce_times import AllReduceTimes
from strata.cost.evidence import MEMORY, PRODUCTS, STAND_IN, attainable, evidence_of
from strata.cost.predict import StepPredictor
from strata.hardware.figures import Device
from strata.hardware.links import LINKS, Link, link_of
from strata.hardware.prediction import Call
from strata.hardware.specs import check_planned, device
from strata.kernels import tuned

# A message from host to host; NCCL counts 2.7 to 9.6 us for InfiniBand (src/graph/tuning.cc, 2026).
_NETWORK_LATENCY = 5e-6


@dataclass(frozen=True)
class Machine:
    """device: by whose ceilings steps are priced. kernels: for which the graphs are made; the device itself, if it runs
    Strata's kernels. runs: whether it does. predictor: of a rank without others. sums: measured, between ranks of a
    host. sources: of all of it, in words. network: bytes/s each way of a device to other hosts. per_host: devices of a
    host.
    """

    listed: Device
    device: Device
    kernels: Device
    runs: bool
    predictor: StepPredictor
    sums: tuple[Call, ...]
    sources: tuple[str, ...]
    network: float
    per_host: int

    @staticmethod
    def of(listed: Device, dtype: str, per_host: int, network: float) -> Machine:
        """listed: of the database. Raises ValueError, naming it, for a device whose peak in `dtype`, bandwidth or
        memory is not known."""
        check_planned(listed, dtype)
        runs = listed.cuda is not None
        table = tuned.read(listed.product)
        found = evidence_of(listed)
        known, sources = found.device, list(found.sources)
        if not found.calls and not table:
            known = attainable(known)
            sources.append(
                f"stated efficiency, {PRODUCTS:.0%} of the peak and {MEMORY:.0%} of the bandwidth, as kernels reach "
                "on an H200: nothing was measured of this device"
            )
        if not runs:
            sources.append(f"graphs as on {STAND_IN}: Strata has no kernels for {listed.product}")
        calls: Mapping[str, list[Call]] = found.calls
        predictor = StepPredictor.of(known, dtype, table, calls, products=found.products, loan=found.loan)
        kernels = listed if runs else device(STAND_IN)
        sums = tuple(calls.get("all_reduce", ()))
        return Machine(listed, known, kernels, runs, predictor, sums, tuple(sources), network, per_host)

    def link(self, ranks: int) -> Link:
        """Between so many ranks: of the host, or of the network if they are on several. Raises ValueError if the
        device's is not known."""
        if ranks > self.per_host:
            source = "the network as given, and a message's way by NCCL's own table"
            return Link(0.0, _NETWORK_LATENCY, self.network, source, "2026")
        if self.listed.key in LINKS:
            return LINKS[self.listed.key]
        known = self.device.known("link") or self.device.known("host")
        if known is None:
            raise ValueError(f"no link between several {self.listed.key} is recorded")
        promised = Link(0.0, 0.0, known.value, known.source, known.date) if known.quantity == "host" else None
        promised = promised or link_of(self.device)
        return replace(promised, latency=LINKS[STAND_IN].latency)

    def predictor_of(self, ranks: int) -> StepPredictor:
        """Of one of so many ranks that send each other messages. Raises ValueError as `link`."""
        if ranks == 1:
            return self.predictor
        link = self.link(ranks)
        measured = self.sums if ranks <= self.per_host else ()
        return replace(self.predictor, link=link, sums=AllReduceTimes.of(measured, link.latency), ranks=ranks)
