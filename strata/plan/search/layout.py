"""How an engine divides a model over devices, and how many such engines some devices hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata.models.config import ModelConfig
from strata.parallel.serving_shard import rank_config


@dataclass(frozen=True)
class ServingLayout:
    """The ranks of one engine, by the options of `strata serve`.

    tensor: ranks that divide each matrix. stages: of a pipeline, each of as many ranks. context: ranks, each of as
    many, that divide the tokens of long prompts. expert_parallel: ranks have different experts of a mixture, whole.
    attention_dp: and sequences of their own (attention data parallelism).
    """

    tensor: int = 1
    stages: int = 1
    context: int = 1
    expert_parallel: bool = False
    attention_dp: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages * self.context

    @property
    def name(self) -> str:
        """Such as "TP4 x PP2"; experts that ranks have whole stand as EP, sequences of their own as DP attention."""
        parts = [f"{short}{size}" for short, size in self._sizes if size > 1]
        if self.expert_parallel:
            parts[0] = f"EP{self.tensor}" + (" with DP attention" if self.attention_dp else "")
        return " x ".join(parts) or "one device"

    @property
    def options(self) -> dict[str, int | bool]:
        """Of `EngineConfig`, without those that are as by default."""
        given: dict[str, int | bool] = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.stages,
            "prefill_context_parallel_size": self.context,
        }
        given = {name: size for name, size in given.items() if size > 1}
        if self.expert_parallel:
            given["enable_expert_parallel"] = True
        if self.attention_dp:
            given["enable_dp_attention"] = True
        return given

    @property
    def _sizes(self) -> tuple[tuple[str, int], ...]:
        return ("TP", self.tensor), ("PP", self.stages), ("CP", self.context)

    def replicas(self, devices: int, per_host: int) -> int:
        """How many such engines so many devices hold: one that fits into a host is not divided over two."""
        if self.ranks > per_host:
            return devices // (-(-self.ranks // per_host) * per_host)
        hosts, rest = divmod(devices, per_host)
        return hosts * (per_host // self.ranks) + rest // self.ranks


def layouts(config: ModelConfig, devices: int, per_host: int) -> Iterator[ServingLayout]:
    """All that so many devices have room for: powers of two of ranks along each axis, as the model can be divided.

    Matrices are divided within a host, whose link carries their sums; stages and experts also beyond.
    """
    sizes = [1 << power for power in range(devices.bit_length()) if 1 << power <= devices]
    for tensor in sizes:
        for by_experts, attention_dp in ((False, False), (True, False), (True, True)):
            if by_experts and (config.experts is None or tensor == 1):
                continue
            if tensor > per_host and not attention_dp:
                continue
            if not _divides(config, tensor, by_experts, attention_dp):
                continue
            yield ServingLayout(tensor, expert_parallel=by_experts, attention_dp=attention_dp)
            if attention_dp or config.recurrence is not None:  # whose states no stage or part of a prompt hands on
                continue
            for more in sizes[1:]:
                if tensor * more <= devices and more <= config.num_layers:
                    yield ServingLayout(tensor, stages=more, expert_parallel=by_experts)
                if tensor * more <= min(devices, per_host):
                    yield ServingLayout(tensor, context=more, expert_parallel=by_experts)


def _divides(config: ModelConfig, tensor: int, by_experts: bool, attention_dp: bool) -> bool:
    if tensor == 1:
        return True
    try:
        rank_config(config, tensor, 0, expert_parallel=by_experts, attention_dp=attention_dp)
    except ValueError:
        return False
    return True
