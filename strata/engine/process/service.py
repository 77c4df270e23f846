"""One engine serves several clients: their messages in, and at every step what each of them gets. Knows no sockets."""

from __future__ import annotations

import itertools
import math
import os
import traceback
from collections.abc import Callable

import msgspec
from llguidance import LLMatcher
from torch import Tensor

from strata.engine.args.segments import positions
from strata.engine.build import Engine
from strata.engine.captured_steps import REASONS
from strata.engine.collect import LogprobRows
from strata.engine.embeddings.pooling import EmbeddingQueue, PoolRequest, check_vector
from strata.engine.faults import EngineFault
from strata.engine.grammars.grammar import GrammarCompiler
from strata.engine.loop import StepOutput
from strata.engine.process import messages
from strata.engine.process.jobs import Client, Job, delta_of
from strata.engine.ranks.ranked_runner import BEHIND_SECONDS
from strata.engine.request import Request, Status
from strata.engine.runner import ScoredPrompt
from strata.engine.scheduling.rank_schedulers import RankPages
from strata.engine.startup.clock import Log
from strata.engine.watch.request_times import Arrival
from strata.engine.watch.step_window import Watch

# How often clients hear how the engine stands when they hear nothing else, in seconds.
REPORT_EVERY = 0.5
# How often tokens that wait are counted anew while something runs, in seconds: every sequence is looked at for it.
COUNT_EVERY = 0.05
# How often it is looked whether a grammar has been compiled while there is nothing else to do, in seconds.
LOOK_EVERY = 0.002

Send = Callable[[bytes, bytes], bool]
"""Sends a client a frame; returns whether the client is still there."""


class Service:
    """What a client does wrong concerns this client alone: it is refused, and the engine goes on.

    model: its name, for clients. send: how frames reach a client, named as in `receive`. check: verify the
    scheduler's books whenever the engine comes to rest; for tests, it walks all of them.
    """

    def __init__(self, engine: Engine, model: str, send: Send, log: Log, check: bool = False) -> None:
        self._engine = engine
        self._loop = engine.loop
        self._loop.launch_late(0.0 if engine.ranks is None else BEHIND_SECONDS)
        self._send_frame = send
        self._clock = engine.loop.clock
        self._log = log
        self._check = check
        self._ready = _ready(engine, model)
        self._clients: dict[bytes, Client] = {}
        self._jobs: dict[str, Job] = {}  # by the id of their request in the scheduler
        self._unscheduled: list[Job] = []
        self._grammars = _compiler(engine, log)
        self._embeddings = EmbeddingQueue(engine.pooler, engine.loop.clock)
        ranks = len(engine.pages.parts) if isinstance(engine.pages, RankPages) else 1
        self._watch = Watch(engine.shares, ranks=ranks, captures=engine.captured is not None)
        self._numbers = itertools.count()
        self._steps = self._failed = 0
        self._settled = True
        self._waiting_tokens, self._counted = 0, -math.inf
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], messages.ToEngine] = msgspec.msgpack.Decoder(messages.ToEngine).decode

    @property
    def patience(self) -> float:
        """How many seconds may pass until `step` is due, but for `delay`: none while anything runs."""
        if not self._loop.idle or self._embeddings:
            return 0
        return LOOK_EVERY if self._grammars is not None and self._grammars.pending else REPORT_EVERY

    @property
    def delay(self) -> float:
        """How many seconds `step` is better put off for, while messages come: nobody waits for it so long."""
        return 0.0 if self._embeddings else self._loop.delay

    def receive(self, name: bytes, frame: bytes) -> None:
        """Take a frame of a client."""
        try:
            message = self._decode(frame)
        except Exception as error:  # whatever is wrong with a frame, msgspec says it with several kinds
            self._refuse_unread(name, frame, error)
            return
        self._settled = False
        client = self._clients.get(name)
        if isinstance(message, messages.Hello):
            self._greet(name, message.protocol)
        elif client is None:
            self._log(f"a {type(message).__name__} before any Hello is ignored")
        elif isinstance(message, (messages.Add, messages.Embed)):
            self._guarded(client, message)
        elif isinstance(message, messages.Abort):
            for id in message.ids:
                self._abort(client, id)
        elif isinstance(message, messages.Finish):
            self._finish(client, message)
        elif isinstance(message, messages.Delivered):
            self._watch.requests.delivered(message.id, message.ended)
        else:
            found = self._watch.requests.ledgers(message.name, self._clock())
            self._send(client, messages.Ledgers(message.id, found))

    def step(self) -> None:
        """Run what there is to run, once, and send each client what it brought."""
        if self._grammars is not None and self._grammars.pending:
            self._queue_compiled(self._grammars)
        began = self._clock()
        self._embeddings.launch(beside_generations=not self._loop.idle)
        output = None if self._loop.idle else self._loop.step()
        if self._unscheduled:
            self._note_scheduled(began)
        if output is not None:
            self._steps += 1
            self._watch.step(output.timing)
            self._send_output(output)
        if self._embeddings:
            self._loop.forget_under_way()
        for (name, id), vector in self._embeddings.collect(wait=self._loop.idle):
            self._send_vector(self._clients[name], id, vector)

    def report(self) -> None:
        """Tell clients how the engine stands: at once when it has come to rest, else those who have heard nothing for
        a while; that also finds out who is no longer there."""
        if self._engine.ranks is not None:
            self._engine.ranks.check()
        now = self._clock()
        rests = self.patience == REPORT_EVERY
        comes_to_rest = rests and not self._settled
        self._settled = rests
        if comes_to_rest and self._check:
            self._loop.scheduler.check()
            if self._engine.ranks is not None:
                self._engine.ranks.check_ids()
        due = [client for client in self._clients.values() if comes_to_rest or now - client.last_sent >= REPORT_EVERY]
        for client in due:
            self._send_step(client, self.statistics(), now)

    def fail(self, message: str) -> None:
        """Tell all clients that the engine ends."""
        for client in list(self._clients.values()):
            self._send(client, messages.Fault(message))

    def statistics(self) -> messages.Statistics:
        scheduler = self._loop.scheduler
        counted, compiled, captured = scheduler.statistics, self._engine.compilations.counts, self._engine.captured
        now = self._clock()
        if self._loop.idle or now - self._counted >= COUNT_EVERY:
            self._waiting_tokens = scheduler.waiting_tokens + self._embeddings.waiting_tokens
            self._counted = -math.inf if self._loop.idle else now
        standings = self._watch.standings(now, compiled["kernel"])
        finding, layer, cause = standings.verdict or ("", "", "")
        uncaptured = captured.uncaptured if captured is not None else dict.fromkeys(REASONS, 0)
        return messages.Statistics(
            running=scheduler.running,
            waiting=scheduler.waiting + len(self._embeddings),
            kv_usage=self._engine.pages.usage,
            prefix_queries=counted.prefix_queries,
            prefix_hits=counted.prefix_hits,
            preemptions=counted.preemptions,
            steps=self._steps,
            failed=self._failed,
            compiled_kernels=compiled["kernel"],
            cached_kernels=compiled["cached kernel"],
            recorded_sizes=len(captured.sizes) if captured is not None else 0,
            too_large=uncaptured["too_large"],
            scored=uncaptured["prompt_logprobs"],
            not_captured=uncaptured["out_of_memory"],
            waiting_tokens=self._waiting_tokens,
            floor_share=standings.floor,
            predicted_ratio=standings.predicted,
            gap_share=standings.gap,
            finding=finding,
            layer=layer,
            cause=cause,
        )

    def _greet(self, name: bytes, protocol: int) -> None:
        self._forget(name)
        client = Client(name, self._clock())
        if protocol != messages.PROTOCOL:
            self._send(client, messages.Fault(f"the client speaks protocol {protocol}, the engine {messages.PROTOCOL}"))
            return
        self._clients[name] = client
        self._send(client, self._ready)

    def _guarded(self, client: Client, message: messages.Add | messages.Embed) -> None:
        """Take a request; what is wrong with it, even where nobody expected it, is reported to its client alone."""
        try:
            if message.id in client.jobs or (client.name, message.id) in self._embeddings:
                raise ValueError(f"request id {message.id!r} is in use by an unfinished request: choose another")
            if isinstance(message, messages.Add):
                self._add(client, message)
            else:
                self._embeddings.add((client.name, message.id), PoolRequest(message.prompt, message.pooling))
        except EngineFault:
            raise
        except ValueError as error:
            self._send(client, messages.Refused(message.id, str(error)))
        except Exception as error:
            self._log(traceback.format_exc())
            self._send(client, messages.Refused(message.id, f"the engine could not take the request: {error!r}"))

    def _add(self, client: Client, message: messages.Add) -> None:
        if not math.isfinite(message.arrival):
            raise ValueError(f"arrival must be finite, got {message.arrival}")
        request = Request(
            id=str(next(self._numbers)),
            prompt=positions([message.prompt]),
            params=message.params,
            priority=message.priority,
            arrival=message.arrival,
            salt=message.salt,
            eos_ids=self._engine.eos_ids,
            bad_words=(*self._engine.bad_words, *(word for word in message.bad_words if word)),
            grammar=message.grammar,
        )
        request.check_ids(self._engine.config.vocab_size)
        job = Job(client, message.id, request, message.params.n, _arrival(message, self._clock()), message.names)
        if request.grammar is None:
            self._queue(job, None)
        elif self._grammars is None:
            raise ValueError("this engine has no tokenizer that it could follow a grammar with")
        else:
            self._grammars.start(request.id, request.grammar)
        client.jobs[message.id] = self._jobs[request.id] = job

    def _queue(self, job: Job, matcher: LLMatcher | None) -> None:
        job.sequences = self._loop.add(job.request, matcher)
        now = self._clock()
        read = now if job.request.grammar is None else job.arrival.read
        arrival = job.arrival._replace(read=read, queued=now)
        self._watch.requests.queued(job.request.id, (job.id, *job.names), job.sequences, arrival)
        self._unscheduled.append(job)

    def _queue_compiled(self, grammars: GrammarCompiler) -> None:
        for id, compiled in grammars.ready():
            job = self._jobs.get(id)
            if job is None:  # its client turned out to have left when it was sent the one before
                continue
            try:
                if isinstance(compiled, str):
                    raise ValueError(compiled)
                self._queue(job, compiled)
            except ValueError as error:
                self._remove(job)
                self._send(job.client, messages.Refused(job.id, str(error)))

    def _abort(self, client: Client, id: str) -> None:
        job = client.jobs.get(id)
        if job is not None:
            self._loop.abort(job.request.id)
            self._watch.requests.request_ended(job.request.id, self._clock())
            if self._grammars is not None:
                self._grammars.cancel(job.request.id)
            self._remove(job)
        self._embeddings.drop((client.name, id))

    def _finish(self, client: Client, message: messages.Finish) -> None:
        job = client.jobs.get(message.id)
        if job is None or not 0 <= message.index < len(job.sequences):
            return
        sequence = job.sequences[message.index]
        if not sequence.finished:
            self._loop.finish(sequence, "stop", message.stop)
            self._watch.requests.sample_ended(sequence)
            self._note_end(job)

    def _forget(self, name: bytes) -> None:
        """A client is gone, or begins anew."""
        client = self._clients.pop(name, None)
        if client is not None:
            for id in list(client.jobs):
                self._abort(client, id)
            self._embeddings.drop_all(name)

    def _note_end(self, job: Job) -> None:
        job.running -= 1
        if not job.running:
            self._remove(job)

    def _remove(self, job: Job) -> None:
        del self._jobs[job.request.id]
        del job.client.jobs[job.id]

    def _note_scheduled(self, began: float) -> None:
        still = []
        for job in self._unscheduled:
            if job.sequences[0].status is Status.WAITING:
                still.append(job)
            else:
                job.scheduled = began
        self._unscheduled = still

    def _send_output(self, output: StepOutput) -> None:
        for sequence, part in output.prompt_logprobs:
            self._send_prompt_logprobs(sequence.request.id, part)
        rows = LogprobRows(output.logprobs) if output.logprobs is not None else None
        reached: list[Client] = []
        for update in output.updates:
            job = self._jobs.get(update.sequence.request.id)
            if job is None:
                continue
            deltas = job.client.deltas
            if not deltas:
                reached.append(job.client)
            entries = None
            most = job.request.params.logprobs
            if rows is not None and most is not None and update.tokens:
                first = output.rows[update.sequence.id]
                entries = [rows.entry(row, token, most) for row, token in enumerate(update.tokens, first)]
            deltas.append(delta_of(job, update, entries))
            if update.finish_reason is not None:
                self._watch.requests.sample_ended(update.sequence)
                self._note_end(job)
                self._failed += not job.running and update.finish_reason == "error"
        if reached:
            statistics, now = self.statistics(), self._clock()
            for client in reached:
                self._send_step(client, statistics, now)

    def _send_prompt_logprobs(self, request_id: str, part: ScoredPrompt) -> None:
        """Log-probabilities of a part of a prompt, without what was sent before a preemption."""
        job = self._jobs.get(request_id)
        rows = LogprobRows(part.tensors)
        if job is None or part.first + len(rows) <= job.prompt_reported:
            return
        first, job.prompt_reported = job.prompt_reported, part.first + len(rows)
        prompt, most = job.request.prompt, job.request.params.prompt_logprobs or 0
        entries = [rows.entry(at - part.first, prompt[at], most) for at in range(first, job.prompt_reported)]
        self._send(job.client, messages.PromptLogprobs(job.id, first, entries))

    def _send_vector(self, client: Client, id: str, vector: Tensor) -> None:
        try:
            check_vector(vector)
        except ValueError as error:
            self._failed += 1
            self._send(client, messages.Refused(id, str(error)))
            return
        self._send(client, messages.Embedding(id, vector.numpy().astype("<f4").tobytes()))

    def _refuse_unread(self, name: bytes, frame: bytes, error: Exception) -> None:
        self._log(f"a frame of {len(frame)} bytes that is no message: {error}")
        try:
            id = msgspec.msgpack.decode(frame, type=_Named).id
        except Exception:  # whose it was cannot be known
            return
        if name in self._clients:
            self._send(self._clients[name], messages.Refused(id, str(error)))

    def _send_step(self, client: Client, statistics: messages.Statistics, now: float) -> None:
        deltas, client.deltas, client.last_sent = client.deltas, [], now
        self._send(client, messages.Step(deltas, statistics))

    def _send(self, client: Client, message: messages.FromEngine) -> None:
        if not self._send_frame(client.name, self._encode(message)):
            self._forget(client.name)


def _ready(engine: Engine, model: str) -> messages.Ready:
    scheduler = engine.loop.scheduler
    return messages.Ready(
        model=model,
        vocab_size=engine.config.vocab_size,
        hidden_size=engine.config.hidden_size,
        max_model_len=engine.max_model_len,
        eos_ids=sorted(engine.eos_ids),
        default_params=engine.default_params,
        max_sequences=scheduler.max_sequences,
        num_pages=engine.pages.num_pages,
        page_size=engine.pages.page_size,
        device=engine.ledger.device,
        startup=engine.startup,
        pid=os.getpid(),
    )


def _arrival(message: messages.Add, read: float) -> Arrival:
    """By the engine's clock; what is not told, or cannot be, is as if it had come when the engine read it."""
    submitted = message.arrival if 0.0 < message.arrival <= read else read
    began = message.began if 0.0 < message.began <= submitted else submitted
    return Arrival(began, submitted, read, read)


def _compiler(engine: Engine, log: Log) -> GrammarCompiler | None:
    if engine.tokenizer is None:
        return None
    try:
        return GrammarCompiler(engine.tokenizer, engine.eos_ids, engine.config.vocab_size)
    except ValueError as error:
        log(f"structured output is off: {error}")
        return None


class _Named(msgspec.Struct):
    """As much of a message as it takes to refuse it."""

    id: str
