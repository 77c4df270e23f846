"""The loads that both servers are put under, as options of `strata bench serve`."""

from __future__ import annotations

from dataclasses import dataclass

# Requests a second of each model, at which an H200 is partly to nearly busy, and the requests of each load.
RATES = {"0.6B": (55, 110, 150), "8B": (10, 20, 30), "30B-A3B": (10, 20, 30)}
REQUESTS = {"0.6B": 500, "8B": 250, "30B-A3B": 250}
IN_FLIGHT = 256
KINDS = ("single", "rates", "full", "shared", "lognormal", "cached")

_SHARED = ("--dataset", "shared-prefix", "--input-len", "128", "--prefix-len", "1024", "--prefix-groups", "8")
_LOGNORMAL = ("--dataset", "lognormal", "--input-len", "220", "--output-len", "190", "--longest", "2048")
_CACHED = ("--dataset", "shared-prefix", "--input-len", "16", "--prefix-len", "496", "--prefix-groups", "1")


@dataclass(frozen=True)
class Load:
    """kind: one of KINDS. name: as tables have it. options: of `strata bench serve`."""

    kind: str
    name: str
    options: tuple[str, ...]


def loads(model: str) -> list[Load]:
    """Of a model of RATES: prompts of 512 and answers of 128 tokens unless the name says another. No load has the seed
    of another, so that none finds its prompts in the prefix cache.
    """
    requests = ("--num-prompts", str(REQUESTS[model]))
    one = ("--num-prompts", "24", "--max-concurrency", "1")
    rates = [(f"{rate}/s", (*requests, "--request-rate", str(rate))) for rate in RATES[model]]
    full = (*requests, "--max-concurrency", str(IN_FLIGHT))
    middle = RATES[model][1]
    at_middle = (*requests, "--request-rate", str(middle))
    found = [
        Load("single", "one at a time", one),
        *(Load("rates", name, options) for name, options in rates),
        Load("full", f"{IN_FLIGHT} in flight", full),
        Load("shared", f"8 shared prefixes of 1,024, {middle}/s", (*at_middle, *_SHARED)),
        Load("shared", f"8 shared prefixes of 1,024, {IN_FLIGHT} in flight", (*full, *_SHARED)),
        Load("lognormal", f"lognormal lengths, {middle}/s", (*at_middle, *_LOGNORMAL)),
        Load("lognormal", f"lognormal lengths, {IN_FLIGHT} in flight", (*full, *_LOGNORMAL)),
        Load("cached", "496 of 512 cached, one at a time", (*one, *_CACHED)),
        *(Load("cached", f"496 of 512 cached, {name}", (*options, *_CACHED)) for name, options in rates),
        Load("cached", f"496 of 512 cached, {IN_FLIGHT} in flight", (*full, *_CACHED)),
    ]
    return [
        Load(load.kind, load.name, (*load.options, "--seed", str(seed))) for seed, load in enumerate(found, start=1)
    ]


WARM_UP = Load("warm-up", "warm-up", ("--num-prompts", "32", "--seed", "0"))
