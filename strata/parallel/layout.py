"""How many ranks a run puts along each axis, checked against model and world before anything starts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import torch

from strata.comm.launch import World
from strata.comm.mesh import AXES, Mesh
from strata.comm.placement import Placement
from strata.models.config import ModelConfig
from strata.models.experts import SparseCausalLM
from strata.models.families import FAMILIES, build
from strata.parallel.context import Method, check_heads
from strata.parallel.families import placements, sharding_table
from strata.parallel.schedules import make_schedule

_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes (see `strata.comm.mesh`) and how they are used.

    pp: pipeline stages. dp: replicas of everything. shard: ranks of a replica that each take other documents and divide
    among them what `zero` says. cp: ranks that divide each sequence. tp: ranks that divide each matrix. ep: ranks of
    shard * cp that divide the experts.

    zero: 0 divides nothing, 1 optimizer state, 2 also gradients, 3 also weights (ZeRO, Rajbhandari et al. 2020; 3 is
    FSDP). What is divided, is divided over shard * cp; a rank of "dp" repeats it (hybrid sharding).

    sequence_parallel: what lies between the matrices is divided by tokens over tp (Korthikanti et al. 2022). overlap:
    the messages of tp then travel while products are computed.
    context: how attention crosses the ranks of cp (see `strata.parallel.context.divide_batch`).
    schedule: of the pipeline, one of `strata.parallel.schedules.SCHEDULES`. micro_batches: into how many a replica
    splits its step.
    message_dtype: "auto" sums gradients over dp, shard and cp in float32; "fp8" sends them in e4m3 with a power of two
    for each 128 values (`strata.parallel.quantized_sums`).
    """

    pp: int = 1
    dp: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False
    overlap: bool = False
    context: Method = "ring"
    schedule: str = "1f1b"
    micro_batches: int = 1
    message_dtype: str = "auto"

    @property
    def ranks(self) -> int:
        return math.prod(getattr(self, name) for name in AXES)

    @property
    def divides_documents_only(self) -> bool:
        """Whether every rank computes with all weights: then a step runs the merged and fused graph."""
        return self.pp == self.cp == self.tp == self.ep == 1 and self.zero <= 2

    def mesh(self, world: World) -> Mesh:
        """The mesh of these sizes over all ranks of the world, which make it together."""
        return Mesh.of(world, {name: getattr(self, name) for name in (*AXES, "ep")}, fsdp=self.zero == 3)

    def check(self, config: ModelConfig, world_size: int) -> None:
        """Raise ValueError, saying what to change, if the world or the model does not fit."""
        for name in (*AXES, "ep", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.ranks != world_size:
            shown = " * ".join(f"{name} {getattr(self, name)}" for name in AXES)
            about_ep = f"; ep = {self.ep} takes none of its own, it divides shard * cp" if self.ep > 1 else ""
            raise ValueError(
                f"{shown} = {self.ranks} ranks, but {world_size} run; change one of them or the ranks{about_ep}"
            )
        self._check_use()
        self._check_recurrence(config)
        if config.latent is not None:
            self._check_latents(config)
        self._check_tensor(config)
        check_heads(config, self.cp, self.tp, self.context)
        self._check_pipeline(config)
        self._check_experts(config)

    def _check_use(self) -> None:
        """An axis or a switch that would do nothing, or something else than its name says."""
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero = {self.zero} is unknown; accepted are 0, 1, 2 and 3 (FSDP)")
        if self.zero == 0 and self.shard > 1:
            raise ValueError(f"zero = 0 divides nothing among shard = {self.shard} ranks; use dp, or zero = 1, 2 or 3")
        if self.zero > 0 and self.shard * self.cp == 1:
            raise ValueError(f"zero = {self.zero} has one rank to divide among; set shard above 1, or zero = 0")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel divides tokens over tp, and tp = 1; set tp above 1, or leave it out")
        if self.message_dtype not in ("auto", "fp8"):
            raise ValueError(f"message_dtype = {self.message_dtype!r} is unknown; accepted are 'auto' and 'fp8'")
        if self.message_dtype != "auto" and self.dp * self.shard * self.cp == 1:
            raise ValueError(
                f"message_dtype = {self.message_dtype!r} is for gradients that ranks sum, and dp, shard and cp are 1; "
                "set one above 1, or leave it out"
            )
        if self.overlap and not self.sequence_parallel:
            raise ValueError("overlap hides the messages of sequence_parallel; set that too, or leave overlap out")

    def _check_recurrence(self, config: ModelConfig) -> None:
        for name in ("tp", "cp", "pp"):
            if config.recurrence is not None and getattr(self, name) > 1:
                raise ValueError(
                    f"{name} = {getattr(self, name)} would divide the recurrent layers of {config.architecture}, which "
                    f"ranks do not do yet; set {name} = 1"
                )

    def _check_latents(self, config: ModelConfig) -> None:
        for name in ("tp", "cp"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"{name} = {getattr(self, name)} would divide the latent attention of {config.architecture} among "
                    f"ranks, which training does not do yet; set {name} = 1, and use zero, ep or pp"
                )
        if self.pp > 1 and self.schedule.startswith("zero-bubble"):
            raise ValueError(
                f"schedule {self.schedule!r} splits backward passes, in which {config.architecture} uses a weight "
                "twice, for keys and for values; use schedule '1f1b' or 'interleaved'"
            )

    def _check_tensor(self, config: ModelConfig) -> None:
        for what, size in (("num_attention_heads", config.num_heads), ("num_key_value_heads", config.num_kv_heads)):
            if size % self.tp:
                accepted = _common_divisors(config.num_heads, config.num_kv_heads)
                raise ValueError(f"tp = {self.tp} does not divide {what} = {size}; for this model tp may be {accepted}")
        for what, size in (("vocab_size", config.vocab_size), ("intermediate_size", config.intermediate_size)):
            if size < self.tp:
                raise ValueError(f"tp = {self.tp} exceeds {what} = {size}; choose a smaller tp")

    def _check_pipeline(self, config: ModelConfig) -> None:
        stages = make_schedule(self.schedule, self.pp, self.micro_batches).stages
        if stages > config.num_layers:
            raise ValueError(
                f"pp = {self.pp} with schedule {self.schedule!r} has {stages} stages, more than the model's "
                f"{config.num_layers} layers; choose a smaller pp or schedule '1f1b'"
            )
        if self.pp > 1 and self.zero == 3 and self.schedule.startswith("zero-bubble"):
            raise ValueError(
                f"schedule {self.schedule!r} splits backward passes, and zero = 3 reduces gradients when a pass has "
                f"left a layer; use schedule '1f1b' or 'interleaved', or zero of at most 2"
            )
        if self.pp > 1 and self.zero == 3 and config.tied:
            raise ValueError(
                "zero = 3 does not go with a tied embedding that the first and the last stage share; "
                "use zero of at most 2, or an untied model"
            )

    def _check_experts(self, config: ModelConfig) -> None:
        experts = config.num_experts
        if self.ep > 1 and not experts:
            raise ValueError(f"ep = {self.ep}, and {config.architecture} has no experts; leave ep out")
        if self.ep > 1 and config.experts is not None and config.experts.clamp is not None:
            raise ValueError(
                f"ep = {self.ep} is not there for experts with biases, as {config.architecture} has; leave ep out"
            )
        if self.ep > 1 and not _has_divided_experts(config):
            raise ValueError(
                f"ep = {self.ep}: ranks do not divide the experts of {config.architecture} yet; leave ep out"
            )
        if experts % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide the {experts} experts; choose ep among their divisors")
        if self.shard * self.cp % self.ep:
            held = self.shard * self.cp
            raise ValueError(f"ep = {self.ep} does not divide shard * cp = {held}; choose ep among its divisors")


def auto_layout(config: ModelConfig, world_size: int, memory: int) -> tuple[Layout, str]:
    """A layout for training with AdamW in bfloat16, and in one line why it was chosen.

    memory: bytes of one device. Documents are divided, never matrices: within a machine that is the fastest as long as
    it fits. Of the ways to do so it is the one that divides least and leaves two thirds of the memory to activations,
    or else the one that divides most if it leaves a third. Raises ValueError if neither exists.
    """
    if world_size == 1:
        return Layout(), "one rank: nothing to divide"
    dense, experts = _parameters(config)
    tried = [(layout, _state_bytes(layout, dense, experts)) for layout in _candidates(config, world_size)]
    for layout, needed in tried:
        if needed <= memory / 3:
            return layout, _reason(layout, "least", needed, "a third", memory)
    layout, needed = tried[-1]
    if needed <= memory * 2 / 3:
        return layout, _reason(layout, "most", needed, "two thirds", memory)
    raise ValueError(
        f"the weights, gradients and optimizer state take {needed / 2**30:.1f} GiB a device even when all "
        f"{world_size} ranks divide them, more than two thirds of {memory / 2**30:.0f} GiB; use more ranks"
    )


def _reason(layout: Layout, how: str, needed: float, share: str, memory: int) -> str:
    axes = {name: getattr(layout, name) for name in ("dp", "shard", "ep")}
    shown = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    return (
        f"ZeRO-{layout.zero} with {shown}: the {how} divided layout whose weights, gradients and optimizer state "
        f"({needed / 2**30:.1f} GiB a device) fill at most {share} of {memory / 2**30:.0f} GiB"
    )


_NODE = 8  # GPUs that reach each other by NVLink in a common machine


def _candidates(config: ModelConfig, world_size: int) -> list[Layout]:
    """From the least divided on. Ranks of one machine divide, machines repeat, unless only all together suffice."""
    near = _NODE if world_size % _NODE == 0 else world_size
    found = []
    whole = not _has_divided_experts(config) or (config.experts is not None and config.experts.clamp is not None)
    for zero, shard in ((1, near), (2, near), (3, near), (3, world_size)):
        ep = 1 if whole else math.gcd(shard, config.num_experts)
        found.append(Layout(dp=world_size // shard, shard=shard, ep=ep, zero=zero))  # type: ignore[arg-type]
    return found


def _has_divided_experts(config: ModelConfig) -> bool:
    """Whether the model has experts that training divides: not those whose checkpoints hold all in one tensor."""
    return config.experts is not None and issubclass(FAMILIES[config.architecture], SparseCausalLM)


def _state_bytes(layout: Layout, dense: int, experts: int) -> float:
    """Of one device. Weights are bfloat16 (2 bytes), gradients, masters and two moments float32 (4 bytes each)."""
    held = dense + experts / layout.ep
    divided = (dense + experts) / layout.shard
    if layout.zero == 1:
        return 6 * held + 12 * divided
    return 2 * held + 16 * divided if layout.zero == 2 else 16 * divided


def _parameters(config: ModelConfig) -> tuple[int, int]:
    """How many the model has outside its experts, and in them."""
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in build(config).named_parameters()}
    placed = placements(sizes, sharding_table(config.architecture))
    experts = sum(size for name, size in sizes.items() if placed[name] is Placement.EXPERT)
    return sum(sizes.values()) - experts, experts


def _common_divisors(first: int, second: int) -> str:
    most = math.gcd(first, second)
    return ", ".join(str(divisor) for divisor in range(1, most + 1) if most % divisor == 0)


def read_layout(text: str) -> Layout:
    """A `Layout` from "shard=8,zero=2". Raises ValueError for an unknown field or a value of another type."""
    kinds = get_type_hints(Layout)
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in kinds:
            known = ", ".join(field.name for field in dataclasses.fields(Layout))
            raise ValueError(f"--layout {text}: {name!r} is unknown; known are {known}")
        values[name] = _read(text, name, value, kinds[name])
    return Layout(**values)


def _read(text: str, name: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value not in _FLAGS:
            raise ValueError(f"--layout {text}: {name} = {value!r} must be true or false")
        return _FLAGS[value]
    if kind is str or name == "context":
        return value
    if not value.isdecimal():
        raise ValueError(f"--layout {text}: {name} = {value!r} must be a whole number")
    return int(value)
