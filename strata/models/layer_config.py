"""What config.json says of single layers: the window of each, and whether positions rotate its queries and keys."""

from __future__ import annotations

from strata.files.fields import Fields
from strata.models.family_config import FULL, SLIDING, FamilyConfig


def read_rotated(fields: Fields, family: FamilyConfig, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it is rotated, from `no_rope_layers`, in which 1 means that it is (as in transformers);
    empty in families that rotate all.
    """
    if family.has_position_type:
        kind = fields.choice("position_embedding_type", ("rope", "nope", None), None)
        return (kind == "rope",) * num_layers
    if family.sliding != "unrotated":
        return ()
    given = fields.take("no_rope_layers", None)
    interval = fields.count("no_rope_layer_interval", 4)
    if given is None:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    known = isinstance(given, list) and len(given) >= num_layers
    if not known or any(type(one) is not int or one not in (0, 1) for one in given):
        raise fields.wrong("no_rope_layers", given, f"a list with 0 or 1 for each of the {num_layers} layers")
    return tuple(bool(one) for one in given[:num_layers])


def read_windows(
    fields: Fields, family: FamilyConfig, num_layers: int, rotated: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """The window of each layer, from `sliding_window`, `use_sliding_window`, `max_window_layers`, `layer_types`."""
    types = _read_layer_types(fields, num_layers)
    if family.sliding == "none":
        fields.only("sliding_window", None, "this family attends to the whole sequence")
        windows: tuple[int | None, ...] = (None,) * num_layers
    elif family.sliding == "all":
        windows = (_read_window(fields, family),) * num_layers
    elif family.sliding == "switched":
        used, window = fields.flag("use_sliding_window", False), _read_window(fields, family)
        windows = (window if used else None,) * num_layers
    elif family.sliding == "some":
        first = fields.count("max_window_layers", 28, least=0)
        windows = _read_switched(fields, family, types, [layer >= first for layer in range(num_layers)])
    elif family.sliding == "unrotated":
        windows = _read_switched(fields, family, types, [not one for one in rotated])
    else:
        windows = _read_interval(fields, family, types, num_layers)
    if family.sliding == "switched" or not any(windows):
        # Without windows it says nothing, and a family that is switched has them in all layers (as in transformers).
        fields.count("max_window_layers", 0, least=0)
    if types is not None and [kind == SLIDING for kind in types] != [window is not None for window in windows]:
        expected = "what sliding_window (and use_sliding_window) say of this family's layers"
        raise fields.wrong("layer_types", types, expected)
    return windows


def _read_switched(
    fields: Fields, family: FamilyConfig, types: list[str] | None, by_default: list[bool]
) -> tuple[int | None, ...]:
    """by_default: which layers have a window if there is one and `layer_types` does not tell."""
    used, window = fields.flag("use_sliding_window", False), _read_window(fields, family)
    if not used or window is None:
        return (None,) * len(by_default)
    sliding = by_default if types is None else [kind == SLIDING for kind in types]
    return tuple(window if one else None for one in sliding)


def _read_interval(
    fields: Fields, family: FamilyConfig, types: list[str] | None, num_layers: int
) -> tuple[int | None, ...]:
    interval, key = family.full_interval, family.full_interval_key
    if key is not None:
        # transformers writes its own copy of the field, too.
        interval = fields.count(key, fields.count(f"_{key}", interval))
    if types is None:
        types = [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(num_layers)]
    if fields.is_null("sliding_window") and SLIDING in types:
        raise fields.wrong("sliding_window", None, f"a number, because layers are of type {SLIDING!r}")
    window = fields.count("sliding_window", family.window)
    return tuple(window if kind == SLIDING else None for kind in types)


def _read_layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    types: list[str] | None = fields.take("layer_types", None)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.wrong("layer_types", types, f"a list with an entry for each of the {num_layers} layers")
    if any(kind not in (FULL, SLIDING) for kind in types):
        raise fields.wrong("layer_types", types, f"a list of {FULL!r} and {SLIDING!r}")
    return types


def _read_window(fields: Fields, family: FamilyConfig) -> int | None:
    # An explicit null means no window, an absent field the default of the family.
    if not fields.has("sliding_window") and (fields.is_null("sliding_window") or family.window is None):
        fields.take("sliding_window", None)
        return None
    return fields.count("sliding_window", family.window)
