"""One way to serve a model, what it is predicted to give, and the command that starts it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from strata.engine.scheduling.prompt_budget import SERVER_TPOT_MS
from strata.models.config import ModelConfig
from strata.plan.search.batching import LoadPoint
from strata.plan.search.layout import ServingLayout
from strata.plan.search.memory import RankMemory
from strata.plan.search.precision import Precision
from strata.plan.search.traffic import Traffic
from strata.train.predict.flops import active_elements


@dataclass(frozen=True)
class Settings:
    """Of one engine. sequences: most that run at once, of a rank where ranks have their own (max_num_seqs). budget:
    most tokens of a step. target: milliseconds that a step is to take at most beside decodes; 0: none.
    """

    layout: ServingLayout
    precision: Precision
    sequences: int
    budget: int
    target: float


@dataclass(frozen=True)
class ServingChoice:
    """Settings on some devices. replicas: engines. point: of each of them. held: of each of its devices. output: mean
    tokens of an answer. blocked: what Strata lacks to run it; empty if it runs. analytic: share of the mean step's time
    that is neither measured nor between measurements. binds: what keeps an engine from more sequences.
    """

    settings: Settings
    replicas: int
    point: LoadPoint
    held: RankMemory
    output: float
    blocked: tuple[str, ...]
    analytic: float
    binds: str = ""

    @property
    def devices(self) -> int:
        """That work."""
        return self.replicas * self.settings.layout.ranks

    @property
    def requests(self) -> float:
        """A second, of all replicas."""
        return self.replicas * self.point.requests

    @property
    def tokens(self) -> float:
        """Of answers, a second."""
        return self.requests * self.output

    @property
    def tokens_per_device(self) -> float:
        return self.tokens / self.devices

    @property
    def tpot_ms(self) -> float | None:
        """None of answers of one token, behind which there is none."""
        return self.point.tpot * 1e3 if self.output > 1 else None

    @property
    def tokens_per_user(self) -> float | None:
        """A second, once the first has come; None of answers of one token."""
        return 1 / self.point.tpot if self.point.tpot else None

    def to_dict(self) -> dict[str, Any]:
        settings, point, held = self.settings, self.point, self.held
        return {
            "layout": settings.layout.name,
            "options": settings.layout.options,
            "precision": settings.precision.name,
            "replicas": self.replicas,
            "devices": self.devices,
            "max_num_seqs": settings.sequences,
            "max_num_batched_tokens": settings.budget,
            "tpot_target_ms": settings.target,
            "concurrency": point.concurrency * self.replicas,
            "ttft_ms": point.ttft * 1e3,
            "tpot_ms": self.tpot_ms,
            "requests_per_second": self.requests,
            "tokens_per_second": self.tokens,
            "tokens_per_second_per_device": self.tokens_per_device,
            "tokens_per_second_per_user": self.tokens_per_user,
            "memory_bytes": {
                "total": held.total,
                "weights": held.weights,
                "workspace": held.workspace,
                "states": held.states,
                "kv": held.kv,
                "margin": held.margin,
                "kv_tokens": held.tokens,
            },
            "analytic_share": self.analytic,
            "binds": self.binds,
            "not_in_strata_yet": list(self.blocked),
        }


def command(choice: ServingChoice, model: str, length: int, per_host: int) -> list[str]:
    """The words of the `strata serve` that starts the engines of one host.

    model: a folder, or what stands for one. length: tokens of the longest request.
    """
    settings = choice.settings
    words = ["strata", "serve", model]
    for name, value in settings.layout.options.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    here = min(choice.replicas, per_host // settings.layout.ranks)
    if here > 1:
        words += ["--data-parallel-size", str(here)]
    words += [*settings.precision.words, "--max-model-len", str(length)]
    words += ["--max-num-seqs", str(settings.sequences)]
    words += ["--max-num-batched-tokens", str(settings.budget)]
    if settings.target != SERVER_TPOT_MS:
        words += ["--tpot-target-ms", f"{settings.target:g}"]
    return words


def request_flops(config: ModelConfig, traffic: Traffic) -> float:
    """FLOPs of a mean request, a multiply-add as two: every matrix that a token meets, the head for tokens of the
    answer, and scores and values of the keys that each query sees in the layers that attend."""
    windows = Counter(window for window, attends in zip(config.windows, config.attends, strict=True) if attends)
    pairs = sum(layers * _seen(traffic, math.inf if window is None else window) for window, layers in windows.items())
    attention = 2 * config.num_heads * (config.head_dim + config.value_dim) * pairs
    head = 2 * config.vocab_size * config.hidden_size * traffic.output
    return layer_product_flops(config, traffic) + head + attention


def layer_product_flops(config: ModelConfig, traffic: Traffic) -> float:
    """Of the matrices of layers alone."""
    matrices = sum(active_elements(config, layer) for layer in range(config.num_layers))
    return 2 * matrices * (traffic.computed + traffic.output - 1)


def _seen(traffic: Traffic, window: float) -> float:
    """Queries of a mean request and the keys that they see, of the `window` latest each."""
    first, last = min(traffic.cached, window), min(traffic.prompt, window)
    beyond = traffic.prompt - max(traffic.cached, last)  # queries behind which there are more keys than those
    prompt = (last**2 - first**2) / 2 + (beyond * window if beyond else 0.0)
    return prompt + (traffic.output - 1) * min(traffic.context, window)
