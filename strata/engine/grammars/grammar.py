"""Grammars in the engine: compiled beside the step loop, followed id by id, and sent to the device as masks of ids.

The automata are llguidance's: a lexer of regular-expression derivatives under an Earley parser.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from torch import Tensor

from strata.engine.grammars.limits import LIMITS
from strata.engine.grammars.matchers import explain
from strata.kernels.sampling.filters import WORD
from strata.text.tokenizer import Tokenizer

_COMPILING_THREADS = 2

# Within a string of limited length, the mask of all tokens up to some length is known without walking through them: for
# these lengths. They cost 0.2 s at the start and save a third of the slowest masks, those near the limit.
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{length}}}" for length in (1, 2, 4, 6, 8, 10, 16, 30)), f"{_TEXT}+"]


def vocabulary(tokenizer: Tokenizer | None, rows: int) -> int:
    """Ids that a mask tells of, for a model with so many rows of logits; a tokenizer may have more."""
    return max(rows, tokenizer.vocab_size if tokenizer is not None else 0)


class GrammarCompiler:
    """Compiles grammars for one model, in threads so that the step loop goes on (a hostile one takes seconds).

    Each request gets an automaton of its own: copies of one share a lock, so their masks could not be computed side by
    side.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int], rows: int) -> None:
        """rows: of the model's logits. Takes 0.7 s for 150,000 tokens."""
        self._tokenizer = _tokens(tokenizer, eos_ids, vocabulary(tokenizer, rows))
        self._threads = ThreadPoolExecutor(_COMPILING_THREADS, thread_name_prefix="grammar")
        self._started: dict[str, Future[LLMatcher]] = {}

    @property
    def pending(self) -> bool:
        """Whether `ready` has yet to tell of a grammar."""
        return bool(self._started)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of an output. Raises ValueError with llguidance's reason."""
        if isinstance(self._tokenizer, str):
            raise ValueError(self._tokenizer)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {explain(matcher.get_error())}")
        return matcher

    def compile_all(self, grammars: Iterable[str | None]) -> list[LLMatcher | None]:
        """Matchers of several grammars, compiled side by side; None for None. Raises ValueError as `compile` does."""
        return list(self._threads.map(lambda grammar: None if grammar is None else self.compile(grammar), grammars))

    def start(self, request_id: str, grammar: str) -> None:
        """Begin to compile; `ready` tells when it is done."""
        self._started[request_id] = self._threads.submit(self.compile, grammar)

    def ready(self) -> list[tuple[str, LLMatcher | str]]:
        """What was compiled since the last call: request ids with their matchers, or with what is wrong."""
        return [(id, _result(self._started.pop(id))) for id, future in list(self._started.items()) if future.done()]

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        future = self._started.pop(request_id, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Compile no more, and wait for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Masks:
    """The ids that may come next, a bit an id: computed by threads while the host goes on, sent in one copy.

    The host buffer may be filled again once the ids that were drawn with it are known.
    """

    def __init__(self, ids: int, rows: int, device: torch.device) -> None:
        """ids: how many a mask tells of (`vocabulary`). rows: the most of a step. Allocates when first used."""
        self._words, self._rows, self._device = -(-ids // WORD), rows, device
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor: LLExecutor | None = None
        self._host: Tensor | None = None

    def start(self, matchers: Sequence[LLMatcher | None]) -> MasksUnderWay | None:
        """Begin with the masks of a step's rows; a row that is free has no matcher. None if all are.

        The matchers must be left alone meanwhile. One that cannot tell goes into its error state.
        """
        constrained = [matcher for matcher in matchers if matcher is not None]
        if not constrained:
            return None
        if self._executor is None or self._host is None:
            size = self._rows * (self._words + 1)
            self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            self._executor = LLExecutor()
        end = len(constrained) * self._words
        held = np.array([matcher is not None for matcher in matchers])
        self._host[end : end + len(matchers)].numpy()[:] = np.where(held, held.cumsum() - 1, -1)
        computed = self._starter.submit(
            self._executor.unsafe_compute_mask_ptr,
            [(matcher, place) for place, matcher in enumerate(constrained)],
            self._host.data_ptr(),
            4 * self._words,
            len(constrained),
        )
        while not (computed.running() or computed.done()):
            time.sleep(0)  # the thread needs the interpreter's lock to begin, and from then on does without
        return MasksUnderWay(computed, self._host[: end + len(matchers)], len(constrained), self._words)

    def settle(self) -> None:
        """Wait until no mask is being computed."""
        self._starter.submit(int).result()  # it has one thread, which takes its work in order


@dataclass(frozen=True)
class MasksUnderWay:
    """So many masks of so many words that threads compute into one host buffer [masks * words + rows] int32; behind
    them stands whose they are."""

    computed: Future[None]
    buffer: Tensor
    count: int
    words: int

    def send(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Wait for them: masks and rows as `apply_bitmask` takes them."""
        self.computed.result()
        end = self.count * self.words
        sent = self.buffer.to(device, non_blocking=True)
        return sent[:end].view(self.count, self.words), sent[end:]


def _tokens(tokenizer: Tokenizer, eos_ids: Iterable[int], size: int) -> LLTokenizer | str:
    """The vocabulary as automata read it, or why they cannot."""
    try:
        eos = sorted(id for id in eos_ids if id < size)
        return LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=eos or None, slices=_SLICES)
    except ValueError as error:
        return f"grammars cannot be followed with this model's tokenizer: {explain(str(error))}"


def _result(compiled: Future[LLMatcher]) -> LLMatcher | str:
    try:
        return compiled.result()
    except ValueError as error:
        return str(error)
