"""How fast devices of a machine talk to each other, measured where they could be (alpha-beta model)."""

from __future__ import annotations

from dataclasses import dataclass

from strata.hardware.figures import Device

# Of messages that copy engines send beside products, so much takes no time: between two H200 60 to 65 % of 70B's and of
# 8B's at 8,192 tokens (28 % at 4,096).
HIDDEN = 0.62


@dataclass(frozen=True)
class Link:
    """`start` seconds for a call of the library, `latency` seconds a message, `bandwidth` bytes/s each way.

    shortest, fastest: the least seconds that a message was seen to take and the most bytes/s that were, which floors
    count with, since the best of many measurements lies under what the first three say of all; None: those three.
    """

    start: float
    latency: float
    bandwidth: float
    source: str
    date: str
    shortest: float | None = None
    fastest: float | None = None

    def seconds(self, messages: int, sent: int) -> float:
        """The time of one collective in which a rank sends so many messages, one after another, of `sent` bytes in all;
        0 for one that sends nothing."""
        if messages == 0:
            return 0.0
        return self.start + self.latency * messages + sent / self.bandwidth

    def min_seconds(self, messages: int, sent: int) -> float:
        """The floor of messages alone, as of kernels in a CUDA graph, which start without the host."""
        shortest = self.latency if self.shortest is None else self.shortest
        return shortest * messages + sent / (self.fastest or self.bandwidth)


# By the device's key in strata.hardware.specs.
LINKS = {
    "h200": Link(
        start=25.1e-6,
        latency=2.33e-6,
        bandwidth=339e9,
        source="least squares of relative errors over 132 timings of NCCL all-reduce, all-gather, reduce-scatter and "
        "all-to-all, 1 KiB to 1 GiB, on 2, 4 and 8 H200 SXM (NVLink 4, NVSwitch) under torch 2.11.0+cu130; the median "
        "error is 12 %, and 16 MiB and more on 8 GPUs lie within 23 %; fastest: the all-reduce of 1 GiB on 8; "
        "shortest: an all-gather of 1 KiB between 2 in one launch of a CUDA graph (`strata bench comm`, 2026-11-28)",
        date="2026-11-20",
        shortest=1.96e-6,
        fastest=359e9,
    )
}


# A message from host to host; NCCL counts 2.7 to 9.6 us for InfiniBand (src/graph/tuning.cc, 2026).
_NETWORK_LATENCY = 5e-6


def network_link(bandwidth: float) -> Link:
    """Between hosts. bandwidth: bytes/s each way of a device."""
    source = "the network as given, and a message's way by NCCL's own table"
    return Link(0.0, _NETWORK_LATENCY, bandwidth, source, "2026")


def link_of(device: Device, *, by_host: bool = False) -> Link:
    """The link between several of a device: the measured one, else the maker's bandwidth, which takes no time to start.

    by_host: without a link, they send through the processor's memory. Raises ValueError, naming it, for a device
    without a link.
    """
    if device.key in LINKS:
        return LINKS[device.key]
    promised = device.ceiling("host" if by_host and device.known("link") is None else "link")
    return Link(0.0, 0.0, promised.value, promised.source, promised.date)


def known_link(device: Device) -> Link | None:
    """The same; None for a device without a link."""
    try:
        return link_of(device)
    except ValueError:
        return None
