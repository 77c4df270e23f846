"""What config.json says of rotary embeddings, in the classic form and in that of transformers 5."""

from __future__ import annotations

from typing import Any, NamedTuple

from strata.files.fields import Fields
from strata.models.family_config import FULL, SLIDING, FamilyConfig
from strata.models.rotary import DynamicRope, LongRope, RopeConfig, read_rope


class Ropes(NamedTuple):
    """rope: of all layers, or of those without a window. window: of those with one, if it is another. partial: which
    part of a head is rotated, its first dimensions.
    """

    rope: RopeConfig
    window: RopeConfig | None
    partial: float


def read_ropes(fields: Fields, family: FamilyConfig, head_dim: int, max_length: int) -> Ropes:
    """From `rope_theta` and `rope_scaling` (classic) or `rope_parameters` (transformers 5)."""
    if family.window_theta is not None:
        return _read_by_layer_type(fields, family, family.window_theta, max_length)
    theta = fields.number("rope_theta", family.rope_theta)
    original = fields.take("original_max_position_embeddings", None)
    key = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    scaling, parameters = fields.take("rope_scaling", None), fields.take("rope_parameters", None)
    if scaling and parameters:
        raise fields.wrong("rope_parameters", parameters, "null beside rope_scaling")
    values = scaling or parameters or family.rope or {}
    if not isinstance(values, dict):
        raise fields.wrong(key, values, "an object or null")
    values = _same_for_all_layers(fields, key, values)
    kind = values.get("rope_type", values.get("type", "default"))
    if family.rope_types is not None and kind not in family.rope_types:
        raise fields.wrong(key, values, f"rope_type {' or '.join(map(repr, family.rope_types))}")
    if family.original_length is not None:
        original = family.original_length if original is None else original
        original = None if kind == "default" else original  # this family names it in any case
    if original is not None:
        values = values | {"original_max_position_embeddings": original}
    parts = Fields(values, f"{fields.where}, {key}")
    partial = _read_partial(fields, parts, family, head_dim)
    dims = int(head_dim * partial)
    rope = read_rope(parts, theta, max_length)
    if isinstance(rope, DynamicRope) and dims == 2:
        raise fields.wrong("head_dim", head_dim, "at least 4 with rope_type 'dynamic'")
    if isinstance(rope, LongRope) and {len(rope.short_factor), len(rope.long_factor)} != {dims // 2}:
        lengths = [len(rope.short_factor), len(rope.long_factor)]
        raise fields.wrong(key, lengths, f"short_factor and long_factor with {dims // 2} numbers each")
    return Ropes(rope, None, partial)


def write_ropes(rope: RopeConfig, window_rope: RopeConfig | None) -> dict[str, Any]:
    """What `read_ropes` reads."""
    if window_rope is not None:
        kinds = {FULL: rope, SLIDING: window_rope}
        return {"rope_parameters": {kind: {"rope_theta": one.theta, **one.to_dict()} for kind, one in kinds.items()}}
    scaling = rope.to_dict()
    return {"rope_theta": rope.theta, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


def _read_by_layer_type(fields: Fields, family: FamilyConfig, window_theta: float, max_length: int) -> Ropes:
    """Of families whose window layers have angles of their own: `rope_scaling` is for the other layers alone."""
    is_nested = fields.has("rope_parameters")
    theta = fields.number("rope_theta", family.rope_theta)
    if family.window_theta_key is not None:
        window_theta = fields.number(family.window_theta_key, window_theta)
    elif theta != family.rope_theta and not is_nested:
        reason = f"{family.rope_theta}: versions of transformers differ in what it means for layers with a window"
        raise fields.wrong("rope_theta", theta, f"{reason}; give rope_parameters for each layer type")
    scaling, nested = fields.take("rope_scaling", None), fields.take("rope_parameters", None) or {}
    if scaling and nested:
        raise fields.wrong("rope_parameters", nested, "null beside rope_scaling")
    if not isinstance(nested, dict) or not nested.keys() <= {FULL, SLIDING}:
        raise fields.wrong("rope_parameters", nested, f"an object with {FULL!r} and {SLIDING!r}")
    found = []
    for kind, base, values in (
        (FULL, theta, scaling or nested.get(FULL)),
        (SLIDING, window_theta, nested.get(SLIDING)),
    ):
        key = "rope_scaling" if scaling and kind == FULL else f"rope_parameters, {kind}"
        if values is not None and not isinstance(values, dict):
            raise fields.wrong(key, values, "an object or null")
        parts = Fields(values or {}, f"{fields.where}, {key}")
        parts.only("partial_rotary_factor", 1.0, "all dimensions of a head are rotated")
        found.append(read_rope(parts, base, max_length))
    if any(isinstance(rope, DynamicRope) for rope in found):
        raise fields.wrong("rope_parameters", nested or scaling, "another rope_type than 'dynamic' in this family")
    fields.only("partial_rotary_factor", 1.0, "all dimensions of a head are rotated")
    full, sliding = found
    return Ropes(full, sliding, 1.0)


def _read_partial(fields: Fields, parts: Fields, family: FamilyConfig, head_dim: int) -> float:
    """From `partial_rotary_factor`, in the rope's own object or beside it."""
    key, reason = "partial_rotary_factor", "all dimensions of a head are rotated"
    if family.partial_rotary is None:
        fields.only(key, 1.0, reason)
        parts.only(key, 1.0, reason)
        return 1.0
    if family.partial_rotary != 1.0 and (fields.is_null(key) or parts.is_null(key)):
        raise fields.wrong(key, None, f"a number; absent, it is {family.partial_rotary}")
    factor = parts.number(key, fields.number(key, family.partial_rotary))
    dims = int(head_dim * factor)
    if not 2 <= dims <= head_dim or dims % 2:
        raise fields.wrong(key, factor, f"a part of head_dim = {head_dim} that is an even number")
    return factor


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
