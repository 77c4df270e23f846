"""How a checkpoint's authors want it sampled and ended: generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strata.models.fields import Fields
from strata.models.json_object import read_object


@dataclass(frozen=True)
class GenerationDefaults:
    """The sampling defaults of a model; None where generation_config.json says nothing.

    eos_ids: when not None they replace those of config.json, as in transformers.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_ids: tuple[int, ...] | None = None

    @property
    def sampling(self) -> dict[str, float | int]:
        """What the file says, as arguments of `SamplingParams`."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "max_tokens": self.max_new_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """The defaults in a model folder, all None if it has no generation_config.json.

    `do_sample: false` means greedy: temperature 0, and the other ways of sampling are without effect. Fields without a
    counterpart here (beam search, padding ids, versions) are left alone. Raises ValueError for a value that is wrong.
    """
    path = Path(folder) / "generation_config.json"
    fields = Fields(read_object(path), str(path))
    sampled = fields.flag("do_sample", True)
    temperature = fields.number("temperature", positive=False) if fields.has("temperature") else None
    top_p = fields.number("top_p") if fields.has("top_p") else None
    if top_p is not None and top_p > 1:
        raise fields.wrong("top_p", top_p, "a number in (0, 1]")
    min_p = fields.number("min_p", positive=False) if fields.has("min_p") else None
    if min_p is not None and min_p > 1:
        raise fields.wrong("min_p", min_p, "a number in [0, 1]")
    top_k = fields.count("top_k", least=-1) if fields.has("top_k") else None
    return GenerationDefaults(
        temperature=temperature if sampled else 0.0,
        top_p=top_p if sampled else None,
        top_k=top_k if sampled else None,
        min_p=min_p if sampled else None,
        repetition_penalty=fields.number("repetition_penalty") if fields.has("repetition_penalty") else None,
        max_new_tokens=fields.count("max_new_tokens") if fields.has("max_new_tokens") else None,
        eos_ids=_read_eos(fields),
    )


def _read_eos(fields: Fields) -> tuple[int, ...] | None:
    value = fields.take("eos_token_id", None)
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(id, bool) or not isinstance(id, int) for id in ids):
        raise fields.wrong("eos_token_id", value, "a token id or a list of token ids")
    # Some checkpoints write -1 for "none".
    return tuple(id for id in ids if id >= 0)
