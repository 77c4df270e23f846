"""What a training step takes before it runs: memory of a rank by kind, what to recompute so that it fits, time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from strata.comm.cost import Network
from strata.hardware.figures import Device
from strata.kernels.loss.loss import CHUNK_BYTES, CHUNK_ELEMENTS
from strata.models.config import ModelConfig
from strata.models.families import FAMILIES
from strata.models.family_config import RecurrenceConfig
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig
from strata.models.recurrence.state_space_config import StateSpaceConfig
from strata.parallel.buckets import BUCKET_ELEMENTS
from strata.parallel.layout import Layout
from strata.parallel.schedules import make_schedule
from strata.parallel.timeline import peak_saved
from strata.train.config import TrainConfig
from strata.train.optimizer.memory import STREAMED_BYTES
from strata.train.predict.flops import document_flops
from strata.train.predict.messages import Axes
from strata.train.predict.min_time import TrainingStepTime, min_time, predicted_time
from strata.train.predict.rank_parameters import RankParameters
from strata.train.predict.step_shape import TrainShape
from strata.train.steps.passes import LOGITS_BYTES

# Of a device's memory, what a run may plan with: the rest is the driver's, the libraries' and lost between blocks.
USABLE = 0.94
GIB = 2**30
# Tokens of the chunks in which both run (`strata.kernels.recurrent`).
_CHUNK = 64


@dataclass(frozen=True)
class MemoryOfRank:
    """Bytes at the fullest moment of a step, on one rank, by kind."""

    @property
    def total(self) -> int:
        return sum(int(getattr(self, field.name)) for field in fields(self))

    @property
    def in_words(self) -> str:
        """GiB of each kind in words."""
        words = {"accumulated": "gradient sums"}
        return ", ".join(
            f"{words.get(one.name, one.name)} {getattr(self, one.name) / GIB:,.2f}" for one in fields(self)
        )


@dataclass(frozen=True)
class StepMemory(MemoryOfRank):
    """state: weights (bfloat16), masters and two moments (float32), as far as ZeRO and `offload` leave them here.
    accumulated: float32 gradients of the batches before. gradients: of the batch that is under way, which are the
    head's, a layer's, or all at the end of the backward pass. activations: for the backward pass, with a pipeline of
    all micro-batches under way. workspace: what only the fullest moment holds, which is the logits of the loss or the
    backward pass of a layer, and weights that are gathered for it.
    """

    state: int
    accumulated: int
    gradients: int
    activations: int
    workspace: int


@dataclass(frozen=True)
class Estimate:
    """A step before it runs. memory: of each rank of the pipeline. time: the least. likely: what it is predicted to
    take. tokens: of the step, on all ranks together.

    mfu: the formula's FLOPs (`document_flops`) over the least time and the maker's dense bfloat16 peak of all ranks;
    likely_mfu: over the likely time.
    """

    shape: TrainShape
    recompute: str
    memory: tuple[StepMemory, ...]
    time: TrainingStepTime
    likely: TrainingStepTime
    tokens: int
    mfu: float

    @property
    def fullest(self) -> StepMemory:
        """Of the rank that needs the most."""
        return max(self.memory, key=lambda one: one.total)

    @property
    def tokens_per_second(self) -> float:
        """On all ranks together, at most."""
        return self.tokens / self.time.seconds

    @property
    def likely_tokens_per_second(self) -> float:
        """On all ranks together, by the likely time."""
        return self.tokens / self.likely.seconds

    @property
    def likely_mfu(self) -> float:
        return self.mfu * self.time.seconds / self.likely.seconds


def estimate(shape: TrainShape, device: Device, recompute: str = "auto", network: Network | None = None) -> Estimate:
    """Memory and times of a step on such devices.

    recompute: one of `shape.recomputes`, or "auto" for the first that fits. network: of several machines; without one
    all ranks lie in one. Raises ValueError if none fits, or if there are several ranks and nothing is known of messages
    between such devices.
    """
    if recompute == "auto":
        recompute = choose_recompute(shape, int(device.ceiling("memory").value))
    time = min_time(shape, recompute, device, network)
    likely = predicted_time(shape, recompute, device, network)
    layout = shape.layout
    ways = layout.dp * layout.shard * shape.batches
    sequences, rest = divmod(shape.tokens, shape.length)
    lengths = [shape.length] * sequences + [rest]
    flops = ways * document_flops(shape.config, lengths, shape.tokens).total
    peak = layout.ranks * device.ceiling("compute", "bfloat16", measured=False).value
    mfu = flops / time.seconds / peak
    return Estimate(shape, recompute, memory_by_rank(shape, recompute), time, likely, ways * shape.tokens, mfu)


def step_shape(run: TrainConfig, config: ModelConfig, layout: Layout) -> TrainShape:
    """The largest step of a run: full packs, of documents as long as the model takes."""
    tokens = run.data.tokens_per_pack
    packs = max(1, run.data.packs_per_step // (layout.dp * layout.shard))
    return TrainShape(
        config,
        tokens,
        min(tokens, config.longest),
        packs,
        run.run.precision,
        layout,
        run.optimizer.offload,
        sums_cross_entropy=run.dpo is None,
        adapters=run.lora is not None,
    )


def choose_recompute(shape: TrainShape, device_bytes: int) -> str:
    """The way to recompute that takes the least time and fits on every rank. Raises ValueError if none does."""
    usable = int(USABLE * device_bytes)
    for recompute in shape.recomputes:
        if memory(shape, recompute).total <= usable:
            return recompute
    least = memory(shape, shape.recomputes[-1])
    raise ValueError(
        f"a step over {shape.tokens} tokens takes {least.total / GIB:.1f} GiB ({least.state / GIB:.1f} of them for the "
        f"model and its optimizer) and {usable / GIB:.1f} are usable; lower the tokens of a batch or the model, or "
        f"divide it among more ranks"
    )


def memory(shape: TrainShape, recompute: str) -> StepMemory:
    """Of the rank that needs the most; see `memory_by_rank`."""
    return max(memory_by_rank(shape, recompute), key=lambda one: one.total)


def memory_by_rank(shape: TrainShape, recompute: str) -> tuple[StepMemory, ...]:
    """What a step keeps on each rank of the pipeline, by hand count; ranks along other axes are alike.

    recompute: one of `shape.recomputes`. Experts are taken to get equally many tokens each.
    """
    under_way = _under_way(shape.schedule_name, shape.layout.pp, shape.schedule.micro_batches)
    return tuple(
        _memory(shape, recompute, held, micro_batches)
        for held, micro_batches in zip(shape.local_parameters, under_way, strict=True)
    )


@lru_cache(maxsize=256)
def _under_way(schedule: str, ranks: int, micro_batches: int) -> tuple[float, ...]:
    return peak_saved(make_schedule(schedule, ranks, micro_batches))


def _memory(shape: TrainShape, recompute: str, held: RankParameters, micro_batches: float) -> StepMemory:
    state, sums = _state_bytes(shape, held), _sum_bytes(shape, held)
    kept = [layer_bytes(shape, layer, recompute) for layer, _ in held.unlike]
    whole = [layer_bytes(shape, layer, "none") for layer, _ in held.unlike]
    of_all = int(micro_batches * sum(count * each for (_, count), each in zip(held.unlike, kept, strict=True)))
    recomputed = max(all_ - own for all_, own in zip(whole, kept, strict=True))
    layer = recomputed + max(layer_working_bytes(shape, layer) for layer, _ in held.unlike)
    of_head, logits = _loss_bytes(shape, held)
    # The head, if it is another rank's embedding.
    gathered = 2 * held.head if shape.config.tied and not held.embedding else 0
    of_layer, of_all_layers, last = 0, _new_gradient_bytes(shape, held), 0
    if shape.layout.zero == 3:
        # The ends stay gathered from forward to backward; of a layer and the next the weights. Gradients, of a layer
        # and last of the embedding, in the weights' dtype and in float32.
        gathered += 2 * (held.total - held.in_layers)
        layer += 4 * held.mean_layer
        of_layer, last = 6 * held.mean_layer, 6 * held.embedding
    moments = (
        StepMemory(state, sums, of_head, of_all, gathered + logits),
        StepMemory(state, sums, of_head + of_layer, of_all, gathered + layer),
        StepMemory(state, sums, of_all_layers + of_layer, max(kept), gathered + layer),
        StepMemory(state, sums, of_all_layers + last, max(kept), gathered),
    )
    return max(moments, key=lambda one: one.total)


def _state_bytes(shape: TrainShape, held: RankParameters) -> int:
    whole = 0 if shape.layout.zero == 3 else 2 * held.total + _error_bytes(shape, held)
    if shape.offload:  # FSDP's masters, which are the weights, stay
        return whole + (4 * shape.updated(held) if shape.layout.zero == 3 else 0) + STREAMED_BYTES
    return whole + 12 * shape.updated(held)


def _error_bytes(shape: TrainShape, held: RankParameters) -> int:
    """What quantized gradients leave for the next step, in bfloat16: of all that a rank sends, and of its sums."""
    if shape.layout.message_dtype == "auto":
        return 0
    axes = Axes(shape)
    kinds = ((held.dense, axes.dense, axes.dense_replicas), (held.experts, axes.routed, axes.routed_replicas))
    values = 0
    for sent, divided, replicas in kinds:
        values += sent if divided.size > 1 else 0
        part = sent // divided.size
        values += part + part // replicas.size if replicas.size > 1 else 0
    if shape.layout.sequence_parallel:  # each rank of tp saw a part of the tokens of its experts
        part = held.experts // axes.routed.size
        values += part + part // axes.tensor.size if axes.tensor.size > 1 else 0
    return 2 * values


def _sum_bytes(shape: TrainShape, held: RankParameters) -> int:
    """ZeRO-1 reduces once a step and keeps whole gradients until then; 2 and 3 keep their part."""
    if shape.batches == 1:
        return 0
    return 4 * (shape.updated(held) if shape.layout.zero >= 2 else held.total)


def _new_gradient_bytes(shape: TrainShape, held: RankParameters) -> int:
    """The gradients that the pass itself leaves, beside the sums."""
    if shape.layout.ranks == 1:
        return 2 * held.total  # autograd's own, which AdamW reads
    if shape.batches > 1:
        return 0
    in_flight = 0 if shape.layout.zero in (0, 3) else 2 * 4 * min(held.total, max(BUCKET_ELEMENTS, held.embedding))
    return 4 * shape.updated(held) + in_flight


def logits_bytes(shape: TrainShape, at_once: int = CHUNK_BYTES) -> int:
    """Of the loss. at_once: of those that become their gradients; else they are float32 too, in chunks."""
    logits = shape.local_tokens * -(-shape.config.vocab_size // shape.layout.tp)
    return min(2 * logits, at_once) if shape.loss_has_gradients else 6 * min(logits, CHUNK_ELEMENTS)


def _loss_bytes(shape: TrainShape, held: RankParameters) -> tuple[int, int]:
    """The head's gradient, and the logits that exist at once."""
    if not held.head:
        return 0, 0
    if not (shape.loss_has_gradients and shape.runs_graph):  # it is added up in float32 and rounded
        return 6 * held.head, logits_bytes(shape)
    if shape.layout.ranks == 1:
        return 2 * held.head, logits_bytes(shape, LOGITS_BYTES)
    # Into the message, in float32, or into the sum of the batches before.
    is_held = shape.batches > 1 and shape.layout.zero < 2
    return 0 if is_held else 4 * held.head, logits_bytes(shape)


def layer_bytes(shape: TrainShape, layer: int, recompute: str) -> int:
    """What one layer keeps of a batch. Sizes of a token below are elements of bfloat16 unless they say otherwise."""
    config, tokens, parts, between = shape.config, shape.local_tokens, shape.layout.tp, shape.between
    hidden = config.hidden_size
    if recompute == "layers":
        return tokens * 2 * hidden // between  # what enters
    if config.recurrence is not None and config.recurrence.layers[layer]:
        return _recurrent_layer_bytes(shape, config.recurrence, layer, recompute)
    queries, keys = config.num_heads * config.head_dim // parts, config.num_kv_heads * config.head_dim // parts
    gates = queries if config.has_query_gates else 0
    product = queries + gates + 2 * keys
    wide = _attention_bytes(shape)
    if recompute != "none" and shape.runs_graph:
        wide = 0 if config.has_sinks else wide  # of the operations that are kept none attends with sinks
        attention = 2 * (product + queries + hidden // between + hidden // between) + wide
        return tokens * attention + mlp_bytes(shape, layer, recompute)
    # Read by norms and by attention; its result by the product, or by gates, and what these make of it.
    kept = 2 * hidden // between + product + queries + gates
    if getattr(FAMILIES[config.architecture].attention, "head_norm", None) is not None:
        kept += queries + keys  # before they are normalized
    # What sequence parallelism gathers is kept whole, unless it is gathered once more to overlap.
    read = hidden // (parts if shape.layout.overlap else 1)
    mlp = mlp_bytes(shape, layer, recompute)
    if shape.precision == "bf16":
        return tokens * (2 * (kept + read) + wide) + mlp
    weights = product * hidden + queries * hidden  # a byte each, as the backward pass reads them
    return tokens * (2 * kept + read + queries + wide) + weights + mlp


def _recurrent_layer_bytes(shape: TrainShape, recurrence: RecurrenceConfig, layer: int, recompute: str) -> int:
    hidden, several = shape.config.hidden_size, shape.local_tokens > shape.length
    residual = (4 if recurrence.wide_residual else 2) * hidden
    if recompute != "none" and shape.runs_graph:
        kept = residual + 2 * (recurrence.product_size + hidden)  # what enters, and the results of products
    else:
        kept = (1 + recurrence.has_mlps) * residual + 2 * hidden + recurrent_bytes(recurrence, several)
    return shape.local_tokens * kept + (mlp_bytes(shape, layer, recompute) if recurrence.has_mlps else 0)


def _attention_bytes(shape: TrainShape) -> int:
    """Of a token, what attention keeps in float32 beside what it reads and gives: the logarithms of sums. With sinks it
    is made of the library's products: queries, keys and values of each query head, and all scores."""
    config, heads = shape.config, shape.config.num_heads // shape.layout.tp
    return 4 * heads * (shape.length + 1 + 3 * config.head_dim if config.has_sinks else 1)


def mlp_bytes(shape: TrainShape, layer: int, recompute: str) -> int:
    """Of what follows attention, without the residual."""
    config, tokens = shape.config, shape.local_tokens
    hidden, between = config.hidden_size, shape.between
    experts = config.experts if config.experts is not None and config.experts.layers[layer] else None
    read = hidden // (shape.layout.tp if shape.layout.overlap else 1)
    if recompute != "none" and not shape.runs_graph:
        return tokens * 2 * (read if experts is None else hidden // between)  # what enters
    if experts is None:
        entering = tokens * read * (2 if shape.precision == "bf16" else 1)
        return _dense_bytes(shape, config.intermediate_size, recompute) + (entering if recompute == "none" else 0)
    shared = _dense_bytes(shape, experts.shared_size, recompute)
    if recompute != "none":
        # The results of the products of router and experts.
        gated = 2 * experts.intermediate_size if recompute == "operations" else 0
        return tokens * 2 * (experts.count + experts.per_token * (gated + hidden)) // between + shared
    # Logits, probabilities (float32), weights and numbers of a token's experts, and their order.
    routing = 2 * hidden + (2 + 4) * experts.count + experts.per_token * (4 + 8 + 16)
    # What enters and leaves products; within bounds six numbers in float32 lie between, and what they come to.
    gated = 2 * 3 if experts.clamp is None else 4 * 6 + 2
    rows = experts.per_token * (gated * experts.intermediate_size + 2 * 2 * hidden)
    return tokens * (routing + rows) // between + shared


def _dense_bytes(shape: TrainShape, inner: int, recompute: str) -> int:
    """Between the products of a dense MLP, or of the experts that all tokens go to."""
    tokens, inner = shape.local_tokens, inner // shape.layout.tp
    if recompute != "none":
        return tokens * 2 * (2 * inner if recompute == "operations" else 0)
    if shape.precision == "bf16":
        return tokens * 2 * 3 * inner
    return tokens * (2 * 2 + 1) * inner + 3 * inner * shape.config.hidden_size


def layer_working_bytes(shape: TrainShape, layer: int) -> int:
    """What a layer needs only while it runs, if that is much."""
    config, layout, tokens = shape.config, shape.layout, shape.local_tokens
    found = 0
    if config.experts is not None and config.experts.layers[layer]:
        # The gradient of the rows of a token's experts.
        found = 2 * tokens * config.experts.per_token * config.hidden_size // shape.between
    if config.has_sinks:
        # Of a sequence the gradients of the softmax and of scores, in float32, and of the mask.
        found = max(found, (2 * 4 + 2) * (config.num_heads // layout.tp) * shape.length * (shape.length + 1))
    if layout.cp > 1 and layout.context == "ring":
        found = max(found, _ring_bytes(shape, config.windows[layer]))
    return found


def _ring_bytes(shape: TrainShape, window: int | None) -> int:
    """Of ring attention, in its backward pass."""
    config, parts = shape.config, shape.layout.tp
    heads, kv_heads = config.num_heads // parts, config.num_kv_heads // parts
    if window is None or window >= shape.length:
        # In float32 the queries' gradient, the library's sum of it and what is added; in bfloat16 theirs of a turn, and
        # those of keys and values for each query head. Two pairs of keys and values under way, with float32 gradients,
        # and the gradients of a turn.
        vectors = (3 * 4 + 3 * 2) * heads + 2 * (2 * 2 + 2 * 4 + 2) * kv_heads
        return shape.local_tokens * vectors * config.head_dim
    piece = -(-shape.length // (2 * shape.layout.cp))
    vectors = (4 * heads + 6 * kv_heads) * config.head_dim
    # Scores, their gradient and the softmax of a block; queries, result, keys and values with gradients: float32.
    return 4 * (3 * heads * piece * piece + shape.local_tokens * vectors)


def recurrent_bytes(config: RecurrenceConfig, several: bool) -> int:
    """Between the products of one layer, the input of the last included. several: sequences in a batch, of which torch
    copies what it multiplies."""
    # Each tap's inputs, and what enters silu; a gated norm's numbers in float32 and in 16 bits.
    around = 4 * (config.width + 1) * config.conv_size + (4 * 4 + 2 + 2) * config.inner_size
    if isinstance(config, StateSpaceConfig):
        return around + 4 * _state_space_elements(config, several)
    return around + 4 * _gated_delta_elements(config, several)


def _state_space_elements(config: StateSpaceConfig, several: bool) -> int:
    """Inputs; what goes into and out of states, of each head and of each group; scores within a chunk; the states
    before it."""
    heads, inner, size = config.heads, config.inner_size, config.state_size
    within = (3 + several) * inner + 3 * heads * size + 2 * config.groups * size + 4 * heads * _CHUNK
    return within + inner * size // _CHUNK


def _gated_delta_elements(config: GatedDeltaConfig, several: bool) -> int:
    """Keys and queries, of each head and of each key head; values; scores and the system within a chunk; the states
    before it."""
    heads, inner, size = config.heads, config.inner_size, config.key_dim
    within = (3 + 5 * several) * heads * size + 2 * config.key_heads * size + 4 * inner + 6 * heads * _CHUNK
    return within + inner * size // _CHUNK
