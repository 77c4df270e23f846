"""Which models are served alone."""

from __future__ import annotations

from strata.models.config import ModelConfig


def check_trainable(config: ModelConfig) -> None:
    """Raises ValueError for a model that is not trained yet, neither whole nor by adapters."""
    if config.logit_softcap is not None:
        raise ValueError(
            f"final_logit_softcapping = {config.logit_softcap} is not supported in training, whose loss takes "
            "the head's products as they are; accepted is null"
        )
