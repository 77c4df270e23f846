"""What the engine process and those that use it say to each other: msgspec structs in msgpack frames, never pickle.

A client sends `ToEngine`, beginning with Hello; the engine answers it with Ready and then sends, step by step, what the
client's own requests brought. Times are seconds of `time.monotonic()`, which all processes of a Linux machine share.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from strata.engine.sampling_params import SamplingParams
from strata.engine.watch.request_ledger import RequestLedger

PROTOCOL = 1


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first message of a client; a client that says it again has forgotten its requests, and they are aborted."""

    protocol: int = PROTOCOL


class Add(msgspec.Struct, tag="add", frozen=True):
    """Generate from a prompt.

    id: names the request among the client's unfinished ones. What was sent of an aborted one may still be on its way,
        so a client that reads later than it writes (`EngineClient`) needs ids that it has not used before.
    prompt: token ids.
    salt: requests share cached prefixes only with requests of the same salt.
    bad_words: `params.bad_words` as ids.
    grammar: what the output must follow, as an llguidance grammar that has been found to compile; None for anything.
    arrival: when it was submitted; began: when its client's request came; 0 where that is not told.
    names: by which its ledger can be asked for, besides its id.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    arrival: float = 0.0
    salt: str = ""
    bad_words: list[tuple[int, ...]] = []
    grammar: str | None = None
    began: float = 0.0
    names: list[str] = []


class Embed(msgspec.Struct, tag="embed", frozen=True):
    """One vector of a prompt: its last token's hidden state, or the mean of all; of length 1 (L2)."""

    id: str
    prompt: list[int]
    pooling: Literal["last", "mean"] = "last"
    arrival: float = 0.0


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End requests wherever they are; nothing more is sent of them. Unknown ids are ignored."""

    ids: list[str]


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """End one sample, because its text has reached a stop string; nothing more is sent of it."""

    id: str
    index: int
    stop: str


class Delivered(msgspec.Struct, tag="delivered", frozen=True):
    """The last text of a request was ready at `ended`."""

    id: str
    ended: float


class AskLedgers(msgspec.Struct, tag="ask_ledgers", frozen=True):
    """Tell the ledgers of the newest requests of a name. id: of this question."""

    id: str
    name: str


ToEngine = Hello | Add | Embed | Abort | Finish | Delivered | AskLedgers


class TokenLogprobs(NamedTuple):
    """The log-probability of the token at one position, its rank (1 is the likeliest), and the likeliest tokens."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """What the engine is.

    default_params: the sampling parameters of the model's generation_config.json.
    max_sequences, num_pages, page_size: what it can run at once.
    startup: seconds by phase. pid: of its process, for whoever finds that it hangs; None leaves it alone.
    """

    model: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    eos_ids: list[int]
    default_params: SamplingParams
    max_sequences: int
    num_pages: int
    page_size: int
    device: str
    startup: dict[str, float]
    protocol: int = PROTOCOL
    pid: int | None = None


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """What one sample got.

    finish_reason: "stop", "length", "error"; None while it runs. stop_reason: the stop id, None for end of sequence.
    logprobs: one for each token, if asked for.
    scheduled, cached_tokens: when the request was first admitted and how much of its prompt was cached; sent with the
        request's first delta only.
    error: why the request failed, with finish_reason "error".
    """

    id: str
    index: int
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    scheduled: float | None = None
    cached_tokens: int | None = None
    error: str | None = None


class PromptLogprobs(msgspec.Struct, tag="prompt_logprobs", frozen=True):
    """Log-probabilities of the prompt's tokens from `first` on (1 is the first that has any), sent in order."""

    id: str
    first: int
    logprobs: list[TokenLogprobs]


class Statistics(msgspec.Struct, array_like=True, frozen=True):
    """The engine as it stands; counts are since its start.

    kv_usage: share of the pages in use, in [0, 1].
    compiled_kernels, cached_kernels: met after it was ready (`strata.kernels.compiled`).
    recorded_sizes: sizes of steps that replay CUDA graphs. too_large, scored, not_captured: steps that replayed none,
    by why (`strata.engine.captured_steps.Reason`); nothing counts where none is to.
    waiting_tokens: of prompts, still to be computed, cached ones included; at most 0.05 s old.
    floor_share, predicted_ratio, gap_share: of the last seconds' steps (`strata.engine.watch.step_window.Standings`);
        None while nothing runs, or where the device is not known.
    finding, layer, cause: what holds the engine back (`strata.engine.watch.verdict.Standing`), empty while it rests.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    failed: int = 0
    compiled_kernels: int = 0
    cached_kernels: int = 0
    recorded_sizes: int = 0
    too_large: int = 0
    scored: int = 0
    not_captured: int = 0
    waiting_tokens: int = 0
    floor_share: float | None = None
    predicted_ratio: float | None = None
    gap_share: float | None = None
    finding: str = ""
    layer: str = ""
    cause: str = ""


# Of an engine since its start; the others tell how it stands.
_COUNTS = (
    "prefix_queries", "prefix_hits", "preemptions", "steps", "failed", "compiled_kernels", "cached_kernels",
    "too_large", "scored", "not_captured",
)  # fmt: skip


def ended(statistics: Statistics) -> Statistics:
    """What an engine that has ended had counted; nothing of how it stood."""
    return Statistics(**{name: getattr(statistics, name) for name in _COUNTS})


class Step(msgspec.Struct, tag="step", frozen=True):
    """What one step brought to this client's requests; also sent twice a second while nothing happens."""

    deltas: list[Delta]
    statistics: Statistics


class Embedding(msgspec.Struct, tag="embedding", frozen=True):
    """values: float32, little-endian, `Ready.hidden_size` of them."""

    id: str
    values: bytes


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A request that can never run, in one line that says why."""

    id: str
    message: str


class Fault(msgspec.Struct, tag="fault", frozen=True):
    """The engine has broken down and ends; all requests are lost."""

    message: str


class Ledgers(msgspec.Struct, tag="ledgers", frozen=True):
    """The answer to `AskLedgers`; empty where no request is known by the name."""

    id: str
    ledgers: list[RequestLedger]


FromEngine = Ready | Step | PromptLogprobs | Embedding | Refused | Ledgers | Fault
