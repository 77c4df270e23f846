"""Which options of an engine do not go together, and why: whoever adds a feature adds its rows here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig

_APART = "{0} and {1} are not there together"
_ALL_LAYERS = "{0} needs all layers on every rank, and {1} divides them"
_CUTS = "{0} depends on where prompts are cut, and {1} asks for bits that do not"


class Refusal(NamedTuple):
    """Two options of which both ask for something. reason: {0} and {1} stand for them and their values."""

    option: str
    other: str
    reason: str = _APART


REFUSED = (
    Refusal("enable_eplb", "pipeline_parallel_size", _ALL_LAYERS),
    Refusal("enable_dp_attention", "pipeline_parallel_size", _ALL_LAYERS),
    Refusal("prefill_context_parallel_size", "pipeline_parallel_size", _ALL_LAYERS),
    Refusal(
        "prefill_context_parallel_size",
        "enable_dp_attention",
        "{0} divides the tokens of a step that all ranks have, and with {1} each has tokens of its own",
    ),
    Refusal(
        "enable_eplb",
        "deterministic",
        "{0} changes which ranks add up a token's experts, so its bits depend on what else runs, and {1} asks for bits "
        "that do not",
    ),
    Refusal("quantization", "sparsity", "{0} and {1} pack the same weights"),
    Refusal("sparse_prefill", "decode_pages"),
    Refusal("sparse_prefill", "deterministic", _CUTS),
    Refusal("decode_pages", "deterministic", _CUTS),
    *(
        Refusal(option, other)
        for option in ("sparse_prefill", "decode_pages")
        for other in ("kv_cache_dtype", "prefill_context_parallel_size", "enable_dp_attention")
    ),
    Refusal("kv_cache_dtype", "prefill_context_parallel_size"),
    *(
        Refusal("message_dtype", other)
        for other in ("deterministic", "enable_dp_attention", "prefill_context_parallel_size", "overlap_tokens")
    ),
    *(
        Refusal("all_reduce_group_size", other)
        for other in (
            "deterministic", "enable_dp_attention", "prefill_context_parallel_size", "decode_context_parallel_size",
            "overlap_tokens",
        )
    ),
    *(
        Refusal("decode_context_parallel_size", other)
        for other in (
            "deterministic", "enable_dp_attention", "pipeline_parallel_size", "prefill_context_parallel_size",
            "kv_cache_dtype", "sparse_prefill", "decode_pages", "message_dtype", "overlap_tokens",
        )
    ),
    *(
        Refusal("executor", other)
        for other in (
            "deterministic", "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
            "passes", "sparse_prefill", "decode_pages",
        )
    ),
)  # fmt: skip


def check_compatible(asked: EngineConfig) -> None:
    """Raises ValueError for the first two options that do not go together."""
    for option, other, reason in REFUSED:
        if _asks(asked, option) and _asks(asked, other):
            shown = (f"{name}={getattr(asked, name)!r}" for name in (option, other))
            raise ValueError(reason.format(*shown) + ": leave out one of them")


def _asks(asked: EngineConfig, option: str) -> bool:
    """Whether an option asks for something: it has another value than by default."""
    value: Any = getattr(asked, option)
    if option == "overlap_tokens":
        return bool(value)  # None leaves it to a cost model, and 0 to nobody
    default: Any = getattr(type(asked), option)
    return bool(value != default)
