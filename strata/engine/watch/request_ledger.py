"""Where the time of one request went: seconds by part, which add up to what its client waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

Part = Literal[
    "text", "inbox", "grammar", "step_under_way", "slot", "pages", "step_full", "prefix", "host_gap", "masks",
    "prompt", "prompt_beside", "decode", "decode_beside", "preempted", "recomputed", "delivery",
]  # fmt: skip
"""text: from the arrival of the request's head to its submission: body, template, tokens, check of a grammar.
inbox: from there until the engine has read it, which it does between steps.
grammar: compiling it in the engine.
step_under_way: until the end of the step that ran when the request was queued; of one that runs, since its last step.
slot, pages, step_full, prefix: in the queue, by what it lacked (`strata.engine.scheduling.config`); step_full also
    while its prompt had begun and others filled a step.
host_gap: between steps, when the device had nothing to do.
masks: steps waited for the masks of grammars, its own or those of others.
prompt, prompt_beside: steps with a part of its prompt: its share of their tokens, and the rest.
decode, decode_beside: steps with a token of it, and what prompts of others added to them.
preempted, recomputed: it waited because its pages were taken, and its tokens were computed again.
delivery: from the end of its last step until its last text was ready to be sent.
"""
PARTS: tuple[Part, ...] = get_args(Part)


class RequestLedger(msgspec.Struct, frozen=True):
    """One request, of several samples the one that ended last.

    seconds: from its arrival until it ended, or until now; the parts add up to it. first_token: until its first token
        was known in the engine, and first_parts what that is the sum of; None while there is none.
    finish_reason: None while it runs.
    output_tokens: that the engine has drawn, also behind a stop string. prompt_steps, decode_steps: that had a part of
        its prompt, or a token of it. beside: sequences in its decode steps, on average, itself included.
    floor: the least seconds that its steps could take on this device; None where its peaks are not known.
    """

    seconds: float
    parts: dict[Part, float]
    first_token: float | None
    first_parts: dict[Part, float]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prompt_steps: int
    decode_steps: int
    beside: float
    preemptions: int
    floor: float | None


# What is cut first where a request ended before the step did that the engine counted last.
_CUT: tuple[Part, ...] = ("decode", "decode_beside", "masks", "host_gap")


def ended_at(parts: Mapping[Part, float], counted: float, seconds: float) -> dict[Part, float]:
    """The parts of a request that ended after `seconds`, of which the engine has counted `counted`: what is missing is
    delivery, and of what is too much its last steps are cut."""
    found = dict(parts)
    left = seconds - counted
    if left >= 0:
        found["delivery"] = found.get("delivery", 0.0) + left
        return found
    for part in (*_CUT, *(part for part in PARTS if part not in _CUT)):
        cut = min(-left, found.get(part, 0.0))
        if cut > 0:
            found[part] -= cut
            left += cut
    return found
