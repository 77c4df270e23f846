"""What config.json says of rotary embeddings, in the classic form and in that of transformers 5."""

from __future__ import annotations

from typing import Any

from strata.files.fields import Fields
from strata.models.family_config import FULL, SLIDING, FamilyConfig
from strata.models.rotary import DynamicRope, RopeConfig, read_rope


def read_ropes(fields: Fields, family: FamilyConfig, head_dim: int, max_length: int) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (classic) or `rope_parameters` (transformers 5)."""
    theta = fields.number("rope_theta", family.rope_theta)
    original = fields.take("original_max_position_embeddings", None)
    key = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    scaling, parameters = fields.take("rope_scaling", None), fields.take("rope_parameters", None)
    if scaling and parameters:
        raise fields.wrong("rope_parameters", parameters, "null beside rope_scaling")
    values = scaling or parameters or {}
    if not isinstance(values, dict):
        raise fields.wrong(key, values, "an object or null")
    values = _same_for_all_layers(fields, key, values)
    if original is not None:
        values = values | {"original_max_position_embeddings": original}
    rope = read_rope(Fields(values, f"{fields.where}, {key}"), theta, max_length)
    if isinstance(rope, DynamicRope) and head_dim == 2:
        raise fields.wrong("head_dim", head_dim, "at least 4 with rope_type 'dynamic'")
    return rope


def _same_for_all_layers(fields: Fields, key: str, values: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 may key the parameters by layer type; only equal ones are supported."""
    if not values.keys() & {FULL, SLIDING}:
        return values
    kinds = list(values.values())
    if not values.keys() <= {FULL, SLIDING} or any(kind != kinds[0] for kind in kinds):
        raise fields.wrong(key, values, "the same parameters for every layer type")
    if not isinstance(kinds[0], dict):
        raise fields.wrong(key, values, "an object for each layer type")
    return kinds[0]
