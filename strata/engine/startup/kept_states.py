"""Whether what layers keep of tokens can be kept in the way that an engine is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.engine.startup.divided_keys import check_kept_keys
from strata.engine.startup.narrow_messages import check_columns
from strata.models.config import ModelConfig
from strata.models.families import FAMILIES
from strata.models.state import FixedState

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig


def check_states(asked: EngineConfig, config: ModelConfig) -> None:
    """Raises ValueError if ranks cannot have what layers keep, or what they add up, in the way that is asked for."""
    given, states = _apart(asked), FAMILIES[config.architecture].states(config)
    if given is not None and any(isinstance(state, FixedState) for state in states):
        raise ValueError(
            f"{given}={getattr(asked, given)} is not there for {config.architecture}, of which layers keep a state of "
            "fixed size: leave it out"
        )
    _check_pages(asked, config, keeps_rows=not all(isinstance(state, FixedState) for state in states))
    check_kept_keys(asked, config)
    check_columns(asked, config)


def keeps_all(asked: EngineConfig) -> bool:
    """Whether all layers keep all tokens, windows or not: ranks have stages, parts of prompts or sequences of their
    own."""
    return _apart(asked) is not None


def _check_pages(asked: EngineConfig, config: ModelConfig, *, keeps_rows: bool) -> None:
    """Raises ValueError if rows cannot be kept in the bits that are asked for."""
    given = f"kv_cache_dtype={asked.kv_cache_dtype!r}"
    if asked.kv_cache_dtype == "auto":
        return
    if not keeps_rows:
        raise ValueError(f"{given} is not there for {config.architecture}, which keeps no keys or values: leave it out")
    if config.latent is not None:
        raise ValueError(f"{given} is not there for {config.architecture}, whose pages keep latents: leave it out")


def _apart(asked: EngineConfig) -> str | None:
    """The option by which ranks have stages, parts of prompts or sequences of their own."""
    given = {
        "pipeline_parallel_size": asked.pipeline_parallel_size > 1,
        "prefill_context_parallel_size": asked.prefill_context_parallel_size > 1,
        "enable_dp_attention": asked.enable_dp_attention,
    }
    return next((name for name, is_given in given.items() if is_given), None)
