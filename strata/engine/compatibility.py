"""Which options of an engine do not go together, and why: whoever adds a feature adds its rows here. And whether ranks
can divide a model, and keep what its layers do of tokens, in the way that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from strata.graph.ranks.quantize_messages import check_width
from strata.kernels.attention.decode_cuda import MAX_GROUP
from strata.models.config import ModelConfig
from strata.models.families import FAMILIES
from strata.models.state import RecurrentState

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig

_DTYPES = ("auto", "fp8", "fp8_e4m3")  # of messages
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


def without_effect(asked: EngineConfig) -> str | None:
    """What to tell whoever asks for experts on different ranks and has one rank, which vLLM takes too; None else."""
    if asked.enable_expert_parallel and asked.tensor_parallel_size == 1:
        return "enable_expert_parallel=True has no effect with tensor_parallel_size=1: one rank has all experts"
    return None


def check_experts(asked: EngineConfig) -> None:
    """Raises ValueError for options of experts, and of attention by requests, without those that they need."""
    redundant = asked.num_redundant_experts
    if redundant and not asked.enable_eplb:
        raise ValueError(f"num_redundant_experts={redundant} is room for copies, which enable_eplb=True makes")
    if asked.enable_eplb and not (asked.enable_expert_parallel and asked.tensor_parallel_size > 1):
        raise ValueError(
            "enable_eplb=True moves experts between ranks: it needs enable_expert_parallel=True and a "
            "tensor_parallel_size over 1"
        )
    if asked.enable_dp_attention and not (asked.enable_expert_parallel and asked.tensor_parallel_size > 1):
        raise ValueError(
            "enable_dp_attention=True lets ranks with sequences of their own share the experts of a mixture: it "
            "needs enable_expert_parallel=True and a tensor_parallel_size over 1; for engines that share nothing "
            "give data_parallel_size"
        )


def check_states(asked: EngineConfig, config: ModelConfig) -> None:
    """Raises ValueError if ranks cannot have what layers keep, or what they add up, in the way that is asked for, or
    pages cannot have it in the bits that are."""
    fixed = [isinstance(state, RecurrentState) for state in FAMILIES[config.architecture].states(config)]
    pages = None if asked.kv_cache_dtype == "auto" else "kv_cache_dtype"
    keys = None if asked.decode_context_parallel_size == 1 else "decode_context_parallel_size"
    for option, has_it, why in (
        (_apart(asked), any(fixed), "of which layers keep a state of fixed size"),
        (pages, all(fixed), "which keeps no keys or values"),
        (pages, config.latent is not None, "whose pages keep latents"),
        (keys, any(window is not None for window in config.windows), "which has layers with windows"),
        (keys, config.has_sinks, "which has attention sinks"),
        (keys, config.recurrence is not None, "which has recurrent layers"),
    ):
        if option is not None and has_it:
            given = f"{option}={getattr(asked, option)!r}"
            raise ValueError(f"{given} is not there for {config.architecture}, {why}: leave it out")
    if asked.quantized_messages:
        check_width(config.hidden_size, asked.tensor_parallel_size)
    if config.hidden_size % asked.all_reduce_group_size:
        raise ValueError(
            f"all_reduce_group_size={asked.all_reduce_group_size} does not divide hidden_size = {config.hidden_size}; "
            "leave it out"
        )


def keeps_all(asked: EngineConfig) -> bool:
    """Whether all layers keep all tokens, windows or not: ranks have stages, parts of prompts or sequences of their
    own."""
    return _apart(asked) is not None


def _apart(asked: EngineConfig) -> str | None:
    """The option by which ranks have stages, parts of prompts or sequences of their own."""
    given = {
        "pipeline_parallel_size": asked.pipeline_parallel_size > 1,
        "prefill_context_parallel_size": asked.prefill_context_parallel_size > 1,
        "enable_dp_attention": asked.enable_dp_attention,
    }
    return next((name for name, is_given in given.items() if is_given), None)


def check_dcp(asked: EngineConfig) -> None:
    """Raises ValueError if the ranks are not as many times as those that divide keys and values by sequence."""
    ranks, parts = asked.tensor_parallel_size, asked.decode_context_parallel_size
    if ranks % parts:
        raise ValueError(
            f"decode_context_parallel_size={parts} divides keys among the ranks of tensor_parallel_size={ranks}, of "
            f"which it must be a divisor: it needs {parts} ranks for each KV head of the model, or {parts} in all "
            "where attention is latent"
        )


def check_gathered_heads(asked: EngineConfig, config: ModelConfig, kind: str) -> None:
    """Raises ValueError if a KV head gets more queries from all ranks than kernels take. config: of a rank; kind: of
    implementations, "cuda" or "cpu", which takes any. Latents take any, too."""
    ranks, own = asked.decode_context_parallel_size, config.num_heads // config.num_kv_heads
    if ranks == 1 or kind != "cuda" or config.latent is not None or ranks * own <= MAX_GROUP:
        return
    accepted = ", ".join(str(one) for one in range(1, ranks) if ranks % one == 0 and one * own <= MAX_GROUP)
    raise ValueError(
        f"decode_context_parallel_size={ranks} gathers {ranks * own} query heads for a KV head, and kernels on GPUs "
        f"take at most {MAX_GROUP}; accepted are {accepted}"
    )


def check_messages(asked: EngineConfig) -> None:
    """Raises ValueError for an unknown `message_dtype`, and where there is nothing that could be rounded, or travel."""
    if asked.overlap_tokens and asked.tensor_parallel_size == 1:
        raise ValueError(
            f"overlap_tokens={asked.overlap_tokens} lets what ranks add up travel beside products, and "
            "tensor_parallel_size=1 adds up nothing; leave it out"
        )
    if asked.message_dtype not in _DTYPES:
        raise ValueError(f"message_dtype {asked.message_dtype!r} is unknown; use {', '.join(_DTYPES)}")
    group, ranks = asked.all_reduce_group_size, asked.tensor_parallel_size
    if group < 1 or (group > 1 and (group >= ranks or ranks % group)):
        accepted = ", ".join(str(size) for size in range(1, ranks) if ranks % size == 0) or "1"
        raise ValueError(
            f"all_reduce_group_size={group} makes no groups of tensor_parallel_size={ranks} ranks; accepted are "
            f"divisors below: {accepted}"
        )
    if not asked.quantized_messages:
        return
    given = f"message_dtype={asked.message_dtype!r}"
    if asked.tensor_parallel_size == 1:
        raise ValueError(f"{given} rounds what ranks add up, and tensor_parallel_size=1 adds up nothing; leave it out")
