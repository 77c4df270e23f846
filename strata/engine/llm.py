"""The offline Python API, with the names of vLLM: `LLM(model).generate(prompts, params)`. Prompts are text or token
ids, one or several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

from llguidance import LLMatcher
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strata.engine.args.options import declared_by
from strata.engine.args.segments import positions
from strata.engine.bad_words import bad_word_ids
from strata.engine.build import Engine, build_engine
from strata.engine.collect import Collector, Delivery
from strata.engine.embeddings.pooling import Pooling, PoolRequest, check_vector
from strata.engine.engine_config import EngineConfig
from strata.engine.grammars.grammar import GrammarCompiler
from strata.engine.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.models.folder import display_name
from strata.text.messages import Message
from strata.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Arguments(EngineConfig):
    """What `LLM` is called with: the options of an engine, a model that has yet to be found, and verbose."""

    model: str | Path | None = field(default=None, kw_only=False)  # type: ignore[assignment]
    verbose: bool | None = None


class LLM:
    """A model ready to generate. `EngineConfig` says what the keyword arguments mean; unknown ones are an error, and of
    vLLM's others those are taken that ask for nothing (trust_remote_code=False, enforce_eager).

    Without `model` it is the small model that comes with Strata; `org/model` is a download in the Hugging Face cache.
    verbose: on standard error, True tells how memory is divided and how long each part of the start took, None (the
    default) in one line that it is ready, both what is noteworthy besides; False tells nothing. Raises ValueError, in
    one clear line, for whatever it cannot load or serve.

    Calls may be nested, and streams read side by side, in one thread: each gets all its own outputs. A call that comes
    while one of another thread is under way raises RuntimeError. An error in a step, Ctrl-C too, ends all requests.
    """

    @declared_by(Arguments)
    def __init__(self, model: str | Path | None = None, *, verbose: bool | None = None, **options: Any) -> None:
        if not isinstance(verbose, bool | None):
            raise ValueError(f"verbose must be True, False or None, got {verbose!r}")
        console = Console(stderr=True, highlight=False, quiet=verbose is False)
        log = partial(console.print, markup=False, soft_wrap=True)
        asked = EngineConfig.from_options(model, options)
        self._engine: Engine = build_engine(
            asked, log, details=log if verbose else lambda _: None, show_progress=verbose is not False
        )
        if verbose is None:
            name = display_name(None if model is None else str(model), str(asked.model))
            log(f"{name} is {self._engine.ready_line()} (verbose=True tells more)")
        self._delivery = Delivery(self._engine.loop)
        self._numbers = itertools.count()

    @property
    def engine(self) -> Engine:
        """The parts: config, model, tokenizer, scheduler, start-up times, memory ledger, compilations since then."""
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError if the LLM was made without one."""
        if self._engine.tokenizer is None:
            raise ValueError("this LLM has no tokenizer (skip_tokenizer_init=True): pass prompt_token_ids")
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generate uses when no parameters are given: the model's generation_config.json."""
        return self._engine.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a string, a list of ids, or {"prompt": ...} / {"prompt_token_ids": [...]}.

        sampling_params: one for all or one for each prompt; None takes the model's defaults. use_tqdm: show progress.
        priority: one number for each prompt, lower runs first. lora_request is vLLM's and has no use here. The outputs
        stand in the order of the prompts. A prompt that cannot be served raises ValueError before anything runs; a
        request that fails later ends with the finish_reason "error" and says why in `RequestOutput.error`, and the
        others go on.
        """
        _refuse_adapter(lora_request)
        listed = listed_prompts(prompts)
        params = self._params_for(len(listed), sampling_params)
        priorities = [0] * len(listed) if priority is None else listed_integers(priority, "priority")
        if len(priorities) != len(listed):
            raise ValueError(f"priority has {len(priorities)} entries for {len(listed)} prompts; give one for each")
        encoded = [self._encoded(prompt) for prompt in listed]  # first, so that all arrive together
        collectors = [
            self._collector(*prompt, one, number)
            for prompt, one, number in zip(encoded, params, priorities, strict=True)
        ]
        matchers = self._matchers(collectors)
        try:
            self._delivery.add(collectors, matchers)
            with _progress(len(collectors), use_tqdm) as advance:
                waiting = collectors
                while waiting:
                    self._delivery.step(waiting[0])
                    rest = [collector for collector in waiting if not collector.finished]
                    advance(len(waiting) - len(rest))
                    waiting = rest
        finally:
            self._delivery.leave(collectors)
        return [collector.output() for collector in collectors]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; a message is {"role": ..., "content": ...}, as in OpenAI's API.

        The template sees messages and tools as a server's does (`strata.text.messages`), and contents as strings.
        chat_template: the text of one that is used instead of the model's. add_generation_prompt: open the assistant's
        answer. continue_final_message: leave the last message open instead, to be written on; it needs
        add_generation_prompt=False. tools: functions that the model may call, as OpenAI's API describes them; the call
        is in the text. chat_template_kwargs: variables for the template. lora_request and mm_processor_kwargs are
        vLLM's and have no use here.
        Raises ValueError if the model has no chat template, and for what the template or this engine cannot take.
        """
        _refuse_adapter(lora_request)
        if mm_processor_kwargs:
            raise ValueError("mm_processor_kwargs is not supported: only text is read")
        if chat_template_content_format not in ("auto", "string"):
            raise ValueError(
                f"chat_template_content_format must be 'auto' or 'string', got {chat_template_content_format!r}: "
                "templates are given the content of a message as one string"
            )

        def prompt(one: Sequence[Message]) -> dict[str, Any]:
            return self.chat_prompt(
                one, add_generation_prompt, continue_final_message, tools, chat_template, chat_template_kwargs
            )

        if not is_list(messages) or not messages or not is_list(messages[0]):
            return self.generate(prompt(cast(Sequence[Message], messages)), sampling_params, use_tqdm)
        prompts = []
        for number, one in enumerate(messages):
            try:
                prompts.append(prompt(cast(Sequence[Message], one)))
            except ValueError as error:
                raise ValueError(f"conversation {number}: {error}") from None
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The prompt that `chat` sends for one conversation: its text and its ids."""
        flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, got {flag!r}")
        if chat_template is not None and not (isinstance(chat_template, str) and "{" in chat_template):
            raise ValueError(f"chat_template must be the text of a Jinja template, got {chat_template!r:.80}")
        tokenizer = self.get_tokenizer()
        text = tokenizer.chat_text(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=chat_template_kwargs,
            chat_template=chat_template,
        )
        return {"prompt": text.text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The output of one prompt after every step that added to it; closing the iterator aborts the request.

        Its reader may do anything with the LLM meanwhile: what other calls let it generate is there when it goes on.
        """
        params = self._params_for(1, sampling_params)
        collector = self._collector(*self._encoded(prompt), params[0], 0)
        matchers = self._matchers([collector])
        shown = 0
        try:
            self._delivery.add([collector], matchers)
            while shown < collector.changes or not collector.finished:
                if shown == collector.changes:
                    self._delivery.step(collector)
                    continue
                shown = collector.changes
                yield collector.output()
        finally:
            self._delivery.leave([collector])

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last", use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt: the hidden state of its last token, or with "mean" the mean of all.

        Raises ValueError for a prompt that cannot be served, before anything runs, or whose hidden states are NaN.
        """
        if pooling not in ("last", "mean"):
            raise ValueError(f"pooling must be 'last' or 'mean', got {pooling!r}")
        encoded = [self._encoded(prompt) for prompt in listed_prompts(prompts)]
        pooler = self._engine.pooler
        for _, ids in encoded:
            pooler.check(ids)
        requests = [PoolRequest(ids, pooling) for _, ids in encoded]
        vectors: list[list[float]] = []
        with _progress(len(encoded), use_tqdm) as advance:
            while rest := requests[len(vectors) :]:
                with self._delivery.exclusive():
                    batch = pooler.launch(rest[: pooler.fitting(rest)]).wait()
                for vector in batch:
                    check_vector(vector)
                    vectors.append(vector.tolist())
                advance(len(batch))
        return [
            EmbeddingRequestOutput(str(next(self._numbers)), text, ids, EmbeddingOutput(vector))
            for (text, ids), vector in zip(encoded, vectors, strict=True)
        ]

    def _params_for(self, count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self._engine.default_params] * count
        if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
            raise ValueError(f"sampling_params must be SamplingParams, or a list of one for each prompt, got {given!r}")
        if len(given) != count:
            raise ValueError(f"{len(given)} sampling_params for {count} prompts: give one, or one for each prompt")
        return list(given)

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text (None if it came as ids) and ids of a prompt."""
        text, ids = text_and_ids(prompt)
        return text, ids if ids is not None else self.get_tokenizer().encode(text or "")

    def _collector(self, text: str | None, ids: list[int], params: SamplingParams, priority: int) -> Collector:
        engine = self._engine
        if params.stop_strings and engine.tokenizer is None:
            raise ValueError("stop strings are found in the text, and this LLM has no tokenizer: use stop_token_ids")
        own = bad_word_ids(params.bad_words, self.get_tokenizer()) if params.bad_words else ()
        request = Request(
            id=str(next(self._numbers)),
            prompt=positions([ids]),
            params=params,
            priority=priority,
            arrival=engine.loop.clock(),
            eos_ids=engine.eos_ids,
            bad_words=(*engine.bad_words, *own),
            grammar=params.structured_outputs.to_grammar() if params.structured_outputs is not None else None,
        )
        request.check_ids(engine.config.vocab_size)
        return Collector(request, text, engine.tokenizer, engine.loop.clock)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        engine = self._engine
        return GrammarCompiler(self.get_tokenizer(), engine.eos_ids, engine.config.vocab_size)

    def _matchers(self, collectors: list[Collector]) -> list[LLMatcher | None]:
        grammars = [collector.request.grammar for collector in collectors]
        return self._grammars.compile_all(grammars) if any(grammars) else [None] * len(collectors)


def _refuse_adapter(given: object) -> None:
    if given is not None:
        raise ValueError("lora_request is not supported: merge the adapter into the model's folder, and load that")


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error that counts finished requests; entering gives the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda count: progress.advance(task, count)


Prompt = str | Mapping[str, Any] | Sequence[int]

_ACCEPTED = 'a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}'


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One or several as a list. Raises ValueError for what is neither."""
    if not isinstance(prompts, (str, Mapping)) and not is_list(prompts):
        raise ValueError(f"prompts must be {_ACCEPTED}, or a list of such prompts, got {prompts!r}")
    is_one = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], Integral))
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def text_and_ids(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Of one prompt: one of them, or both, where it has both. Raises ValueError for what is no prompt."""
    if isinstance(prompt, str):
        return prompt, None
    if is_list(prompt):
        return None, listed_integers(prompt, "prompt_token_ids")
    # What is None asks for nothing, such as vLLM's multi_modal_data.
    given = {key: one for key, one in prompt.items() if one is not None} if isinstance(prompt, Mapping) else {}
    if not given or set(given) - {"prompt", "prompt_token_ids"}:
        raise ValueError(f"a prompt must be {_ACCEPTED}, got {prompt!r}")
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if not isinstance(text, str) and not (text is None and ids is not None):
        raise ValueError(f"the text of a prompt must be a string, got {text!r}")
    return text, None if ids is None else listed_integers(ids, "prompt_token_ids")


def listed_integers(given: object, name: str) -> list[int]:
    """Integers in a row as plain ones, as ranks tell each other of. Raises ValueError, with the name, for others."""
    if not is_list(given):
        raise ValueError(f"{name} must be a list of integers, got {given!r}")
    for one in given:
        if type(one) is not int and (not isinstance(one, Integral) or isinstance(one, bool)):
            raise ValueError(f"{name} must be integers, got {one!r}")
    return [int(one) for one in given]


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    """Bytes are numbers in a row too, and none that a tokenizer has made."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview))
