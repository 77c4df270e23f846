"""What is to be trained, and on what."""

from __future__ import annotations

from dataclasses import dataclass

from strata.comm.cost import Network
from strata.hardware.figures import Device
from strata.hardware.links import link_of, network_link
from strata.models.config import ModelConfig
from strata.train.config import PRECISIONS, check_trainable


@dataclass(frozen=True)
class TrainingTask:
    """A step over `batch_tokens` in sequences of `sequence` tokens, on so many devices.

    per_host: devices that a fast link joins. network: bytes/s each way of a device to other hosts. precision: of the
    layers' products, one of `strata.train.config.PRECISIONS`.
    """

    config: ModelConfig
    device: Device
    gpus: int
    batch_tokens: int
    sequence: int
    per_host: int = 8
    network: float = 50e9
    precision: str = "bf16"

    def __post_init__(self) -> None:
        """Raises ValueError, saying what is accepted, for a task that no layout can fulfil."""
        check_trainable(self.config)
        for name in ("gpus", "batch_tokens", "sequence", "per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} = {getattr(self, name)} must be at least 1")
        if self.batch_tokens % self.sequence:
            raise ValueError(
                f"a batch of {self.batch_tokens} tokens is not a whole number of sequences of {self.sequence}; "
                f"give {self.batch_tokens // self.sequence * self.sequence or self.sequence}, or another sequence"
            )
        if self.sequence > self.config.longest:
            raise ValueError(
                f"a sequence of {self.sequence} tokens is longer than the {self.config.longest} that the model reads"
            )
        if self.gpus > self.per_host and self.gpus % self.per_host:
            raise ValueError(
                f"{self.gpus} devices do not fill hosts of {self.per_host}; give a multiple, or --gpus-per-host"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r} is unknown; known are {', '.join(PRECISIONS)}")
        for quantity, dtype in (("compute", "bfloat16"), ("bandwidth", None), ("memory", None)):
            self.device.ceiling(quantity, dtype)
        if self.precision != "bf16":
            self.device.ceiling("compute", "float8")

    @property
    def sequences(self) -> int:
        """Of a step, on all devices together."""
        return self.batch_tokens // self.sequence

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.per_host)

    def reach(self) -> Network | None:
        """What joins the devices; None of one. Raises ValueError if nothing is known of their link."""
        if self.gpus == 1:
            return None
        inside = link_of(self.device, by_host=self.per_host > 1)
        return Network(inside, self.per_host, network_link(self.network))
