"""Sessions as agents have them: each turn's prompt is all that was said before and something new, and comes a while
after the answer before it has ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strata.bench.load.connection import HttpClient
from strata.bench.load.request_sets import Ask, encode
from strata.bench.load.send import LoadRequest, RequestOutcome, send_one


@dataclass(frozen=True)
class SessionTurn:
    """pause: seconds since the turn before it ended, or since the start. new: ids that come behind what was said."""

    pause: float
    new: list[int]
    output_tokens: int


@dataclass(frozen=True)
class SessionShape:
    """What sessions are like; pairs are the least and the most of what is drawn evenly.

    sessions: under way at once, each from a pause after the start on. turns: of each. new, output: tokens that a turn
    adds and gets. pause: seconds. context: most tokens of a prompt with its answer. A turn that would pass it begins
    anew, with what it adds alone, so that every session has all its turns.
    """

    sessions: int
    turns: int
    new: tuple[int, int]
    output: tuple[int, int]
    pause: tuple[float, float]
    context: int

    def __post_init__(self) -> None:
        most = self.new[1] + self.output[1]
        if most > self.context:
            raise ValueError(
                f"one turn has up to {most} tokens, more than a context of {self.context}: raise --context-len, or "
                "lower --turn-input or --turn-output"
            )

    @property
    def words(self) -> str:
        """As a result names them."""
        new, output, pause = (f"{least:g} to {most:g}" for least, most in (self.new, self.output, self.pause))
        return (
            f"{self.sessions} sessions of {self.turns} turns, each {new} new tokens and {output} answered, pauses of "
            f"{pause} s, contexts of at most {self.context}"
        )

    def draw(self, ids: Sequence[int], seed: int) -> list[list[SessionTurn]]:
        """The turns of each session, of ids drawn from `ids`: the same for the same seed."""
        rng = random.Random(seed)
        return [[self._turn(ids, rng) for _ in range(self.turns)] for _ in range(self.sessions)]

    def _turn(self, ids: Sequence[int], rng: random.Random) -> SessionTurn:
        pause, new = rng.uniform(*self.pause), rng.choices(ids, k=rng.randint(*self.new))
        return SessionTurn(pause, new, rng.randint(*self.output))


def turn_request(model: str, said: Sequence[int], turn: SessionTurn, number: int) -> LoadRequest:
    """A turn behind the ids that were said before. number: of the turn in its context, from 1."""
    return replace(encode(Ask([*said, *turn.new], turn.output_tokens), model, with_ids=True), turn=number)


async def send_sessions(
    client: HttpClient,
    model: str,
    sessions: Sequence[Sequence[SessionTurn]],
    context: int,
    *,
    timeout: float,
    on_end: Callable[[], None] = lambda: None,
) -> list[RequestOutcome]:
    """The outcome of each turn, session after session. Behind a turn that failed the session begins anew: what was
    answered is not known.

    context: see `SessionShape`. timeout: seconds after which a turn is given up. on_end: called as each turn ends.
    """
    start = time.perf_counter()

    async def converse(turns: Sequence[SessionTurn]) -> list[RequestOutcome]:
        outcomes: list[RequestOutcome] = []
        said: list[int] = []
        number, ended = 0, 0.0
        for turn in turns:
            if len(said) + len(turn.new) + turn.output_tokens > context:
                said, number = [], 0
            number += 1
            request = turn_request(model, said, turn, number)
            due = ended + turn.pause
            await asyncio.sleep(start + due - time.perf_counter())
            outcome = await send_one(client, request, start, due, timeout)
            on_end()
            outcomes.append(outcome)
            ended = outcome.ended
            if outcome.fault is None:
                said = [*said, *turn.new, *outcome.ids]
            else:
                said, number = [], 0
        return outcomes

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(converse(turns)) for turns in sessions]
    return [outcome for task in tasks for outcome in task.result()]
