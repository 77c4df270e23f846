"""A plan of serving: what was asked, the best way, the others, and where the prediction comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from strata.cost.step_model import dtype_name
from strata.engine.ledger import GIB
from strata.hardware.figures import Device
from strata.hardware.prediction import ORIGINS
from strata.kernels.quant.quantized import multiplied_in
from strata.models.shapes import SHAPES
from strata.models.weights import resolve_dtype
from strata.plan.meta_model import find_config
from strata.plan.search.batching import LoadPoint
from strata.plan.search.choice import ServingChoice, command, layer_product_flops, request_flops
from strata.plan.search.layer_prices import StepPrice
from strata.plan.search.machine import Machine
from strata.plan.search.precision import AS_CHECKPOINT, Precision, stored_scheme
from strata.plan.search.search import Question, Search, SearchResult
from strata.plan.search.traffic import Objectives, Traffic
from strata.text.counted import counted

_CUDA = torch.device("cuda")
_SHOWN = 8


@dataclass(frozen=True)
class ServingPlan:
    """found: by the search. decode, mixed: steps of the best, of its decodes and with prompts beside them. price: of a
    device an hour, None if it is not known. model_file: what the model was found as. at_rate: of the best's engines at
    the rate of a trace; None without one, and if it is more than they serve.
    """

    question: Question
    found: SearchResult
    decode: StepPrice
    mixed: StepPrice
    price: float | None
    model_file: str
    at_rate: LoadPoint | None

    @property
    def best(self) -> ServingChoice:
        return self.found.best

    @property
    def others(self) -> tuple[ServingChoice, ...]:
        return self.found.others[:_SHOWN]

    @property
    def blocked(self) -> tuple[ServingChoice, ...]:
        return self.found.blocked[:_SHOWN]

    @property
    def quantized(self) -> tuple[ServingChoice, ...]:
        return self.found.packed

    @property
    def refused(self) -> list[str]:
        """Precisions in fewer bits that the engine has not, and why."""
        return [f"{' '.join(precision.words)}: {why}" for precision, why in self.found.refused]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.question.machine.sources

    @property
    def title(self) -> str:
        asked = self.question
        lengths = f"prompts of {asked.traffic.prompt:,.0f} and answers of {counted(asked.traffic.output, 'token')}"
        return f"{asked.model} on {asked.devices} x {asked.machine.listed.product}, {lengths}"

    @property
    def command(self) -> list[str] | None:
        """Of the best: what starts the engines of one host; None if Strata cannot run it yet."""
        if self.best.blocked:
            return None
        model = self.placeholder or self.question.model
        return command(self.best, model, self.question.traffic.longest, self.question.machine.per_host)

    @property
    def placeholder(self) -> str | None:
        """What stands for the model's folder in the command, where sizes alone were given; None if it was given."""
        file = Path(self.model_file)
        if self.model_file in SHAPES:
            return f"path/to/{self.model_file}"
        if not file.is_file():
            return None
        return f"path/to/{file.absolute().parent.name if file.name == 'config.json' else file.stem}"

    @property
    def remark(self) -> str:
        """What is to be put in place of words of the command; empty if nothing."""
        return "" if self.placeholder is None else f"{self.placeholder}: the folder with the model's weights"

    @property
    def where(self) -> str:
        """On which hosts the command is to be run."""
        each = min(self.best.replicas, self.question.machine.per_host // self.best.settings.layout.ranks)
        hosts, rest = divmod(self.best.replicas, each)
        if hosts == 1 and not rest:
            return "run:"
        where = "one host" if hosts == 1 else f"each of {hosts} hosts"
        fewer = f" (on another with --data-parallel-size {rest})" if rest else ""
        return f"run on {where}{fewer}, behind a load balancer:"

    @property
    def mfu(self) -> float:
        """FLOPs of the requests' own matrices and attention over the maker's dense peak of all devices that work, of
        layers' products in the dtype that they multiply."""
        asked = self.question
        layers = layer_product_flops(asked.config, asked.traffic)
        peak = self._peak(dtype_name(asked.dtype))
        seconds = (request_flops(asked.config, asked.traffic) - layers) / peak + layers / self._peak(self._multiplied)
        return self.best.requests * seconds / self.best.devices

    def _peak(self, dtype: str) -> float:
        return self.question.machine.listed.ceiling("compute", dtype, measured=False).value

    @property
    def _multiplied(self) -> str:
        """In which dtype layers' products are, where the device has a peak of it."""
        asked = self.question
        rounded = None if asked.precision.scheme is None else multiplied_in(asked.precision.scheme)
        known = asked.machine.listed.known("compute", rounded, measured=False) if rounded else None
        return dtype_name(asked.dtype) if known is None or rounded is None else rounded

    @property
    def cost_per_million(self) -> float | None:
        """Of a million tokens of answers, their prompts included, on all devices, idle ones too."""
        if self.price is None:
            return None
        return self.price * self.question.devices / 3600 / self.best.tokens * 1e6

    @property
    def origins(self) -> dict[str, float]:
        """Which share of the mean step's time is measured, interpolated and analytic."""
        share = self.best.point.prompt_steps
        seconds = {
            origin: (1 - share) * self.decode.origins[origin] + share * self.mixed.origins[origin] for origin in ORIGINS
        }
        return {origin: value / sum(seconds.values()) for origin, value in seconds.items()}

    def lines(self) -> list[tuple[str, str]]:
        """What is told of the best, a name and a sentence each."""
        best = self.best
        point, held, bounds = best.point, best.held, self.decode.bounds
        idle = self.question.devices - best.devices
        parts = ("weights", "kv", "workspace", "states", "margin")
        decodes = f"bound by {bounds.bound}, whose floor is {bounds.seconds / self.decode.seconds:.0%} of one"
        gib = {name: f"{getattr(held, name) / GIB:,.2f}" for name in parts}
        multiplied = self._multiplied
        products = "" if multiplied == dtype_name(self.question.dtype) else f", of products in {multiplied}"
        found = [
            (
                "load",
                f"{counted(point.concurrency * best.replicas, 'request')} under way at all times, a next as each ends: "
                f"{best.requests:,.2f} a second",
            ),
            (
                "steps",
                f"{point.step * 1e3:,.2f} ms; {point.prompt_steps:.0%} have {counted(point.chunk, 'token')} of prompts",
            ),
            ("binds", best.binds),
            *((("decode steps", decodes),) if best.output > 1 else ()),
            ("MFU", f"{self.mfu:.1%} of the maker's dense peak{products}"),
            (
                "memory, GiB",
                f"{held.total / GIB:,.1f} a device: weights {gib['weights']}, workspace {gib['workspace']}"
                + (f", states {gib['states']} of {counted(held.sequences, 'sequence')}" if held.states else ""),
            ),
            (
                "",
                f"keys and values{' and snapshots' * bool(held.states)} {gib['kv']} ({counted(held.tokens, 'token')}), "
                f"others and gaps between blocks {gib['margin']}",
            ),
        ]
        if (rate := self.question.traffic.rate) is not None:
            told = f"{rate:,.2f} requests a second, more than these devices serve"
            if (light := self.at_rate) is not None:
                ttft = f"{light.ttft * 1e3:,.1f} ms"
                tpot = f", TPOT {light.tpot * 1e3:,.2f} ms" if best.output > 1 else ""
                wait = f" ({light.waiting * 1e3:,.1f} ms of it for a place)" if light.waiting >= 5e-5 else ""
                told = f"{rate:,.2f} requests a second, {rate / best.requests:.0%} of the most: TTFT {ttft}{wait}{tpot}"
            found.append(("the trace", told))
        if idle:
            found.append(("idle", f"{idle} of {counted(self.question.devices, 'device')}"))
        if self.cost_per_million is not None:
            found.append(("cost", f"{self.cost_per_million:,.3f} for a million tokens of answers"))
        shares = ", ".join(f"{share:.0%} {origin}" for origin, share in self.origins.items() if share >= 0.005)
        found.append(("predicted", shares))
        return found

    def to_dict(self) -> dict[str, Any]:
        asked, best = self.question, self.best
        objectives = asked.objectives
        return {
            "model": asked.model,
            "device": asked.machine.listed.key,
            "dtype": dtype_name(asked.dtype),
            **asked.precision.options,
            "devices": asked.devices,
            "prompt_tokens": asked.traffic.prompt,
            "cached_tokens": asked.traffic.cached,
            "output_tokens": asked.traffic.output,
            "ttft_ms": None if objectives.ttft is None else objectives.ttft * 1e3,
            "tpot_ms": None if objectives.tpot is None else objectives.tpot * 1e3,
            "best": best.to_dict(),
            "command": self.command,
            "mfu": self.mfu,
            "cost_per_million_tokens": self.cost_per_million,
            "predicted_from": self.origins,
            "others": [one.to_dict() for one in self.found.others],
            "in_fewer_bits": [one.to_dict() for one in self.quantized],
            "refused": self.refused,
            "not_in_strata_yet": [one.to_dict() for one in self.found.blocked],
            "trace_requests_per_second": asked.traffic.rate,
            "trace_ttft_ms": None if self.at_rate is None else self.at_rate.ttft * 1e3,
            "trace_waiting_ms": None if self.at_rate is None else self.at_rate.waiting * 1e3,
            "trace_tpot_ms": None if self.at_rate is None or best.output <= 1 else self.at_rate.tpot * 1e3,
            "sources": list(self.sources),
        }


def serving_plan(
    model: str,
    model_file: str,
    listed: Device,
    devices: int,
    traffic: Traffic,
    objectives: Objectives,
    per_host: int,
    network: float,
    price: float | None,
    precision: Precision = AS_CHECKPOINT,
) -> ServingPlan:
    """Search, and price the steps of the best.

    model: as it was named, model_file: where it was found. network: bytes/s. precision: of the best. Raises
    ValueError for whatever cannot be: a device without figures, requests that are longer than the model's, no room,
    objectives that nothing meets.
    """
    config = find_config(model_file)
    if traffic.longest > config.longest and not config.rope.grows:
        raise ValueError(
            f"prompt and answer have up to {traffic.longest:,} tokens, and {model} is made for {config.longest:,}: "
            "give shorter ones"
        )
    if Path(model_file).is_dir() and precision.quantization is None:
        precision = replace(precision, stored=stored_scheme(config, Path(model_file)))
    dtype = resolve_dtype("auto", config, _CUDA)
    machine = Machine.of(listed, dtype_name(dtype), per_host, network)
    question = Question(model, config, dtype, machine, devices, traffic, objectives, precision)
    search = Search(question)
    found = search.run()
    best, layout = found.best, found.best.settings.layout
    own = best.point.decoding / layout.stages / (layout.tensor if layout.attention_dp else 1)
    table, decodes = search.table(layout, best.settings.precision), max(1, round(own))
    decode, mixed = table.price(decodes, 0), table.price(decodes, max(2, round(best.point.chunk)))
    at_rate = None if traffic.rate is None else search.at_rate(best, traffic.rate)
    return ServingPlan(question, found, decode, mixed, price, model_file, at_rate)
