"""Where the log of a run goes besides its JSON lines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogConfig:
    """tensorboard: event files in the folder `tensorboard` of the run. wandb: Weights & Biases, which takes its key
    from its own environment or login; wandb_offline writes into the folder `wandb` alone, for `wandb sync` later.
    """

    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "strata"
    wandb_offline: bool = False

    def __post_init__(self) -> None:
        if not self.wandb_project:
            raise ValueError("log.wandb_project is empty; give the project's name, or leave it out")
        if self.wandb_offline and not self.wandb:
            raise ValueError("log.wandb_offline says how log.wandb writes, which is off; set log.wandb = true too")
