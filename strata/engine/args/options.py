"""Options as somebody gives them to `LLM`: by its own names or by vLLM's, and of the types that were declared."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Concatenate, NamedTuple, ParamSpec, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

P = ParamSpec("P")


class Foreign(NamedTuple):
    """An option of vLLM's that `LLM` takes where it asks for nothing.

    taken: the values that ask for what is done anyway; None: whatever it is, no output depends on it. otherwise: what
    there is for somebody who gave another.
    """

    taken: tuple[Any, ...] | None
    otherwise: str = ""


_CACHED = "a download is the one in the Hugging Face cache: fetch another there, and give its folder as the model"
_IN_FOLDER = "what is in the model's folder is used: put another there"
_NO_ADAPTERS = "adapters are merged before a model is served"
_ONE_SAMPLER = "SamplingParams says all of how tokens are chosen"

_OF_NO_EFFECT = (
    "async_scheduling", "disable_cascade_attn", "disable_log_stats", "enforce_eager", "guided_decoding_backend",
    "limit_mm_per_prompt", "max_seq_len_to_capture", "served_model_name", "swap_space",
)  # fmt: skip

VLLM_OPTIONS: Mapping[str, Foreign] = {
    **dict.fromkeys(_OF_NO_EFFECT, Foreign(None)),
    "trust_remote_code": Foreign((False,), "code that comes with a model is never run"),
    "attention_backend": Foreign((None,), "kernels are chosen by their costs"),
    "block_size": Foreign((None,), "use page_size"),
    "code_revision": Foreign((None,), _CACHED),
    "compilation_config": Foreign((None,), "use passes or executor"),
    "convert": Foreign(("auto", "none"), "LLM.embed gives the vectors of any model"),
    "cpu_offload_gb": Foreign((0,), "weights stay on the device: use quantization, or more ranks"),
    "data_parallel_size": Foreign((1,), "make as many LLMs"),
    "disable_custom_all_reduce": Foreign((False,), "ranks add up by whichever way takes the least time"),
    "disable_sliding_window": Foreign((False,), "windows are part of what a model was trained with"),
    "distributed_executor_backend": Foreign((None, "mp"), "ranks are processes of one host"),
    "download_dir": Foreign((None,), _CACHED),
    "enable_chunked_prefill": Foreign((None, True), "long prompts are always read in chunks"),
    "enable_lora": Foreign((False,), _NO_ADAPTERS),
    "enable_prompt_embeds": Foreign((False,), "prompts are texts or token ids"),
    "enable_sleep_mode": Foreign((False,), "memory is given back when the process ends"),
    "generation_config": Foreign(("auto",), _IN_FOLDER),
    "hf_overrides": Foreign((None, {}), "change config.json in the model's folder"),
    "hf_token": Foreign((None,), _CACHED),
    "kv_cache_memory_bytes": Foreign((None,), "use num_pages or gpu_memory_utilization"),
    "kv_transfer_config": Foreign((None,), "keys and values stay with their engine"),
    "logits_processors": Foreign((None,), _ONE_SAMPLER),
    "max_logprobs": Foreign((20,), "20 is the most of every request"),
    "max_loras": Foreign((None,), _NO_ADAPTERS),
    "mm_processor_kwargs": Foreign((None, {}), "only text is read"),
    "model_impl": Foreign(("auto",), "all models run on Strata's own code"),
    "num_gpu_blocks_override": Foreign((None,), "use num_pages"),
    "override_generation_config": Foreign((None, {}), _ONE_SAMPLER),
    "quantization_param_path": Foreign((None,), "use kv_cache_dtype, which needs no file"),
    "revision": Foreign((None,), _CACHED),
    "rope_scaling": Foreign((None, {}), "change config.json in the model's folder"),
    "rope_theta": Foreign((None,), "change config.json in the model's folder"),
    "runner": Foreign(("auto", "generate"), "LLM.embed gives the vectors of any model"),
    "scheduling_policy": Foreign(("fcfs", "priority"), "requests run by priority, those that are alike as they came"),
    "speculative_config": Foreign((None,), "tokens are not guessed ahead"),
    "structured_outputs_config": Foreign((None, {}), "SamplingParams.structured_outputs says what an output has to be"),
    "task": Foreign(("auto", "generate"), "LLM.embed gives the vectors of any model"),
    "tokenizer": Foreign((None,), _IN_FOLDER),
    "tokenizer_mode": Foreign(("auto",), _IN_FOLDER),
    "tokenizer_revision": Foreign((None,), _CACHED),
}

# Values as vLLM's users call them, by option, and what they are called here.
_ALSO_CALLED: Mapping[str, Mapping[Any, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto"},
}


def known_options(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Those that are `known`, without those of vLLM's that ask for nothing; numbers of numpy as Python's, dtypes and
    devices of torch by their names.

    Raises ValueError for one that is neither, with the name that was probably meant, and for one of vLLM's that asks
    for what Strata does not do.
    """
    for name, value in given.items():
        if name in known:
            continue
        foreign = VLLM_OPTIONS.get(name)
        if foreign is None:
            close = get_close_matches(name, {"model", *known, *VLLM_OPTIONS}, n=1)
            meant = f"did you mean {close[0]}?" if close else f"LLM takes model, {', '.join(sorted(known))}"
            raise ValueError(f"unknown option {name!r}; {meant}")
        if foreign.taken is not None and not any(value is one or value == one for one in foreign.taken):
            raise ValueError(f"{name}={value!r} is not taken: {foreign.otherwise}")
    return {name: _plain(name, value) for name, value in given.items() if name in known}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, torch.dtype | torch.device):
        value = str(value).removeprefix("torch.")
    return _ALSO_CALLED.get(name, {}).get(value, value) if isinstance(value, str) else value


_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", types.NoneType: "None"}


def check_types(options: object) -> None:
    """Raises ValueError for a field of a dataclass whose value is not of its declared type, in words: of plain types
    and unions of them. An integer is a number, True and False are neither."""
    hints = get_type_hints(type(options))
    for field in fields(options):  # type: ignore[arg-type]  # of a dataclass, which has no type of its own
        hint, value = hints[field.name], getattr(options, field.name)
        accepted = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
        if not any(_is_of(value, one) for one in accepted):
            words = " or ".join(_NAMES[one] for one in accepted)
            raise ValueError(f"{field.name} must be {words}, got {value!r}")


def _is_of(value: object, accepted: type) -> bool:
    if isinstance(value, bool):
        return accepted is bool
    return isinstance(value, int | float if accepted is float else accepted)


def declared_by(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Declares what an `__init__` that takes any keyword is to be given: for whatever completes or checks a call, from
    the text or by `inspect.signature`, it has the parameters of the dataclass `arguments`."""

    def declare(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = next(iter(inspect.signature(init).parameters.values()))
        parameters = [own, *inspect.signature(arguments).parameters.values()]
        init.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may have one
        return init

    return declare
