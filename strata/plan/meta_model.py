"""A model named on the command line, on the meta device: its config, its graphs and its batches, without weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from strata.cache.pool import PoolShape
from strata.cache.state_pool import StateShape, meta_states
from strata.cache.tables import BufferShape
from strata.comm.mesh import Axis
from strata.engine.engine_config import KV_DTYPES, MAX_NUM_SEQS, EngineConfig, library_limit
from strata.engine.plan import Chunk, Draw, PlanArrays, StepPlan
from strata.engine.ranks.token_division import RankStep, TokenDivision
from strata.engine.recorded_steps import fresh_rows_of
from strata.engine.sampler import DrawInputs
from strata.engine.startup.packing import Packing
from strata.engine.step_cost import least_costs, token_division
from strata.engine.step_graphs import Overlap, StepGraphs, step_graphs
from strata.engine.steps.inputs import DivisionInputs, DrawStep, StepInputs
from strata.engine.steps.recorded_sizes import (
    decode_buckets,
    has_few_long_prompts,
    max_mixed_tokens,
    recorded_sizes,
    smallest_mixed,
)
from strata.files.json_object import read_existing_object
from strata.graph.buffers import CUDA_BLOCK, BufferPlan, buffer_plan
from strata.graph.capture import capture, capture_head
from strata.graph.cost import NodeCost, StepCosts, meta_indices, meta_pages, node_costs
from strata.graph.passes import passes_of
from strata.hardware.figures import Device
from strata.hardware.roofline import Workload
from strata.kernels import tuned
from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.cudnn_plan import keeps_neighbours_apart
from strata.kernels.attention.times import Attends, Prompts
from strata.kernels.attention.virtual_sequences import MAX_TOKENS, Rows, VirtualSequences, fresh_rows
from strata.kernels.device_limits import DeviceLimits, implementations_for
from strata.kernels.state.kept_keys import ALL_KEYS
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.models.families import FAMILIES, build
from strata.models.shapes import SHAPES
from strata.models.weights import weight_bytes
from strata.parallel.serving_shard import RankShard

_PAGE_SIZE = EngineConfig.page_size
# Operations that attend over pages of keys and values.
_ATTENTIONS = ("attention", "decode_attention")


def find_config(model: str) -> ModelConfig:
    """The config of a named shape, a checkpoint folder or a config.json. Raises ValueError if it is none of them."""
    if model in SHAPES:
        return config_from_dict(SHAPES[model], model)
    path = Path(model)
    if model and path.is_dir():  # no name is no folder
        return read_config(path)
    if not path.is_file():
        raise ValueError(
            f"{model!r} is neither a folder nor a file nor a known shape; give a checkpoint folder, a config.json, "
            f"or one of {', '.join(SHAPES)}"
        )
    values = read_existing_object(path)
    return config_from_dict(values, str(path))


@dataclass(frozen=True)
class StepNodes:
    """What the nodes of one step cost, and what runs them.

    graph: the one of `StepGraphs` that computes the logits. inputs, model, draw: in the order in which they run.
    recorded: whether an engine with default options replays them from a CUDA graph. timed: all of them with what they
    do at the size to which the step is padded, but for attention, to which padding brings no keys.
    """

    graph: str
    inputs: list[NodeCost]
    model: list[NodeCost]
    draw: list[NodeCost]
    recorded: bool
    timed: list[NodeCost]

    @property
    def kernels(self) -> list[str]:
        """The kernels of the step in order: those of Strata by name, a library's by the library."""
        return [kernel for node in (*self.inputs, *self.model, *self.draw) for kernel in node.kernels]


@dataclass(frozen=True)
class MetaModel:
    """A model without weights, of which it would have so many `parameters` in `dtype`: the graphs of its steps on a
    device that need not be here. library: cuDNN attends for prompts there. shard: of the rank whose share it is, where
    several divide a model; `config` is the rank's own then. division: how ranks divide the tokens of steps. limits:
    None of a CPU. max_sequences: of the largest recorded steps. deterministic: other kernels attend. rounded: in which
    8 bits pages keep keys and values, so that cuDNN attends over a step's own alone; None: in `dtype`."""

    config: ModelConfig
    dtype: torch.dtype
    limits: DeviceLimits | None
    graphs: StepGraphs
    parameters: int
    library: bool
    shard: RankShard | None = None
    division: TokenDivision | None = None
    max_sequences: int = MAX_NUM_SEQS
    deterministic: bool = False
    rounded: torch.dtype | None = None

    def _batch(self, workload: Workload, size: BufferShape | None) -> Batch:
        """What the graphs are called with in a step of that workload, one-token sequences first; size: recorded."""
        shape = self._pool
        pages = meta_pages(
            workload,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            page_size=_PAGE_SIZE,
            rounded=shape.rounded,
            kept=shape.kept,
        )
        if max(workload.new) > 1 and workload.tokens < 1 << 31:  # as many as the device can count
            divided = self._is_divided(workload, size)
            virtual = VirtualSequences(meta_indices(4, 1), meta_indices(2, 1), self._rows(size)) if divided else None
            decodes = _decodes(workload) if size is None else (0 if size.fresh else None)
            begin = decodes is not None and workload.new[decodes:] == workload.total[decodes:]
            parts = BatchParts(pages.lengths, pages.lengths, meta_indices(2), decodes, virtual, begin)
            pages = replace(pages, parts=parts)
        tokens = meta_indices(workload.tokens)
        sequences = len(workload.new)
        states = meta_states(self._states, sequences)
        return Batch(tokens, tokens, meta_indices(sequences + 1), max(workload.new), pages, states=states)

    def attends(self, workload: Workload, size: BufferShape | None) -> Attends | None:
        """What runs the attention of a step over pages; None where it is not known. size: as it is recorded."""
        known = self.limits is not None and not self.deterministic and self.dtype.itemsize == 2
        if not known or self.config.latent is not None or not workload.tokens:
            return None
        kind: Prompts | None = None
        sequences = len(workload.new) if size is None else size.sequences
        if max(workload.new) > 1:
            kind = "pages" if self._is_divided(workload, size) else "tiles"
            if size is None:
                sequences = _decodes(workload)
            elif size.fresh:
                kind = "fresh"
        config = self.config
        return Attends(
            config.num_heads, config.num_kv_heads, config.head_dim, self.dtype, sequences, config.longest, kind
        )

    @property
    def _pool(self) -> PoolShape:
        kept = ALL_KEYS if self.shard is None else self.shard.kept
        return replace(PoolShape.of(self.config, _PAGE_SIZE, self.dtype), rounded=self.rounded, kept=kept)

    @cached_property
    def _states(self) -> StateShape | None:
        """Of layers that keep fixed ones."""
        return StateShape.of(FAMILIES[self.config.architecture].states(self.config), self.dtype)

    def step(self, workload: Workload) -> StepNodes:
        """A step that samples a row of each sequence: with filters if one rank recorded it, else without, as most are.

        Its nodes cost what its own tokens do, and run the kernels of the size to which a recorded step is padded. Of a
        step whose tokens ranks divide, they are those of the first rank's share, and its padding. How long a recorded
        step takes follows from the size to which it is padded (`StepNodes.timed`).
        """
        divided = self._divided(workload)
        if divided is not None:
            return self._share(len(workload.new), *divided)
        graphs, count = self.graphs, len(workload.new)
        size = self.recorded_size(workload)
        model, part = self._graph(workload, size)
        if size is None:
            inputs, draw = graphs.mixed_inputs if 1 in workload.new else graphs.prompt_inputs, graphs.draw
        else:
            inputs = graphs.recorded_inputs
            draw = graphs.draw_filtered if graphs.part is None else graphs.draw
        if self._is_divided(workload, size):
            inputs = graphs.fresh_inputs if size is not None and size.fresh else graphs.divided_inputs
        arguments = [(self._arguments(workload, count, size), workload)]
        if size is not None:
            filled = _padded(workload, size)
            arguments.append((self._arguments(filled, size.draws, size), filled))

        timed: list[NodeCost] = []
        attends = self.attends(workload, size)

        def nodes(graph: fx.GraphModule, part: int) -> list[NodeCost]:
            costed, *padded = (
                [_attending(node, attends) for node in node_costs(graph, given[part], work, self.limits)]
                for given, work in arguments
            )
            ran = padded[0] if padded else costed
            timed.extend(
                replace(by, cost=node.cost) if node.cost.cached else by for node, by in zip(costed, ran, strict=True)
            )
            return [
                replace(node, implementation=by.implementation, kernels=by.kernels)
                for node, by in zip(costed, ran, strict=True)
            ]

        name = next(field.name for field in fields(graphs) if getattr(graphs, field.name) is model)
        made, ran = nodes(inputs, 0), nodes(model, part)
        drawn = nodes(draw, 3) if graphs.head is not None else []
        return StepNodes(name, made, ran, drawn, size is not None, timed)

    def _graph(self, workload: Workload, size: BufferShape | None) -> tuple[fx.GraphModule, int]:
        """What computes the logits of a step, and which of `_arguments` it is called with."""
        if size is not None and max(workload.new) == 1:
            decode = self.graphs.decode(size.sequences)
            if decode is not None:
                return decode, 1
        if size is None:
            step = PlanArrays(_plan(workload))
            graphs = self.graphs.of_step(step.counts, step.ends, self._pool.page_tokens)
            return graphs.launched_logits_of(workload.tokens), 2
        return self.graphs.logits_of(size.tokens), 2

    def buffers(self, workload: Workload) -> BufferPlan | None:
        """Of the graph of `called`; None where ranks divide a step's tokens."""
        block = 1 if self.limits is None else CUDA_BLOCK
        return None if self._divided(workload) else buffer_plan(*self.called(workload), self.limits, block)

    def called(self, workload: Workload) -> tuple[fx.GraphModule, Any]:
        """The graph that computes the logits of such a step, and what it is called with, padded if it is recorded."""
        graph, part = self._graph(workload, size := self.recorded_size(workload))
        filled = (workload, len(workload.new)) if size is None else (_padded(workload, size), size.draws)
        return graph, self._arguments(*filled, size)[part]

    def captured(self, workload: Workload) -> list[NodeCost]:
        """What the nodes of the model cost in that step before any pass, those of the head of a row a sequence."""
        with torch.device("meta"):
            model = build(self.config).to(self.dtype)
        hidden = torch.empty(len(workload.new), self.config.hidden_size, dtype=self.dtype, device="meta")
        body = node_costs(capture(model), self._batch(workload, None), workload)
        return [*body, *node_costs(capture_head(model), hidden, workload)]

    def _divided(self, workload: Workload) -> tuple[RankStep, BufferShape | None] | None:
        """The first rank's share of a step and its recorded size, if one holds it; None if ranks do not divide it."""
        division, step = self.division, PlanArrays(_plan(workload))
        share = None if division is None else division.share(step)
        if division is None or share is None:
            return None
        size = smallest_mixed(self._divided_sizes, *share.room)
        return (share, size) if division.pays(step, share, recorded=size is not None) else None

    def _share(self, draws: int, share: RankStep, size: BufferShape | None) -> StepNodes:
        """A rank's share of a step that samples so many rows."""
        graphs, ranks = self.graphs, share.shape.ranks
        rows, divided = share.rows if size is None else size.tokens, None if size is None else size.prompts
        padding = (rows - share.tokens,) * (rows > share.tokens)
        workload = Workload((*share.counts.tolist(), *padding), (*share.ends.tolist(), *padding))
        made = graphs.mixed_inputs if 1 in workload.new else graphs.prompt_inputs
        if size is not None:
            made = graphs.recorded_inputs
        if divided is not None or (size is None and self._is_divided(workload, None)):
            made = graphs.divided_inputs

        def nodes(drawn: int) -> list[list[NodeCost]]:
            assert graphs.divided is not None
            inputs, batch, (_, chosen), draw = self._arguments(workload, drawn, size)
            assert batch.pages is not None
            pages = replace(batch.pages, slot_mapping=meta_indices(rows * ranks))
            batch = replace(batch, pages=pages)
            given = ((made, inputs), (graphs.divided, (batch, chosen, chosen)), (graphs.draw, draw))
            return [node_costs(graph, one, workload, self.limits) for graph, one in given]

        read, ran, drawn = nodes(draws)
        padded = nodes(draws if size is None else size.draws)
        return StepNodes("divided", read, ran, drawn, size is not None, [node for part in padded for node in part])

    def recorded_size(self, workload: Workload) -> BufferShape | None:
        """The size to which an engine with default options pads a step; None if it launches it eagerly."""
        count = len(workload.new)
        if self.graphs.decode(count) is None:
            return None
        if max(workload.new) == 1:
            rows = next((rows for rows in decode_buckets(self.max_sequences) if rows >= count), None)
            return None if rows is None else BufferShape(rows, rows, rows)
        decodes = _decodes(workload)
        behind = max(total - new for new, total in zip(workload.new, workload.total, strict=True) if new > 1)
        fresh = fresh_rows(workload.new) if workload.new == workload.total else None
        return smallest_mixed(self._mixed_sizes, workload.tokens, count, count, count - decodes, fresh, behind)

    @cached_property
    def _mixed_sizes(self) -> list[BufferShape]:
        """Of recorded steps with prompts."""
        most = EngineConfig.max_num_batched_tokens or MAX_TOKENS
        fresh = self.library and keeps_neighbours_apart(self.dtype)
        library = self.library and self.rounded is None
        exchanged = self.graphs.exchange_tokens or None
        sizes = recorded_sizes(self.max_sequences, most, self.parameters, library, fresh, exchanged=exchanged)
        return [size for size in sizes if size.tokens > size.sequences]

    @cached_property
    def _divided_sizes(self) -> list[BufferShape]:
        """Of a rank's share of recorded steps that ranks divide."""
        most = EngineConfig.max_num_batched_tokens or MAX_TOKENS
        library = self.library and self.rounded is None
        sizes = recorded_sizes(self.max_sequences, most, self.parameters, library, division=self.division)
        return [size for size in sizes if size.ranks > 1]

    def _is_divided(self, workload: Workload, size: BufferShape | None) -> bool:
        """Whether cuDNN attends for the prompts of a step. size: as it is recorded; None: launched eagerly."""
        if size is not None:
            return size.prompts is not None
        few = has_few_long_prompts(workload.tokens, len(workload.new) - _decodes(workload))
        return self.library and self.rounded is None and max(workload.new) > 1 and few

    def _rows(self, size: BufferShape | None) -> Rows:
        rows = fresh_rows_of(self.config.num_heads, self._pool)
        return rows if size is not None and size.fresh else Rows(rows.queries, rows.result)

    def _arguments(self, workload: Workload, draws: int, size: BufferShape | None) -> tuple[Any, ...]:
        """What the graphs of a step are called with: inputs; decode; logits, of so many rows; draw."""
        batch, rows = self._batch(workload, size), meta_indices(draws)
        assert batch.pages is not None
        tables = StepInputs(
            batch.pages.tables, meta_indices(len(workload.new)), batch.offsets, batch.pages.lengths,
            batch.pages.slot_mapping, batch.pages.page_size, batch.tokens, batch.tokens, rows,
        )  # fmt: skip
        floats = rows.new_empty(rows.shape, dtype=torch.float32)
        sampled = DrawInputs(floats, rows.new_empty(rows.shape, dtype=torch.int64), rows, rows, floats, floats)
        logits = torch.empty(draws, self.config.vocab_size, dtype=self.dtype, device="meta")
        inputs: StepInputs | DivisionInputs = tables
        if self._is_divided(workload, size):
            pool = batch.pages.keys[0]
            pools = pool.new_empty((self.config.num_layers, *pool.shape))
            inputs = DivisionInputs(tables, meta_indices(2), pools, pools, self._rows(size))
        return inputs, batch, (batch, rows), DrawStep(logits, sampled, rows, rows)

    def step_costs(self) -> StepCosts:
        """The least that steps of this model cost."""
        return least_costs(self.graphs, self._pool, self._states)


def meta_model(
    config: ModelConfig,
    device: Device,
    dtype: torch.dtype | None = None,
    deterministic: bool = False,
    shard: RankShard | None = None,
    context: Axis | None = None,
    quantization: str | None = None,
    sparsity: str | None = None,
    folder: Path | None = None,
    passes: str = EngineConfig.passes,
    narrow_messages: bool = False,
    kv_cache_dtype: str = EngineConfig.kv_cache_dtype,
) -> MetaModel:
    """The graphs with which the engine runs a model on a device.

    dtype: the checkpoint's by default, bfloat16 if that says nothing. shard: of `config`, for the graphs of its rank.
    context: along which ranks divide the tokens of steps. quantization, sparsity, passes, kv_cache_dtype: as in
    `EngineConfig`. folder: of the checkpoint, which may be packed. narrow_messages: sums over ranks travel in 8 bits in
    large steps. Raises ValueError for a scheme that cannot pack the model.
    """
    dtype = dtype or config.dtype or torch.bfloat16
    limits = DeviceLimits.listed(device)
    config = config if shard is None else shard.config
    with torch.device("meta"):
        model = (build(config) if shard is None else shard.build()).to(dtype)
        whole = build(config if shard is None else shard.divided)
    # As in `EngineSizes`: all stages record the same sizes.
    parameters = weight_bytes(whole, dtype) // dtype.itemsize // (1 if shard is None else shard.stages)
    has_copies = shard is not None and shard.size == 2  # as `with_peer_copies` finds if the machine allows it
    overlap = Overlap(0 if narrow_messages else EngineConfig.overlap_tokens, device if has_copies else None)
    table = tuned.read(limits.product)
    graphs = step_graphs(
        model,
        implementations_for(limits),
        deterministic,
        table,
        shard,
        overlap=overlap,
        context=context,
        packed=Packing.of(quantization, model, shard, folder, sparsity, dtype).planned,
        limits=limits,
        passes=passes_of(passes),
        narrow=narrow_messages,
    )
    attends = any(config.attends) and not deterministic and (shard is None or shard.kept == ALL_KEYS)
    library = attends and library_limit(limits, config, dtype, _PAGE_SIZE) is None
    division = None
    if context is not None:
        shape = PoolShape.of(config, _PAGE_SIZE, dtype)
        recorded = min(MAX_TOKENS, max_mixed_tokens(parameters, library))
        divided = min(MAX_TOKENS, context.size * recorded)
        division = token_division(graphs, shape, context, "cuda", limits.product, recorded, divided)
    rounded = KV_DTYPES[kv_cache_dtype]
    alone = MetaModel(config, dtype, limits, graphs, parameters, library, shard, division)
    return replace(alone, deterministic=deterministic, rounded=rounded)


def host_model(
    config: ModelConfig,
    dtype: torch.dtype,
    deterministic: bool = False,
    quantization: str | None = None,
    sparsity: str | None = None,
    folder: Path | None = None,
    passes: str = EngineConfig.passes,
) -> MetaModel:
    """The graphs with which the engine runs a model on a CPU; what is packed, folder and passes as for `meta_model`."""
    with torch.device("meta"):
        model = build(config).to(dtype)
    parameters = weight_bytes(model, dtype) // dtype.itemsize
    packing = Packing.of(quantization, model, None, folder, sparsity, dtype)
    graphs = step_graphs(model, "cpu", deterministic, packed=packing.planned, passes=passes_of(passes))
    return MetaModel(config, dtype, None, graphs, parameters, library=False)


def _plan(workload: Workload) -> StepPlan:
    """A step that samples a row of each sequence."""
    chunks = tuple(
        Chunk(slot, slot, total - new, new, (Draw(slot, slot),), 0, ())
        for slot, (new, total) in enumerate(zip(workload.new, workload.total, strict=True))
    )
    return StepPlan((), (), chunks, (), workload.tokens)


def _attending(node: NodeCost, attends: Attends | None) -> NodeCost:
    return replace(node, attends=attends) if node.operation in _ATTENTIONS else node


def _decodes(workload: Workload) -> int:
    """The sequences of one token that come first."""
    return next((at for at, new in enumerate(workload.new) if new > 1), len(workload.new))


def _padded(workload: Workload, size: BufferShape) -> Workload:
    """A step with the padding of its recorded size, as the engine gives it to sequences of length 0."""
    spare, tokens = size.sequences - len(workload.new), size.tokens - workload.tokens
    more = (1,) * spare if size.tokens == size.sequences else (tokens, *(0,) * (spare - 1))
    return Workload(workload.new + more, workload.total + more)


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which the device database lists a dtype."""
    return str(dtype).removeprefix("torch.")
