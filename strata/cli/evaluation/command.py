"""`strata eval`: how good a model's predictions are, alone and against a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from strata.cli import options
from strata.cli.groups import OptionGroup, Values, grouped
from strata.models.folder import model_folder

_SPARSE = ("sparse_prefill", "sparse_prefill_min_keys", "sparse_prefill_block")


class _PairOptions(options.EngineOptions):
    """Of both models."""

    against_quantization: Annotated[
        str | None, options.engine_option(help="The same of the other model; not, if left out.")
    ] = None
    against_kv_cache_dtype: Annotated[str, options.engine_option(help="The same of the other model.")] = "auto"


@grouped
def evaluate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, org/model of the Hugging Face cache, or builtin.")],
    against: Annotated[
        str | None, typer.Option(help="The model it is compared with, of the same vocabulary; named likewise.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="JSON lines with text or messages (.jsonl), or plain text; held-out exercises if left out."),
    ] = None,
    passages: Annotated[int, typer.Option(min=1, help="Most passages of the text.")] = 64,
    passage_tokens: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a passage; 2048 if left out, or what the models take.")
    ] = None,
    task_examples: Annotated[
        int | None,
        typer.Option(
            min=0, help="Questions of each task of the built-in model; 0, or 10 without a --text, if left out."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    *,
    engine: Annotated[
        Values,
        OptionGroup(
            _PairOptions,
            "quantization against_quantization kv_cache_dtype against_kv_cache_dtype sparse_prefill "
            "sparse_prefill_min_keys sparse_prefill_block dtype device max_model_len gpu_memory_utilization "
            "deterministic",
        ),
    ],
) -> None:
    """Evaluate a model by the engine that serves it: perplexity, tasks, and how far it is from another model.

    Against a model it tells the mean and the 99th percentile of KL(other || MODEL) over the whole vocabulary, how often
    both find the same token likeliest, and both perplexities, each with its interval of 95 %. Without a text that is of
    the right replies to exercises of the built-in model, whose tasks are asked as well where MODEL has its chat format.

    Example: strata eval path/to/model --quantization fp8 --against path/to/model --text sample.jsonl
    """
    from strata.bench.accuracy.evaluation import EvaluationRequest, evaluate
    from strata.cli.evaluation.table import show

    folder, other = model_folder(model), None if against is None else model_folder(against)
    precisions = ("quantization", "kv_cache_dtype")
    theirs = {name: engine.pop(f"against_{name}") for name in precisions}
    if other is None and theirs != {"quantization": None, "kv_cache_dtype": "auto"}:
        raise ValueError("options of the other model need one: give --against")
    ours, sparse = ({name: engine[name] for name in names} for names in (precisions, _SPARSE))
    others = {name: value for name, value in engine.items() if name not in sparse} | theirs
    asked = EvaluationRequest(
        folder, other, text, passages, passage_tokens, task_examples, engine, others, verbose=not as_json
    )
    found = evaluate(asked)
    if as_json:
        named = {"model": model, "against": against, "text": None if text is None else str(text)}
        named |= ours | {f"against_{name}": value for name, value in theirs.items()} | sparse
        print(json.dumps(named | found.to_dict()))
    else:
        shown = _named(model, **ours, sparse_prefill=sparse["sparse_prefill"])
        compared = None if against is None else _named(against, **theirs)
        show(found, shown, compared, "held-out exercises" if text is None else str(text))


def _named(model: str, quantization: str | None, kv_cache_dtype: str, sparse_prefill: float | None = None) -> str:
    """A model with the options that tell it from itself."""
    pages = None if kv_cache_dtype == "auto" else f"{kv_cache_dtype} KV"
    given = (quantization, pages, None if sparse_prefill is None else f"sparse prompts {sparse_prefill}")
    told = ", ".join(one for one in given if one is not None)
    return f"{model} ({told})" if told else model
