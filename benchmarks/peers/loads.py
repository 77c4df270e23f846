"""The loads that both servers are put under, as options of `strata bench serve`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from strata.bench.workloads import MAX_MODEL_LEN

# Requests a second of each model, at which an H200 is partly to nearly busy, and the requests of each load.
RATES = {"0.6B": (55, 110, 150), "8B": (10, 20, 30), "30B-A3B": (10, 20, 30)}
REQUESTS = {"0.6B": 500, "8B": 250, "30B-A3B": 250}
IN_FLIGHT = 256
KINDS = ("single", "rates", "full", "shared", "lognormal", "cached")
# Of 8B alone, and only if asked for by name; for all but `many` a server of its own takes longer sequences.
LONG_KINDS = {"many": MAX_MODEL_LEN, "long": 20_480, "longest": 66_048, "agents": 32_768}
LONG_MODEL = "8B"

_SHARED = ("--dataset", "shared-prefix", "--input-len", "128", "--prefix-len", "1024", "--prefix-groups", "8")
_LOGNORMAL = ("--dataset", "lognormal", "--input-len", "220", "--output-len", "190", "--longest", "2048")
_CACHED = ("--dataset", "shared-prefix", "--input-len", "16", "--prefix-len", "496", "--prefix-groups", "1")


@dataclass(frozen=True)
class Load:
    """kind: one of KINDS or LONG_KINDS. name: as tables have it. options: of `strata bench serve`."""

    kind: str
    name: str
    options: tuple[str, ...]

    @property
    def max_model_len(self) -> int:
        """Of the server that it needs."""
        return LONG_KINDS.get(self.kind, MAX_MODEL_LEN)


def loads(model: str) -> list[Load]:
    """Of a model of RATES: prompts of 512 and answers of 128 tokens unless the name says another. No load has the seed
    of another on the same server, so that none finds its prompts in the prefix cache.
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
    if model == LONG_MODEL:
        found += _long()
    seeds: Counter[int] = Counter()
    seeded = []
    for load in found:
        seeds[load.max_model_len] += 1
        seeded.append(Load(load.kind, load.name, (*load.options, "--seed", str(seeds[load.max_model_len]))))
    return seeded


def _long() -> list[Load]:
    def lengths(prompt: int, output: int, *others: str) -> tuple[str, ...]:
        return ("--input-len", str(prompt), "--output-len", str(output), *others)

    def in_flight(count: int, requests: int) -> tuple[str, ...]:
        return ("--num-prompts", str(requests), "--max-concurrency", str(count))

    def at_rate(rate: str, requests: int) -> tuple[str, ...]:
        return ("--num-prompts", str(requests), "--request-rate", rate)

    prefixes = ("--dataset", "shared-prefix", "--prefix-len", "6000", "--prefix-groups", "8")
    return [
        Load("many", "prompts of 256, answers of 256, 1,024 in flight", lengths(256, 256, *in_flight(1024, 2048))),
        Load("long", "prompts of 1,024, answers of 1,024, 64 in flight", lengths(1024, 1024, *in_flight(64, 128))),
        Load("long", "prompts of 8,192, answers of 512, 16 in flight", lengths(8192, 512, *in_flight(16, 48))),
        Load("long", "prompts of 16,000, answers of 128, 1.5/s", lengths(16_000, 128, *at_rate("1.5", 24))),
        Load("long", "prompts of 256, answers of 1,024, 384 in flight", lengths(256, 1024, *in_flight(384, 384))),
        Load(
            "long",
            "8 shared prefixes of 6,000, answers of 256, 12/s",
            lengths(512, 256, *prefixes, *at_rate("12", 160)),
        ),
        # Of three in flight there is always a prompt to compute, so that they saturate a server.
        Load(
            "longest",
            "prompts of 65,536, answers of 128, half of saturation",
            lengths(65_536, 128, *at_rate("50%", 12), "--max-concurrency", "3"),
        ),
        Load("agents", "64 sessions of 20 turns, contexts to 32,768", ("--dataset", "agents")),
    ]


WARM_UP = Load("warm-up", "warm-up", ("--num-prompts", "32", "--seed", "0"))
