"""What clients of an engine have asked for, and how what comes of it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.engine.faults import why_no_id
from strata.engine.process.messages import Delta, TokenLogprobs
from strata.engine.request import Request, Sequence, Update
from strata.engine.watch.request_times import Arrival


@dataclass(slots=True, eq=False)
class Job:
    """A generation that a client has asked for.

    id: the client's. request: its id there is the scheduler's. sequences: its samples, once they are queued; running:
        how many of them have not ended.
    arrival, names: of its ledger.
    prompt_reported: prompt tokens whose log-probabilities have been sent or never will be.
    scheduled: when it was first admitted. begun: whether the client has had a delta of it.
    """

    client: Client
    id: str
    request: Request
    running: int
    arrival: Arrival
    names: list[str]
    sequences: list[Sequence] = field(default_factory=list)
    prompt_reported: int = 1
    scheduled: float | None = None
    begun: bool = False


@dataclass(slots=True, eq=False)
class Client:
    """deltas: what the step that is being reported has brought it. last_sent: when it was last sent a Step."""

    name: bytes
    last_sent: float
    jobs: dict[str, Job] = field(default_factory=dict)
    deltas: list[Delta] = field(default_factory=list)


def delta_of(job: Job, update: Update, logprobs: list[TokenLogprobs] | None) -> Delta:
    """What the client is sent of an update to one of a job's samples."""
    sequence, tokens, reason = update.sequence, update.tokens, update.finish_reason
    if job.begun and reason is None and logprobs is None:
        return Delta(job.id, sequence.index, tokens)  # nearly all are
    first, job.begun = not job.begun, True
    return Delta(
        job.id,
        sequence.index,
        tokens,
        reason,
        sequence.stop_reason if isinstance(sequence.stop_reason, int) else None,
        logprobs,
        job.scheduled if first else None,
        sequence.cached_tokens if first else None,
        why_no_id(sequence) if not tokens else None,
    )
