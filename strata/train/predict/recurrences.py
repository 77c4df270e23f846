"""What recurrent layers keep of a token for the backward pass: there their operations are torch's, in float32."""

from __future__ import annotations

from strata.models.family_config import RecurrenceConfig
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig
from strata.models.recurrence.state_space_config import StateSpaceConfig

# Tokens of the chunks in which both run (`strata.kernels.recurrent`).
_CHUNK = 64


def recurrent_bytes(config: RecurrenceConfig, several: bool) -> int:
    """Between the products of one layer, the input of the last included. several: sequences in a batch, of which torch
    copies what it multiplies."""
    # Each tap's inputs, and what enters silu; a gated norm's numbers in float32 and in 16 bits.
    around = 4 * (config.width + 1) * config.conv_size + (4 * 4 + 2 + 2) * config.inner_size
    if isinstance(config, StateSpaceConfig):
        return around + 4 * _state_space_elements(config, several)
    return around + 4 * _gated_delta_elements(config, several)


def _state_space_elements(config: StateSpaceConfig, several: bool) -> int:
    """Inputs; what goes into and out of states, of each head and of each group; scores within a chunk; the states
    before it."""
    heads, inner, size = config.heads, config.inner_size, config.state_size
    within = (3 + several) * inner + 3 * heads * size + 2 * config.groups * size + 4 * heads * _CHUNK
    return within + inner * size // _CHUNK


def _gated_delta_elements(config: GatedDeltaConfig, several: bool) -> int:
    """Keys and queries, of each head and of each key head; values; scores and the system within a chunk; the states
    before it."""
    heads, inner, size = config.heads, config.inner_size, config.key_dim
    within = (3 + 5 * several) * heads * size + 2 * config.key_heads * size + 4 * inner + 6 * heads * _CHUNK
    return within + inner * size // _CHUNK
