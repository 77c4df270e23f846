"""What one rank of several serves: its own config, and where its slices lie in a checkpoint's tensors.

A rank's model is an ordinary model of a smaller config: of fewer heads and narrower matrices, and with expert
parallelism of fewer experts, each of them whole; where each rank has tokens of its own, of fewer experts and nothing
else. Where stages of a pipeline share the layers, it has those of its stage, under their names in the whole model. The
table of its family (`strata.parallel.families`) says how each parameter is divided; `strata.graph.ranks.shard` puts the
messages between the ranks into its graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from strata.comm.experts.sent_rows import exchange_tokens
from strata.comm.mesh import Axis
from strata.comm.operations import Along
from strata.comm.placement import ExpertSlots, Placement
from strata.kernels.state.dcp_shard import ALL_KEYS, DcpShard
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.shard import Boxes, keep_layers
from strata.parallel.families import placements, sharding_table, span
from strata.parallel.stacked_rows import divided as divided_recurrence
from strata.parallel.stacked_rows import fault, local_ranges, shares_groups, stacks
from strata.parallel.stages import Span, layer_spans

TENSOR_AXIS = "tp"
PIPELINE_AXIS = "pp"
KEYS_AXIS = "dcp"

# Of an expert's own matrices [outputs, inputs], by the parameter in which all experts are stacked: what is divided.
_EXPERT_DIMS = {"gate_up_proj": 0, "gate_up_proj_bias": 0, "down_proj": 1}
_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")


@dataclass(frozen=True)
class RankShard:
    """The share of one rank in a model whose matrices `size` ranks divide.

    whole: the config of the model. config: the rank's own, from which its KV pool and its attention follow. divided: of
    all layers, with matrices as narrow as the rank's. stage: which of `stages` it is in. layers: the first of its
    stage, and the end.
    slots: where its experts are among all, with expert parallelism; None: it has a part of every expert.
    attention_dp: each rank has tokens of its own, and all parameters but experts whole (attention data parallelism).
    kept: which tokens' keys and values the rank keeps, where neighbours divide those that they would have alike.
    placements: of every parameter, by name. axes: what its collectives run along, by name; an `Along` where graphs are
    only costed. A `strata.models.shard.ModelShard`.
    """

    whole: ModelConfig
    config: ModelConfig
    divided: ModelConfig
    size: int
    index: int
    stages: int
    stage: int
    layers: Span
    slots: ExpertSlots | None
    attention_dp: bool
    placements: Mapping[str, Placement]
    axes: Mapping[str, Axis | Along]
    kept: DcpShard = ALL_KEYS

    @staticmethod
    def of(
        whole: ModelConfig,
        size: int,
        index: int,
        axis: Axis | None = None,
        *,
        expert_parallel: bool = False,
        redundant: int | None = None,
        attention_dp: bool = False,
        stages: int = 1,
        stage: int = 0,
        key_ranks: int = 1,
    ) -> RankShard:
        """Of rank `index` of `size`, whose live axis is `axis`. expert_parallel: ranks have different experts.
        redundant: how many slots for experts they have more than there are experts, for copies, each rank as many as
        the others; None: ranks need not have equally many experts. attention_dp: see `RankShard`.
        stages: how many share the layers, each of `size` ranks, so that the one with the most weights has as few as
        possible; `stage`: which of them this rank is in. key_ranks: how many neighbours divide keys and values by
        sequence, which they would have alike.

        Raises ValueError if they cannot share the model.
        """
        options = {"expert_parallel": expert_parallel, "attention_dp": attention_dp}
        divided = rank_config(whole, size, index, redundant=redundant, **options)
        with torch.device("meta"):
            model = build(divided)
        placed = placements([name for name, _ in model.named_parameters()], sharding_table(whole.architecture))
        if attention_dp:
            placed = {name: one if one is Placement.EXPERT else Placement.PER_TOKEN for name, one in placed.items()}
        elif not shares_groups(whole.recurrence, size):
            column, divided_norm = Placement.COLUMN, Placement.DIVIDED_NORM
            placed = {name: column if one is divided_norm else one for name, one in placed.items()}
        if not 1 <= stages <= whole.num_layers:
            raise ValueError(
                f"pipeline_parallel_size={stages}: each stage needs a layer, and this model has {whole.num_layers}; "
                f"choose 1 to {whole.num_layers}"
            )
        layers = layer_spans(model, stages, 0)[stage]
        config = divided if stages == 1 else divided.with_layers(range(*layers))
        slots = None
        if config.experts is not None and config.experts.local is not None:
            total = config.experts.count + (redundant or 0)
            slots = ExpertSlots(span(total, size, index)[0], total)
        _require_alike(whole, size, key_ranks, expert_parallel)
        axes = {TENSOR_AXIS: axis or Along(TENSOR_AXIS, size), PIPELINE_AXIS: Along(PIPELINE_AXIS, stages)}
        if key_ranks > 1:
            axes[KEYS_AXIS] = Along(KEYS_AXIS, key_ranks)
        kept = DcpShard(key_ranks, index % key_ranks)
        return RankShard(
            whole, config, divided, size, index, stages, stage, layers, slots, attention_dp, placed, axes, kept
        )

    @property
    def max_sharded(self) -> ModelConfig:
        """`divided` of the rank that has the most experts, by which all ranks choose alike."""
        experts = self.divided.experts
        if experts is None or self.slots is None:
            return self.divided
        return replace(self.divided, experts=replace(experts, local=(*range(-(-self.slots.total // self.size)),)))

    def exchange_tokens(self, dtype: torch.dtype) -> int | None:
        """From how many tokens of a rank on, in `dtype`, rows go to the ranks of their experts alone: see
        `strata.comm.experts.sent_rows`. None: all go to all, or ranks have no tokens of their own."""
        experts = self.whole.experts
        if not self.attention_dp or self.slots is None or experts is None:
            return None
        given = self.whole.hidden_size, dtype, self.size, self.slots.total, experts.per_token
        return exchange_tokens(*given)

    def build(self, max_length: int | None = None) -> CausalLM:
        """The rank's model on the current default device; of several stages, what has the parameters of this one."""
        return self.shard_of(build(self.divided, max_length))

    def shard_of(self, model: CausalLM) -> CausalLM:
        """Of a model of `divided`, whose layers it takes where there are several stages."""
        return model if self.stages == 1 else keep_layers(model, *self.layers)

    def boxes(self, name: str, shape: tuple[int, ...]) -> Boxes:
        """First and end along every dimension of what this rank holds of a checkpoint's tensor of `shape`, whole.

        name: of the parameter that it belongs to. Several boxes where rows stand in stacks. Gate and up of an expert
        are divided each by itself; with expert parallelism the rank has all of its experts. Of a vocabulary that the
        ranks do not divide evenly, the last ones hold fewer rows than `config.vocab_size`.
        """
        dim, ranges = self._divided(name, shape)
        return tuple(tuple(one if at == dim else (0, size) for at, size in enumerate(shape)) for one in ranges)

    def _divided(self, name: str, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        """The dimension that is divided, and what this rank has along it."""
        placement = self.placements[name]
        if placement is Placement.EXPERT:
            return self._of_experts(name.rpartition(".")[2], shape)
        if placement is Placement.STACKED:
            assert self.whole.recurrence is not None
            return 0, local_ranges(stacks(self.whole.recurrence, name), self.size, self.index)
        dim = placement.divided_dim
        return (0, [(0, shape[0])]) if dim is None else (dim, [self._range(name, shape[dim])])

    def _of_experts(self, own: str, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        """Of a matrix or a bias of one expert, or of the matrices of all."""
        stacked, dim = len(shape) == 3, _EXPERT_DIMS.get(own)
        if self.slots is not None and stacked:
            assert self.config.experts is not None
            return 0, [(expert, expert + 1) for expert in self.config.experts.local or ()]
        if self.slots is not None or dim is None:
            return 0, [(0, shape[0])]
        halves = 2 if stacked and own == "gate_up_proj" else 1
        dim, each = dim + stacked, shape[dim + stacked] // halves
        first, end = span(each, self.size, self.index)
        return dim, [(half * each + first, half * each + end) for half in range(halves)]

    def _range(self, name: str, rows: int) -> tuple[int, int]:
        if self.placements[name] is Placement.VOCABULARY:
            own = self.config.vocab_size
            return min(self.index * own, rows), min((self.index + 1) * own, rows)
        part, parts = self.index, self.size
        if name.split(".")[-2] in _KEYS_AND_VALUES and parts > self.whole.num_kv_heads:
            part, parts = part // (parts // self.whole.num_kv_heads), self.whole.num_kv_heads
        own = rows // parts
        return part * own, (part + 1) * own


def rank_config(
    config: ModelConfig,
    size: int,
    index: int,
    *,
    expert_parallel: bool = False,
    redundant: int | None = None,
    attention_dp: bool = False,
) -> ModelConfig:
    """The config of the model that rank `index` of `size` holds.

    Heads and the width of MLPs and experts are divided; with `expert_parallel` each rank has whole experts instead, of
    neighbouring numbers, as many as the others or one more; `redundant` more slots have copies of the first experts.
    Where there are more ranks than KV heads, each has one, which size / num_kv_heads ranks share. Every rank has as
    many rows of the vocabulary as the first, some of them zeros where the ranks do not divide it: all ranks run one
    graph. With `attention_dp` nothing but the experts is divided. Raises ValueError if the model cannot be divided so.
    """
    if not 0 <= index < size:
        raise ValueError(f"rank {index} of {size} ranks; ranks count from 0 to {size - 1}")
    if attention_dp and config.experts is None:
        raise ValueError(
            "enable_dp_attention=True needs a mixture of experts, and this model has none: give data_parallel_size "
            "instead, whose engines hold it whole each and serve requests of their own"
        )
    if attention_dp and not expert_parallel:
        raise ValueError(
            "enable_dp_attention=True lets ranks share experts alone: it needs enable_expert_parallel=True"
        )
    if expert_parallel and config.experts is None:
        raise ValueError(
            "enable_expert_parallel=True needs a mixture of experts, and this model has none; leave it out"
        )
    if expert_parallel and config.experts is not None and config.experts.clamp is not None:
        raise ValueError(
            f"enable_expert_parallel=True is not there for experts with biases, as {config.architecture} has them; "
            "leave it out: tensor_parallel_size divides the width of each expert"
        )
    if fault := _fault(config, size, expert_parallel, attention_dp):
        sizes = range(1, 1 + (config.experts.count if attention_dp and config.experts else config.num_heads))
        accepted = ", ".join(str(one) for one in sizes if not _fault(config, one, expert_parallel, attention_dp))
        raise ValueError(f"tensor_parallel_size={size} {fault}; this model takes {accepted}")
    experts = config.experts
    if experts is not None and expert_parallel:
        if redundant is not None:
            _require_slots(experts.count, size, redundant)
        own = range(*span(experts.count + (redundant or 0), size, index))
        experts = replace(experts, local=tuple(slot % experts.count for slot in own))
    elif experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    if attention_dp:
        return replace(config, experts=experts)
    if experts is not None:
        experts = replace(experts, shared_size=experts.shared_size // size)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=max(1, config.intermediate_size // size),
        vocab_size=-(-config.vocab_size // size),
        experts=experts,
        recurrence=None if config.recurrence is None else divided_recurrence(config.recurrence, size),
    )


def _fault(config: ModelConfig, size: int, expert_parallel: bool, attention_dp: bool) -> str:
    """Why so many ranks cannot share the model; empty if they can."""
    if config.recurrence is not None and size > 1:
        if attention_dp:
            return "with enable_dp_attention=True is not there for recurrent layers"
        if why := fault(config.recurrence, size):
            return why
    heads, kv_heads = (0, size) if attention_dp else (config.num_heads, config.num_kv_heads)
    if heads % size:
        return f"does not divide the {heads} attention heads"
    if kv_heads % size and size % kv_heads:
        return f"neither divides the {kv_heads} KV heads nor is a multiple of them"
    if _has_plain_mlp(config) and not attention_dp and config.intermediate_size % size:
        return f"does not divide intermediate_size = {config.intermediate_size}"
    if config.experts is None:
        return ""
    if expert_parallel and size > config.experts.count:
        return f"is more than the {config.experts.count} experts, of which every rank needs one"
    if not attention_dp and config.experts.shared_size % size:
        return f"does not divide the shared experts' width = {config.experts.shared_size}"
    if not expert_parallel and config.experts.intermediate_size % size:
        return f"does not divide the experts' intermediate_size = {config.experts.intermediate_size}"
    return ""


def _require_alike(config: ModelConfig, size: int, key_ranks: int, expert_parallel: bool) -> None:
    """Ranks can divide by sequence what they would have alike; else it is told how many could."""
    kv_heads = 1 if config.latent is not None else config.num_kv_heads  # all heads read the same rows
    alike = size // kv_heads
    if key_ranks == 1 or (alike and alike % key_ranks == 0):
        return
    given = f"decode_context_parallel_size={key_ranks} with tensor_parallel_size={size}"
    needed = range(kv_heads * key_ranks, config.num_heads + 1, kv_heads * key_ranks)
    least = next((one for one in needed if not _fault(config, one, expert_parallel, attention_dp=False)), None)
    more = "" if least is None else f" or give tensor_parallel_size={least}"
    if alike < 2:
        raise ValueError(
            f"{given}: no ranks have the same of {kv_heads} KV heads, so there is nothing to divide by sequence; leave "
            f"it out{more and ',' + more}"
        )
    accepted = ", ".join(str(one) for one in range(1, alike + 1) if alike % one == 0)
    raise ValueError(
        f"{given}: {alike} ranks have the same of {kv_heads} KV heads, which it must divide; accepted are "
        f"{accepted}{more and ';' + more}"
    )


def _require_slots(count: int, size: int, redundant: int) -> None:
    """A rank has no expert twice, and all have as many slots."""
    accepted = [more for more in range(count * (size - 1) + 1) if (count + more) % size == 0]
    if redundant not in accepted:
        raise ValueError(
            f"num_redundant_experts={redundant} with {count} experts on {size} ranks: each rank needs as many slots as "
            f"the others, and at most one for each expert; accepted are {', '.join(map(str, accepted[:4]))}, ..."
        )


def _has_plain_mlp(config: ModelConfig) -> bool:
    return config.experts is None or not all(config.experts.layers)
