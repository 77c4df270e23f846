"""`strata generate`: answers prompts given on the command line."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli import options
from strata.cli.groups import Values, grouped
from strata.engine.sampling_params import SamplingParams
from strata.models.folder import model_folder
from strata.text.counted import counted

if TYPE_CHECKING:
    from strata.engine.llm import LLM


@grouped
def generate(
    prompts: Annotated[list[str], typer.Argument(help="What to answer; each prompt is a request of its own.")],
    model: options.Model = None,
    raw: Annotated[bool, typer.Option(help="Continue the text itself, without the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
    *,
    sampling: options.Sampling,
    engine: Annotated[
        Values,
        options.engine(
            "quantization sparsity dtype device tensor_parallel_size message_dtype pipeline_parallel_size "
            "prefill_context_parallel_size decode_context_parallel_size max_model_len load_format deterministic "
            "kv_cache_dtype decode_pages sparse_prefill sparse_prefill_min_keys"
        ),
    ],
) -> None:
    """Answer prompts, all at once, and say how fast.

    With a chat model each prompt is a user's message.

    Example: strata generate "What is 47 + 38?" "Reverse the word planet."
    """
    from strata.engine.llm import LLM

    asked = passed_options(sampling)
    llm = LLM(model_folder(model), **engine)
    params = sampling_params(llm, asked)
    chats = llm.get_tokenizer().has_chat_template and not raw
    encoded: list[Any] = [llm.chat_prompt([{"role": "user", "content": text}]) if chats else text for text in prompts]
    start = time.perf_counter()
    outputs = llm.generate(encoded, params, use_tqdm=not as_json)
    seconds = time.perf_counter() - start
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        if as_json:
            line = {"prompt": prompt, "text": completion.text, "finish_reason": completion.finish_reason}
            print(json.dumps(line | {"error": output.error}, ensure_ascii=False))
        else:
            print(f"> {prompt}\n{completion.text.strip()}\n")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    typer.echo(f"{counted(tokens, 'token')} in {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s", err=as_json)
    failed = [(prompt, output.error) for prompt, output in zip(prompts, outputs, strict=True) if output.error]
    for prompt, error in failed:
        typer.echo(f"strata: error: {prompt!r}: {error}", err=True)
    if failed:
        raise typer.Exit(1)


def passed_options(options: Values) -> dict[str, Any]:
    """The sampling options that are not None. Raises ValueError for a bad one, before a model is loaded for it."""
    values = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**values)
    return values


def sampling_params(llm: LLM, values: dict[str, Any]) -> SamplingParams:
    """The model's own defaults, changed by what was passed; without a limit, up to the model's length."""
    return llm.get_default_sampling_params().over(**({"max_tokens": None} | values))
