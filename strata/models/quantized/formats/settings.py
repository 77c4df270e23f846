"""What the quantization_config of a config.json may hold, beside single values."""

from __future__ import annotations

from typing import Any

from strata.files.fields import Fields
from strata.models.quantized.formats.stored import StoredTensors


def take_names(fields: Fields, *keys: str) -> tuple[str, ...]:
    """The strings of the lists at these keys, of which any may be absent or null."""
    found: list[str] = []
    for key in keys:
        value = fields.take(key, None)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise fields.wrong(key, value, "a list of strings or null")
        found += value
    return tuple(found)


def take_object(fields: Fields, key: str) -> dict[str, Any]:
    """The object at a key; absent or null, an empty one."""
    value = fields.take(key, None)
    if value is not None and not isinstance(value, dict):
        raise fields.wrong(key, value, "an object or null")
    return value or {}


def take_cache(fields: Fields, stored: StoredTensors, *keys: str) -> None:
    """What a config says of a cache of keys and values at any of these keys; then its scales are passed over.

    `kv_cache_dtype` alone says of how many bits pages are, and pages of fewer bits have scales of their own.
    """
    told = [fields.take(key, None) for key in keys]
    if any(one is not None for one in told):
        for last in ("k_scale", "v_scale"):
            for owner in stored.owners(last):
                stored.pass_over(f"{owner}.{last}")


def take_group(fields: Fields, *keys: str) -> int:
    """The columns that share a scale, of the first key that is there; 0 for all, which files write as -1."""
    key = next((key for key in keys if fields.has(key)), keys[0])
    value = fields.take(key)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value > 0):
        raise fields.wrong(key, value, "a positive integer, or -1 for one scale a row")
    return max(value, 0)
