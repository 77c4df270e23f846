"""How a checkpoint's authors want it sampled and ended: generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.files.fields import Fields
from strata.files.json_object import read_object
from strata.models.generation_fields import (
    HONOURED,
    IN_CONFIG,
    LENGTHS,
    REFUSED,
    REFUSED_IN_SAMPLING,
    WITHOUT_EFFECT,
)


@dataclass(frozen=True)
class GenerationDefaults:
    """The sampling defaults of a model.

    sampling: what the file says, as arguments of `SamplingParams`.
    eos_ids: when not None they replace those of config.json, as in transformers.
    bad_words: id sequences that no output completes (bad_words_ids, suppress_tokens).
    where: the file. unused: a line for each field that might matter and is not used.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    eos_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    where: str = "generation_config.json"
    unused: tuple[str, ...] = ()


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """The defaults in a model folder: those of generation_config.json or, where that is absent, those in config.json,
    as in transformers.

    `do_sample: false` means greedy: temperature 0, and the other ways of sampling are without effect. Raises ValueError
    for a value that is wrong, and for a field that would change the output and has no counterpart here. What may matter
    otherwise is named in `unused`.
    """
    path = Path(folder) / "generation_config.json"
    if path.exists():
        values = read_object(path)
    else:
        path = Path(folder) / "config.json"
        values = {name: value for name, value in read_object(path).items() if name in IN_CONFIG}
    fields = Fields(values, str(path))
    sampled = fields.choice("do_sample", (True, False, None), None) is not False
    sampling = {
        "temperature": fields.optional(fields.number, "temperature", positive=False),
        "top_p": _share(fields, "top_p", positive=True),
        "top_k": fields.optional(fields.count, "top_k", least=-1),
        "min_p": _share(fields, "min_p"),
    }
    given = (sampling if sampled else {"temperature": 0.0}) | {
        "repetition_penalty": fields.optional(fields.number, "repetition_penalty"),
        "presence_penalty": _signed(fields, "presence_penalty"),
        "frequency_penalty": _signed(fields, "frequency_penalty"),
        "max_tokens": fields.optional(fields.count, "max_new_tokens"),
        "min_tokens": fields.optional(fields.count, "min_new_tokens", least=0),
        "stop": _read_stops(fields),
    }
    defaults = GenerationDefaults(
        sampling={name: value for name, value in given.items() if value is not None},
        eos_ids=fields.optional(fields.ids, "eos_token_id"),
        bad_words=(*_read_bad_words(fields), *((id,) for id in _ids(fields, "suppress_tokens"))),
        where=str(path),
        unused=tuple(_unused(values, str(path))),
    )
    _refuse(fields, REFUSED | (REFUSED_IN_SAMPLING if sampled else {}))
    return defaults


def _share(fields: Fields, key: str, *, positive: bool = False) -> float | None:
    value: float | None = fields.optional(fields.number, key, positive=positive)
    if value is not None and value > 1:
        raise fields.wrong(key, value, f"a number in {'(' if positive else '['}0, 1]")
    return value


def _signed(fields: Fields, key: str) -> float | None:
    value = fields.take(key, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not -2 <= value <= 2):
        raise fields.wrong(key, value, "a number from -2 to 2")
    return value


def _read_stops(fields: Fields) -> tuple[str, ...] | None:
    value = fields.take("stop_strings", None)
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.wrong("stop_strings", value, "a string or a list of strings, none of them empty")
    return tuple(stops)


def _read_bad_words(fields: Fields) -> list[tuple[int, ...]]:
    value = fields.take("bad_words_ids", None)
    words = [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, list) and word and _are_ids(word) for word in words):
        raise fields.wrong("bad_words_ids", value, "a list of lists of token ids, none of them empty")
    return [tuple(word) for word in words]


def _ids(fields: Fields, key: str) -> list[int]:
    value = fields.take(key, None)
    ids = [] if value is None else value
    if not isinstance(ids, list) or not _are_ids(ids):
        raise fields.wrong(key, value, "a list of token ids")
    return ids


def _are_ids(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _refuse(fields: Fields, names: dict[str, tuple[Any, ...]]) -> None:
    for name, neutral in names.items():
        value = fields.take(name, None)
        if value is not None and value not in neutral:
            accepted = " or ".join(["null", *(repr(one).lower() for one in neutral)])
            reason = "there is nothing here that would do the same; remove the field to run without it"
            raise fields.wrong(name, value, f"{accepted}: {reason}")


def _unused(values: dict[str, Any], where: str) -> list[str]:
    known = HONOURED | REFUSED.keys() | REFUSED_IN_SAMPLING.keys() | WITHOUT_EFFECT
    return [
        f"{where}: {name} is not used: the length of a sequence is max_model_len, that of an output max_tokens"
        if name in LENGTHS
        else f"{where}: {name} is unknown and not used"
        for name, value in values.items()
        if name not in known and value is not None
    ]
