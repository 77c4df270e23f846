"""`strata chat`: a conversation in the terminal."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from strata.cli import options
from strata.cli.generate import passed_options, sampling_params
from strata.cli.groups import Values, grouped
from strata.engine.sampling_params import SamplingParams
from strata.models.folder import model_folder

if TYPE_CHECKING:
    from strata.engine.llm import LLM

HELP = """\
/help    these lines
/clear   begin a new conversation (also /new)
/exit    end (also /quit, Ctrl-D)
A line that ends with \\ goes on in the next one; \"\"\" begins a message of several lines, \"\"\" ends it.
Ctrl-C cuts a reply short."""

_COMMANDS = {"/help": "help", "/clear": "clear", "/new": "clear", "/exit": "exit", "/quit": "exit"}
_COMMAND = re.compile(r"/[a-z]+", re.IGNORECASE)
_QUOTES = '"""'
_FIRST, _NEXT = "you> ", "...  "


@grouped
def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    *,
    sampling: options.Sampling,
    engine: Annotated[
        Values,
        options.engine(
            "quantization sparsity dtype device tensor_parallel_size message_dtype pipeline_parallel_size "
            "prefill_context_parallel_size decode_context_parallel_size max_model_len deterministic kv_cache_dtype"
        ),
    ],
) -> None:
    """Talk with a model; it keeps the conversation. /help tells what can be typed, /exit or Ctrl-D ends it.

    Example: strata chat --temperature 0.7
    """
    from strata.engine.llm import LLM

    asked = passed_options(sampling)
    folder = model_folder(model)
    console, waiting = Console(highlight=False), Console(stderr=True)
    with waiting.status("starting the model"):
        llm = LLM(folder, verbose=False, **engine)
    params = sampling_params(llm, asked)
    llm.chat_prompt(
        [{"role": "user", "content": "?"}]
    )  # a model without a chat template is refused before the first word
    with suppress(ImportError):  # where the system has it: arrow keys in `input`, and what was typed before
        import readline  # noqa: F401
    if console.is_terminal:
        console.print("/help tells what can be typed, /exit ends.", style="dim")
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    while (text := _ask(console)) is not None:
        command = _COMMANDS.get(text.lower())
        if command == "exit":
            return
        if command == "clear":
            messages = list(beginning)
        elif command == "help":
            console.print(HELP, markup=False)
        elif _COMMAND.fullmatch(text):
            console.print(f"there is no {text}; /help tells what there is", markup=False)
        elif text:
            _converse(llm, messages, text, params, console)


def _ask(console: Console) -> str | None:
    """What is typed next, of one line or several; None at the end of the input."""
    try:
        text = input(_FIRST).strip()
        if text.startswith(_QUOTES):
            text = text.removeprefix(_QUOTES)
            while not text.rstrip().endswith(_QUOTES):
                text += "\n" + input(_NEXT)
            text = text.rstrip().removesuffix(_QUOTES)
        else:
            while text.endswith("\\"):
                text = text[:-1] + "\n" + input(_NEXT)
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return text.strip()


def _converse(llm: LLM, messages: list[dict[str, str]], text: str, params: SamplingParams, console: Console) -> None:
    """Answer `text`, and add both to the conversation; what could not be answered is told, and forgotten."""
    asked = {"role": "user", "content": text}
    try:
        reply = _answer(llm, [*messages, asked], params, console)
    except ValueError as error:  # it has outgrown the model, or the reply failed
        console.print(f"{error} (/clear begins a new conversation)", style="red", markup=False)
    else:
        messages += [asked, {"role": "assistant", "content": reply}]


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
