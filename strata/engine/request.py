"""A request as it was asked, and its samples as sequences that grow while the scheduler runs them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from strata.cache.pages import PageAllocator
from strata.cache.snapshots import Marks
from strata.cache.window_pages import WindowPages, WindowTable
from strata.engine.plan import Draw, NewSequence, Sampling, Tags
from strata.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


# Of a sequence that does not run.
NO_SLOT = -1


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


# Seconds by which a priority can put a request before, or behind, others that came with it: nobody waits for ever.
MAX_AHEAD = 60.0
_HALF_AHEAD = 5  # the priority that is worth half of that


def seconds_ahead(priority: int) -> float:
    """By how much sooner a request ranks than it came, in seconds; negative for one that gives way."""
    return -MAX_AHEAD * (priority / (abs(priority) + _HALF_AHEAD))  # a share: integers may be beyond floats


@dataclass(frozen=True)
class Request:
    """What was asked.

    id: names the request among those that are unfinished.
    prompt: token ids, and keys of other content (see `strata.engine.args.segments`).
    priority: a lower number runs first of those that came within `MAX_AHEAD`; equal ones run in order of arrival.
    arrival: seconds on any clock that all requests share.
    salt: requests share cached prefixes only with requests of the same salt.
    eos_ids: the model's end-of-sequence ids, which end a sample unless `params.ignore_eos`.
    bad_words: `params.bad_words` as ids and those of the model itself; one of several ids can only be avoided once the
        host knows the ids before.
    grammar: what every sample has to follow, as a grammar of llguidance; None for anything.
    tags: what its samples bring along; those of other tags share no prefixes with them.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival: float = 0.0
    salt: str = ""
    eos_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    tags: Tags | None = None

    @property
    def extra_key(self) -> Hashable:
        """Of what prefixes are shared by, all but the tokens."""
        return (self.salt, self.tags) if self.tags is not None and any(self.tags) else self.salt

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a sample."""
        return self.params.stop_ids if self.params.ignore_eos else self.eos_ids | self.params.stop_ids

    def max_length(self, longest: int, pages: PageAllocator, windows: Iterable[WindowPages] = ()) -> int:
        """The most tokens that a sample may have, prompt included, where no sequence has more than `longest`. Raises
        ValueError if the request can never run."""
        length, most = len(self.prompt), self.params.max_tokens
        if not length:
            raise ValueError("the prompt is empty: it needs at least one token")
        if length >= longest:
            raise ValueError(
                f"the prompt has {length} tokens, but max_model_len is {longest} and at least one must be generated: "
                f"shorten the prompt to {longest - 1} tokens"
            )
        limit = longest if most is None else min(length + most, longest)
        wanted = pages.pages_for(limit - 1)  # the last token is never read
        needs = [(wanted, pages.num_pages)]
        # With a page for new tokens beside the window a sequence gets on, if slowly.
        needs += [(min(wanted, window.max_pages + 1), window.books.num_pages) for window in windows]
        for count, there in needs:
            if count > there:
                raise ValueError(
                    f"{length} prompt tokens and {limit - length} output tokens need {count} KV pages, but the pool "
                    f"has {there}: lower max_tokens, shorten the prompt, or give the KV cache more memory"
                )
        return limit

    def check_ids(self, vocab_size: int) -> None:
        """Raises ValueError for an id that the model does not have."""
        check_prompt_ids(self.prompt, vocab_size)
        named = {
            "logit_bias": self.params.logit_bias or (),
            "stop_token_ids": self.params.stop_ids,
            "bad_words": itertools.chain.from_iterable(self.bad_words),
        }
        for name, ids in named.items():
            for id in ids:
                if not 0 <= id < vocab_size:
                    raise ValueError(
                        f"{name}: token id {id} is out of range: this model's ids are 0 to {vocab_size - 1}"
                    )


def check_prompt_ids(prompt: Collection[int], vocab_size: int) -> None:
    """Raises ValueError for an id that the model does not have."""
    if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
        wrong = next(id for id in prompt if not 0 <= id < vocab_size)
        raise ValueError(f"token id {wrong} is out of range: this model's ids are integers from 0 to {vocab_size - 1}")


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. The scheduler owns it and is the only one that changes it.

    id: unique within the scheduler, ascending in order of arrival.
    index: 0 to n - 1 among the samples of its request.
    max_length: the most tokens it may ever have, prompt included.
    tokens: ids of the prompt and of the outputs that the host knows.
    pending: ids that launched steps sample but the host does not know yet. Between steps those of one step; the one
        that the next step reads is on the device only, in the row of the sequence's slot.
    drafted: of `pending`, those behind a draft: they may be rejected, and then they never were.
    computed: tokens whose keys and values are in pages once all launched steps have run, if no draft is rejected.
    pages: its pages in order; the last one may be part full, and those behind `computed` are empty. windows: those of
        layers with windows, a table for each window. marks: where fixed states of it are kept, while it runs; None
        where no layer has any.
    slot: its row of device state while it runs.
    finish_reason: "stop", "length", "abort", "error" or whatever `Scheduler.finish` was told; None while unfinished.
    stop_reason: the stop id or stop string that ended it; None for an end-of-sequence id.
    error: why it failed, where that is not that no id could be drawn from its logits.
    cached_tokens: prompt tokens found in the prefix cache at the first admission.
    preemptions: how often its pages were taken away, to be computed again.
    matcher: follows its output through the grammar, as far as the host knows it; None without a grammar.
    """

    id: int
    request: Request
    index: int
    max_length: int
    tokens: list[int]
    prompt_length: int
    pending: int = 0
    drafted: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    windows: tuple[WindowTable, ...] = ()
    marks: Marks | None = None
    slot: int = NO_SLOT
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    matcher: LLMatcher | None = None
    # What follows is the scheduler's own book-keeping.
    order: tuple[float, int] = field(init=False)
    extra_key: Hashable = field(init=False)
    end_ids: frozenset[int] = field(init=False)
    min_length: int = field(init=False)
    long_bad_words: tuple[tuple[int, ...], ...] = field(init=False)  # of more than one id
    draws: tuple[Draw, ...] = ()  # its own in each decode step
    sent_pages: int = 0  # entries of its block table that the runner has
    verified: bool = False  # whether an id has been drawn from its pages
    unforked: list[Sequence] = field(default_factory=list)
    awaited: tuple[Hashable, tuple[int, ...]] | None = None  # the page from elsewhere that it waited for last
    in_line: float | None = None  # since when nothing but other prompts has kept its own from being computed
    cached: int = 0  # tokens that it would have found then

    def __post_init__(self) -> None:
        request = self.request
        self.order = (request.arrival - seconds_ahead(request.priority), self.id)
        self.extra_key = request.extra_key
        self.end_ids = request.end_ids
        self.min_length = self.prompt_length + request.params.min_tokens
        self.long_bad_words = tuple(word for word in request.bad_words if len(word) > 1)

    @property
    def outputs(self) -> list[int]:
        """Ids generated so far, as far as the host knows them."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def completed_bad_words(self) -> set[int]:
        """Ids that would complete a bad word of several ids; the host has to know all ids of the sequence."""
        tokens = self.tokens
        return {word[-1] for word in self.long_bad_words if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]}

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id}[{self.index}], {self.status.name}, tokens={len(self.tokens)}+{self.pending}, "
            f"computed={self.computed}, slot={self.slot})"
        )


class Update(msgspec.Struct, frozen=True):
    """The ids that a step brought a sequence, none if its request has failed, and why it ended with the last of them
    (None: it goes on)."""

    sequence: Sequence
    tokens: list[int]
    finish_reason: str | None


def new_sequence(sequence: Sequence, slot: int, engine_seed: int) -> NewSequence:
    """What a runner is told of a sequence that takes a slot."""
    request, known = sequence.request, len(sequence.tokens) > sequence.prompt_length
    return NewSequence(
        id=sequence.id,
        slot=slot,
        tokens=tuple(sequence.tokens) if known else request.prompt,
        prompt_length=sequence.prompt_length,
        seed=_noise_seed(sequence, engine_seed),
        sampling=_sampling(request),
        constrained=sequence.matcher is not None,
        prompt_logprobs=_plain(request.params.prompt_logprobs) if sequence.index == 0 else None,
        tags=request.tags,
    )


def _sampling(request: Request) -> Sampling:
    params = request.params
    return Sampling(
        temperature=float(params.temperature),
        top_k=max(int(params.top_k), 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=tuple((int(id), float(bias)) for id, bias in (params.logit_bias or {}).items()),
        min_tokens=int(params.min_tokens),
        end_ids=tuple(sorted(map(int, request.end_ids))) if params.min_tokens else (),
        banned_ids=tuple(int(word[0]) for word in request.bad_words if len(word) == 1),
        logprobs=_plain(params.logprobs),
    )


def _plain(number: int | None) -> int | None:
    """An integer of Python: parameters may be of numpy, which messages do not encode."""
    return None if number is None else int(number)


def _noise_seed(sequence: Sequence, engine_seed: int) -> int:
    """The int64 seed of one sequence: of the request's own seed if it has one, else of the engine's and the request."""
    request = sequence.request
    own = f"request {request.params.seed}" if request.params.seed is not None else f"engine {engine_seed} {request.id}"
    digest = hashlib.blake2b(f"{own} {sequence.index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
