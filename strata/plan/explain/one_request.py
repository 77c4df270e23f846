"""Explains one request of a server from its ledger: what it waited for, and what would have saved the most of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from strata.engine.watch.request_ledger import PARTS, RequestLedger
from strata.engine.watch.request_ledger import Part as LedgerPart
from strata.engine.watch.verdict import HELD_SHARE, NEAR, Cause, Remedy, Verdict
from strata.models.folder import BUILTIN
from strata.models.shapes import SHAPES
from strata.plan.explain.explanation import Explanation, LostTime, Phase, Waterfall
from strata.plan.explain.verdict import Finding
from strata.text.counted import counted

_OWN: tuple[LedgerPart, ...] = ("prompt", "decode")
# Until its first step.
_QUEUED: tuple[LedgerPart, ...] = (
    "text", "inbox", "grammar", "step_under_way", "slot", "pages", "step_full", "prefix",
)  # fmt: skip
# What its steps did beside that: their floor is of all that they did.
_SHARED: tuple[LedgerPart, ...] = (*_OWN, "prompt_beside", "decode_beside", "recomputed")
_SAID: dict[LedgerPart, tuple[str, Cause]] = {
    "text": ("HTTP, template and tokens, before the engine", "host"),
    "inbox": ("on its way into the engine", "host"),
    "grammar": ("its grammar was compiled", "host"),
    "step_under_way": ("the step that ran when it came", "scheduling"),
    "slot": ("waited for a slot", "queueing"),
    "pages": ("waited for KV pages", "queueing"),
    "step_full": ("waited behind prompts that filled the steps", "scheduling"),
    "prefix": ("waited for a prefix that a step computed", "scheduling"),
    "host_gap": ("between its steps, on the host", "host"),
    "masks": ("masks of grammars", "host"),
    "prompt_beside": ("others in the steps of its prompt", "scheduling"),
    "decode_beside": ("prompts of others in its decode steps", "scheduling"),
    "preempted": ("waited after its pages were taken", "preemption"),
    "recomputed": ("its tokens were computed again", "preemption"),
    "delivery": ("messages and text, after its last step", "host"),
}
# What saves less of a request is not what holds it.
_LEAST = 0.1


def _held(symptom: str, cause: Cause, what: str, option: str = "") -> Finding:
    return Finding("system", symptom, cause, (), (Remedy(what, 0.0, option),))


# By the parts that one remedy saves.
_REASONS: Mapping[tuple[LedgerPart, ...], Finding] = {
    ("slot",): _held("it waited while as many ran as may run at once", "queueing", "more slots", "--max-num-seqs"),
    ("pages",): _held("it waited for KV pages", "queueing", "more KV pages", "--num-pages, --gpu-memory-utilization"),
    ("preempted", "recomputed"): _held(
        "its KV pages were taken, and it was computed again",
        "preemption",
        "more KV pages, or fewer sequences at once",
        "--num-pages, --max-num-seqs",
    ),
    ("step_full", "prompt_beside"): _held(
        "its prompt shared steps with others, or waited behind theirs",
        "scheduling",
        "another replica, so that fewer prompts are in line",
        "--data-parallel-size",
    ),
    ("decode_beside",): _held(
        "prompts of others made its decode steps longer", "scheduling", "shorter steps with prompts", "--tpot-target-ms"
    ),
    ("host_gap",): _held("the device waited for the host between steps", "host", "processors for the engine"),
    ("masks", "grammar"): _held("its grammar: compiled, and masks waited for", "host", "a simpler schema"),
    ("text", "inbox", "delivery"): _held(
        "HTTP and text took longer than they should", "host", "more API processes", "--api-workers"
    ),
}


def explain_request(
    ledger: RequestLedger, *, name: str, server: str, device: str | None = None, model: str | None = None
) -> Explanation:
    """name: of the request. server: where it ran, in words. device, model: that it ran on, as the server calls them;
    None where it does not tell. The parts and the floor add up to its seconds."""
    parts = tuple(_parts(ledger))
    waterfall = Waterfall(ledger.seconds, _floor(ledger), parts)
    left = "runs" if ledger.finish_reason is None else f"ended with {ledger.finish_reason}"
    sources = [f"the ledger of {server}"]
    if ledger.floor is None:
        sources.append("a server that does not know its device's peaks: no floor")
    return Explanation(
        f"request {name}, which {left}",
        device,
        waterfall,
        _verdict(ledger, model),
        sources=tuple(sources),
        phases=tuple(_phases(ledger)),
    )


def _phases(ledger: RequestLedger) -> Iterator[Phase]:
    """Queue, prefill, decode and delivery, one after another, of which the parts of the ledger are sums."""
    first = ledger.parts if ledger.first_token is None else ledger.first_parts
    later = {part: seconds - first.get(part, 0.0) for part, seconds in ledger.parts.items()}
    phases: dict[str, dict[LedgerPart, float]] = {
        "queue": {part: first.get(part, 0.0) for part in _QUEUED},
        "prefill": {part: first.get(part, 0.0) for part in PARTS if part not in (*_QUEUED, "delivery")},
        "decode": {part: later.get(part, 0.0) for part in PARTS if part != "delivery"},
        "delivery": {"delivery": ledger.parts.get("delivery", 0.0)},
    }
    begin = 0.0
    for name, parts in phases.items():
        told: dict[str, float] = {part: seconds for part, seconds in parts.items() if seconds > 0.0}
        end = begin + math.fsum(told.values())
        if told:
            yield Phase(name, begin, end, told)
        begin = end


def _parts(ledger: RequestLedger) -> Iterator[LostTime]:
    own = _seconds(ledger, _OWN)
    for part in PARTS:
        seconds = ledger.parts.get(part, 0.0)
        if part not in _OWN and seconds:
            name, cause = _SAID[part]
            yield LostTime(name, "system", cause, seconds)
    if own:
        name = "its own steps" if ledger.floor is None else "its own steps, over their floor"
        yield LostTime(name, "kernel", "unknown", own - _floor(ledger))


def _floor(ledger: RequestLedger) -> float:
    """Its share of the floor of the steps that it was in, by the time that it had of them."""
    own, shared = (_seconds(ledger, parts) for parts in (_OWN, _SHARED))
    return 0.0 if ledger.floor is None or not shared else min(own, ledger.floor * own / shared)


def _verdict(ledger: RequestLedger, model: str | None) -> Verdict:
    shares = {parts: _seconds(ledger, parts) / ledger.seconds for parts in _REASONS}
    worth = sorted((parts for parts in _REASONS if shares[parts] >= _LEAST), key=lambda parts: -shares[parts])
    evidence = (*_evidence(ledger), *_next(ledger, model))
    if not worth:
        return Verdict("kernel", _of_steps(ledger), "unknown", evidence, ())
    remedies = tuple(replace(_REASONS[parts].remedies[0], gain=shares[parts]) for parts in worth)
    first = _REASONS[worth[0]]
    return Verdict(first.layer, first.symptom, first.cause, evidence, remedies)


def _seconds(ledger: RequestLedger, parts: Iterable[LedgerPart]) -> float:
    return math.fsum(ledger.parts.get(part, 0.0) for part in parts)


def _of_steps(ledger: RequestLedger) -> str:
    """Where nothing else held it."""
    least, own = _floor(ledger), _seconds(ledger, _OWN)
    if not least:
        return "most of its time is steps of its own, whose floor is not known"
    where = "near" if least >= NEAR * own else "over"
    return f"most of its time is steps of its own, {where} their floor: {least / own:.1%} of them is the least"


def _next(ledger: RequestLedger, model: str | None) -> Iterator[str]:
    """The command that takes such steps apart, where they are most of its time beyond the floor."""
    own = _seconds(ledger, _OWN)
    if own - _floor(ledger) < HELD_SHARE * ledger.seconds:
        return
    requests = max(1, round(ledger.beside))
    lengths = f"--prompt {max(1, ledger.prompt_tokens)} --output {max(1, ledger.output_tokens)}"
    # A server's name for a folder is not where it is.
    given = model if model == BUILTIN or model in SHAPES else "MODEL"
    named = "" if given == model or model is None else f", MODEL being the folder that is served as {model!r}"
    yield (
        "a ledger does not tell what steps are made of: on that machine, without the server, "
        f"`strata explain T3-b{requests} --model {given} {lengths}` takes such steps apart{named}"
    )


def _evidence(ledger: RequestLedger) -> Iterator[str]:
    if ledger.first_token is not None:
        longest = max(ledger.first_parts, key=lambda part: ledger.first_parts[part])
        what = _SAID[longest][0] if longest in _SAID else "its own prompt"
        yield f"first token after {ledger.first_token:.3f} s, most of it: {what} ({ledger.first_parts[longest]:.3f} s)"
    yield (
        f"{ledger.prompt_tokens:,} prompt tokens, {ledger.cached_tokens:,} of them cached, in {ledger.prompt_steps:,} "
        f"step{'s' * (ledger.prompt_steps != 1)}; {counted(ledger.output_tokens, 'output token')}"
    )
    if ledger.decode_steps:
        each = _seconds(ledger, ("decode", "decode_beside", "masks", "host_gap"))
        yield (
            f"{ledger.decode_steps:,} decode steps of {1e3 * each / ledger.decode_steps:.1f} ms with "
            f"{ledger.beside:.1f} sequences on average"
        )
    if ledger.preemptions:
        yield f"preempted {counted(ledger.preemptions, 'time')}"
