"""`strata eval`: how good a model's predictions are, alone and against a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from strata.cli import options
from strata.models.folder import model_folder


def evaluate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, org/model of the Hugging Face cache, or builtin.")],
    against: Annotated[
        str | None, typer.Option(help="The model it is compared with, of the same vocabulary; named likewise.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with text or messages (.jsonl), or plain text; what MODEL generates if left out."
        ),
    ] = None,
    passages: Annotated[int, typer.Option(min=1, help="Most passages of the text, or how many are generated.")] = 64,
    passage_tokens: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a passage; 2048 if left out, or what the models take.")
    ] = None,
    task_examples: Annotated[
        int, typer.Option(min=0, help="Questions of each task of the built-in model; 0 asks none.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    seed: Annotated[int, typer.Option(help="Of what is generated.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    deterministic: options.Deterministic = False,
) -> None:
    """Evaluate a model by the engine that serves it: perplexity, tasks, and how far it is from another model.

    Against a model it tells the mean and the 99th percentile of KL(other || MODEL) over the whole vocabulary, how often
    both find the same token likeliest, and both perplexities, each with its interval of 95 %.

    Example: strata eval path/to/model-fp8 --against path/to/model --text sample.jsonl
    """
    from strata.bench.accuracy.evaluation import Asked, evaluate
    from strata.cli.evaluation.table import show

    folder, other = model_folder(model), None if against is None else model_folder(against)
    engine = {
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_memory_utilization,
        "deterministic": deterministic,
    }
    asked = Asked(
        folder, other, text, passages, passage_tokens, task_examples, engine, engine, seed, verbose=not as_json
    )
    found = evaluate(asked)
    if as_json:
        named = {"model": model, "against": against, "text": None if text is None else str(text)}
        print(json.dumps(named | found.to_dict()))
    else:
        show(found, model, against, "what it generated" if text is None else str(text))
