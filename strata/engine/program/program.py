"""The step program of a model: everything that its steps run, and which of it a step takes.

The engine runs what `choose` says; compilation ahead, `strata graph`, the planner, the simulator and `strata explain`
ask the same program, of a model on the meta device if it is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx, nn

from strata.cache.tables import BufferShape
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.program.inputs import ChunkedInputsOfStep, DrawOfStep, InputsOfStep
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes, has_few_long_prompts
from strata.engine.program.source import StepSource, Target
from strata.engine.program.variants import StepVariant, variants_of
from strata.engine.ranks.prefill_context_parallel import TokenSharding
from strata.engine.ranks.vocabulary_shard import VocabularyShard
from strata.graph.compile import compiled
from strata.graph.fold import Folded
from strata.graph.trace import trace
from strata.kernels import tuned
from strata.kernels.attention.query_chunks import keys_in_blocks


class StepChoice(NamedTuple):
    """What a step runs.

    variant: whose graph computes its logits. size: of the CUDA graph that it replays, to which it is padded; None: the
    host launches it kernel by kernel. shape: with the share of this rank, where ranks divide its tokens. library: cuDNN
    attends for its prompts, of `size.pure_prefill` over the step's own keys.
    """

    variant: StepVariant
    size: BufferShape | None
    shape: StepShape
    library: bool


@dataclass(frozen=True)
class StepProgram:
    """What runs the steps of one model, of a rank its share, bound for one kind of device.

    variants: in the order in which they are asked. hidden: Batch to hidden [tokens, hidden]; head: hidden to logits
    [rows, vocabulary or part], None of a stage before the last, whose graphs give hidden states instead. whole_prompts:
    as `hidden`, for prompts that stand whole in a batch without pages.
    captured_inputs, mixed_inputs, prompt_inputs: StepInputs to tokens and block tables: of replayed steps; of others in
    which ids are missing that only the device knows; and in which none are. chunked_inputs: QueryChunkInputs to tokens,
    block tables and the prompts' division, of steps in which cuDNN attends for them.
    draw, draw_filtered: DrawStep to ids [rows] int32, which are also written where later steps read them.
    part: the ids of which the logits are, where ranks divide the vocabulary. traced: how many nodes of each operation
    the model and its head had before the passes. table: what was measured of the device's products. sizes: of CUDA
    graphs. division: how ranks divide tokens. sends_by_copies: what travels beside products is sent by copy engines.
    folded: weights that were computed from others.
    """

    variants: tuple[StepVariant, ...]
    hidden: fx.GraphModule
    head: fx.GraphModule | None
    whole_prompts: fx.GraphModule
    captured_inputs: fx.GraphModule
    mixed_inputs: fx.GraphModule
    prompt_inputs: fx.GraphModule
    chunked_inputs: fx.GraphModule
    draw: fx.GraphModule
    draw_filtered: fx.GraphModule
    part: VocabularyShard | None
    traced: Mapping[str, int]
    table: tuned.Table
    sizes: StepSizes
    division: TokenSharding | None = None
    sends_by_copies: bool = False
    folded: tuple[Folded, ...] = ()
    _replayed: dict[BufferShape, StepVariant] = field(init=False, repr=False, compare=False, default_factory=dict)

    @staticmethod
    def of(model: nn.Module, asked: EngineConfig, target: Target, sizes: EngineSizes | None = None) -> StepProgram:
        """Of a model whose parameters may be on the meta device. sizes: None: nothing is captured.

        Raises NotImplementedError if an operation has no implementation on the device.
        """
        source = StepSource.of(model, asked, target)
        bound, part = source.bound, source.vocabulary
        hidden = source.hidden()
        divides_keys = source.division is not None
        variants = variants_of(source)
        program = StepProgram(
            variants=variants,
            hidden=hidden,
            head=None if source.head is None else bound(source.head),
            whole_prompts=source.hidden(source.undivided) if divides_keys else hidden,
            captured_inputs=bound(trace(InputsOfStep(captured=not divides_keys, missing=True))),
            mixed_inputs=bound(trace(InputsOfStep(captured=False, missing=True))),
            prompt_inputs=bound(trace(InputsOfStep(captured=False, missing=False))),
            chunked_inputs=bound(trace(ChunkedInputsOfStep())),
            draw=bound(trace(DrawOfStep(part, filtered=False))),
            draw_filtered=bound(trace(DrawOfStep(part, filtered=True))),
            part=part,
            traced=source.operations,
            table=target.table,
            sizes=StepSizes() if sizes is None else sizes.captured,
            sends_by_copies=target.copies is not None,
            folded=source.folded,
        )
        if asked.executor == "compile":
            for variant in variants:
                variant.graph.forward = compiled(variant.graph)  # the graph itself is what is costed
        return program

    def choose(self, shape: StepShape) -> StepChoice:
        """What a step runs. Ranks that run it together choose alike."""
        if (divided := self._divided(shape)) is not None:
            return divided
        found = next((one for one in self.variants if not one.captured and one.when(shape)), None)
        size = self.sizes.holding(shape) if found is None and not shape.tagged else None
        if size is not None:
            return StepChoice(self.replayed(size), size, shape, size.prompts is not None)
        variant = found or next(one for one in self.variants if one.when(shape))
        return StepChoice(variant, None, shape, variant.library and self._library_takes(shape))

    @property
    def asks_sequences(self) -> bool:
        """Whether `choose` looks at sequences one by one, so that `StepShape.step` has to be there."""
        return self.division is not None or not all(one.library for one in self.variants)

    def replayed(self, size: BufferShape) -> StepVariant:
        """Of every step that replays the CUDA graph of a size."""
        found = self._replayed.get(size)
        if found is None:
            shape = StepShape.replayed(size)
            found = self._replayed[size] = next(one for one in self.variants if one.when(shape))
        return found

    def inputs(self, choice: StepChoice, *, missing: bool) -> fx.GraphModule:
        """What makes the inputs of a step. missing: some of its ids only the device knows."""
        size = choice.size
        if choice.library:
            return self.chunked_inputs
        if size is not None:
            return self.captured_inputs
        return self.mixed_inputs if missing else self.prompt_inputs

    def variant(self, name: str) -> StepVariant | None:
        return next((one for one in self.variants if one.name == name), None)

    def min_rows(self, name: str) -> int:
        """Rows of the shortest step that a variant is for; 0 where there is none of that name."""
        variant = self.variant(name)
        return 0 if variant is None else variant.least

    @property
    def logits(self) -> fx.GraphModule:
        """Batch and rows to logits, of any step."""
        return self.variants[-1].graph

    def graphs(self) -> dict[str, fx.GraphModule]:
        """All of them by their names, each once."""
        named = {variant.name: variant.graph for variant in self.variants}
        named |= {f"{one.name}_hidden": one.hidden for one in self.variants if one.hidden is not None}
        named |= {name: value for name, value in vars(self).items() if isinstance(value, fx.GraphModule)}
        first = {graph: name for name, graph in reversed(named.items())}
        return {name: graph for name, graph in named.items() if first[graph] == name}

    def replaying(self, sizes: StepSizes) -> StepProgram:
        """With CUDA graphs of these sizes alone."""
        return replace(self, sizes=sizes)

    def _divided(self, shape: StepShape) -> StepChoice | None:
        """Of a step whose tokens ranks divide; None if each runs all of it, as of prompts that are scored: they need
        all hidden states."""
        division, step = self.division, shape.step
        if division is None or step is None or shape.scored:
            return None
        share = division.share(step)
        size = None if share is None or shape.tagged else self.sizes.holding_share(share)
        if share is None or not division.pays(step, share, captured=size is not None):
            return None
        shape = shape._replace(share=share)
        variant = next(one for one in self.variants if one.when(shape))
        library = self._library_takes(shape) if size is None else size.prompts is not None
        return StepChoice(variant, size, shape, library)

    def _library_takes(self, shape: StepShape) -> bool:
        step = shape.share or shape.step or shape
        keys = shape.prompt_keys if shape.share is None else keys_in_blocks(shape.share.prompt_ends)
        return keys <= self.sizes.prompt_keys and has_few_long_prompts(step.tokens, step.prompts)
