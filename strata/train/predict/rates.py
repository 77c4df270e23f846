"""How fast the parts of a training step go: at the least that a device allows, or as was measured inside such steps."""

from __future__ import annotations

from dataclasses import dataclass

from strata.comm.cost import Network
from strata.cost.training_rates import TRAINING_RATES
from strata.hardware.figures import Device
from strata.hardware.links import link_of
from strata.hardware.prediction import ORIGINS
from strata.hardware.specs import DEVICES
from strata.train.predict.step_shape import TrainShape

# Without a network of its own a run's ranks all lie in one machine.
_ONE_MACHINE = 1 << 30


@dataclass(frozen=True)
class Rates:
    """FLOP/s of products outside the layers and of experts (wide), of the layers' dense products in the run's precision
    (dense), of attention each way; bytes/s of the update.

    host: bytes/s each way of the link to the host; None where no state lies there. network: None of one rank. traffic:
    bytes/s of norms, activations, conversions; None leaves them out. gap: seconds between two kernels. copied: bytes of
    an element of the weights that FSDP copies. beside: the share of a link's bandwidth that messages have beside
    products. slowed: the share of its time that computation loses beside messages. origin: one of `ORIGINS`; "" of a
    least time.
    """

    wide: float
    dense: float
    attention: float
    attention_backward: float
    update: float
    host: float | None = None
    network: Network | None = None
    traffic: float | None = None
    gap: float = 0.0
    copied: int = 0
    beside: float = 1.0
    slowed: float = 0.0
    origin: str = ""


def min_rates(shape: TrainShape, device: Device, network: Network | None = None) -> Rates:
    """The device's ceilings, measured where they were, and its link. network: of ranks in several machines.

    Raises ValueError for several ranks of a device without a link, for state on the host without one to that, and for
    a precision without a peak.
    """
    wide = device.ceiling("compute", "bfloat16").value
    dense = wide if shape.precision == "bf16" else device.ceiling("compute", "float8").value
    bandwidth = device.ceiling("bandwidth").value
    host = device.ceiling("host").value if shape.offload else None
    return Rates(wide, dense, wide, wide, bandwidth, host, _network(shape, device, network))


def measured_rates(shape: TrainShape, device: Device, network: Network | None = None) -> Rates:
    """What was measured inside steps on the device, or the same shares of its maker's promises as on one that was.

    Raises ValueError as `min_rates` does.
    """
    least = min_rates(shape, device, network)
    known, found = next(iter(TRAINING_RATES.items()))
    found = TRAINING_RATES[device.key] if device.key in TRAINING_RATES else found.scaled(DEVICES[known], device)
    width, size = shape.config.hidden_size, shape.config.head_dim
    layout = shape.layout
    stretched = found.modules if layout.tp * layout.pp * layout.ep > 1 else 1.0
    is_between = device.key in TRAINING_RATES and found.wide.encloses(width) and found.attention.encloses(size)
    return Rates(
        found.wide.utilization(width) / stretched,
        (found.wide if shape.precision == "bf16" else found.narrow).utilization(width) / stretched,
        found.attention.utilization(size) / stretched,
        found.attention_backward.utilization(size) / stretched,
        found.traffic,
        None if least.host is None else found.streamed * least.host,
        least.network,
        found.traffic / stretched,
        found.gap,
        found.copied,
        found.beside,
        found.slowed,
        ORIGINS[1] if is_between else ORIGINS[2],
    )


def _network(shape: TrainShape, device: Device, network: Network | None) -> Network | None:
    if shape.layout.ranks == 1:
        return None
    return Network(link_of(device), _ONE_MACHINE) if network is None else network
