"""`strata chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from strata.cli import options
from strata.cli.generate import sampling_params
from strata.engine.llm import LLM
from strata.engine.sampling_params import SamplingParams
from strata.models.folder import model_folder


def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.", show_default=False)] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    deterministic: options.Deterministic = False,
) -> None:
    """Talk with a model; it keeps the conversation. An empty line or Ctrl-D ends it, /new starts afresh.

    Example: strata chat --temperature 0.7
    """
    folder = model_folder(model)
    llm = LLM(folder, dtype=dtype, device=device, max_model_len=max_model_len, deterministic=deterministic)
    params = sampling_params(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    llm.chat_prompt(
        [{"role": "user", "content": "?"}]
    )  # a model without a chat template is refused before the first word
    console = Console(highlight=False)
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    while (text := _ask(console)) is not None:
        if text == "/new":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": text})
        try:
            messages.append({"role": "assistant", "content": _answer(llm, messages, params, console)})
        except ValueError as error:  # it has outgrown the model, or the reply failed: say so and keep it usable
            messages.pop()
            console.print(f"[red]{error}[/red]  (/new starts afresh)")


def _ask(console: Console) -> str | None:
    try:
        text = console.input("[bold]you>[/bold] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return text or None


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, console: Console) -> str:
    """Print the reply while it comes; Ctrl-C cuts it short. Raises ValueError if the model cannot go on."""
    shown = ""
    try:
        for output in llm.stream(llm.chat_prompt(messages), params):
            text = output.outputs[0].text
            console.print(text[len(shown) :], end="", markup=False)
            shown = text
            if output.error is not None:
                raise ValueError(output.error)
    except KeyboardInterrupt:
        pass
    console.print()
    return shown
