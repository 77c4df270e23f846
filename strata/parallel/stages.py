"""A model is cut into the stages of a pipeline: embedding, layers, last norm and head, under the checkpoint's names."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from strata.kernels.activation.scale import scale
from strata.kernels.attention.spec import AttentionSpec
from strata.models.batch import Batch
from strata.models.layers import CausalLM, Decoder, layer_angles

Span = tuple[int, int]  # first layer, end


class DecoderStages(nn.Module):
    """What one rank holds of a `Decoder`: the layers of its stages, and what stands before and after them."""

    def __init__(self, decoder: Decoder, spans: Sequence[Span], own: Sequence[int]) -> None:
        super().__init__()
        self.spans = tuple(spans)
        self.embed_tokens = decoder.embed_tokens if 0 in own else None
        # Not a list: layers keep their numbers and so their names.
        self.layers = nn.ModuleDict(
            {str(layer): decoder.layers[layer] for stage in own for layer in range(*spans[stage])}
        )
        self.norm = decoder.norm if len(spans) - 1 in own else None
        self.embedding_scale = decoder.embedding_scale
        self.rotary, self.window_rotary = decoder.rotary, decoder.window_rotary

    def forward(self, batch: Batch, hidden: Tensor | None, stage: int) -> Tensor:
        if self.embed_tokens is not None and hidden is None:
            hidden = self.embed_tokens(batch.tokens)
            if self.embedding_scale is not None:
                hidden = scale(hidden, self.embedding_scale)
        angles, window_angles = layer_angles(batch.positions, self.rotary, self.window_rotary)
        for number in range(*self.spans[stage]):
            layer = self.layers[str(number)]
            hidden = layer(hidden, batch, *(window_angles if layer.has_window else angles))
        if self.norm is not None and stage == len(self.spans) - 1:
            hidden = self.norm(hidden)
        assert hidden is not None, f"stage {stage} was given no hidden states"
        return hidden


class ModelStages(nn.Module):
    """What one rank of a pipeline holds of a `CausalLM`: all its stages, every parameter once on one rank.

    forward: the batch, the hidden states [tokens, hidden] that the stage before made (None for the first stage) and
    the number of the stage, to its hidden states, after the last norm for the last stage.

    vocab_size, hidden_size: of the whole model. shares_embedding: whether this rank's last stage uses a tied embedding
    that is a parameter of another rank. trains_embedding: whether any rank's embedding has a gradient.
    """

    def __init__(self, model: CausalLM, spans: Sequence[Span], own: Sequence[int]) -> None:
        """model: whole, or on the meta device. spans: the layers of each stage. own: the stages of this rank."""
        super().__init__()
        self.model = DecoderStages(model.model, spans, own)
        self.own = tuple(own)
        self.stages = len(spans)
        is_last = self.stages - 1 in own
        self.lm_head = model.lm_head if is_last else None
        self.is_tied = model.lm_head is None
        self.shares_embedding = self.is_tied and is_last and 0 not in own
        self.vocab_size, self.hidden_size = model.model.embed_tokens.weight.shape
        self.trains_embedding = model.model.embed_tokens.weight.requires_grad

    def forward(self, batch: Batch, hidden: Tensor | None, stage: int) -> Tensor:
        return self.model(batch, hidden, stage)


def layer_spans(model: CausalLM, stages: int, length: int) -> list[Span]:
    """The layers of each stage, at least one, so that the costliest stage costs as little as possible.

    A cost is counted in multiplications for a token: elements of matrices, and attention in a sequence of `length`
    tokens. The head counts, the embedding does not. Of equal divisions the most even one is taken. The model may be on
    the meta device. Raises ValueError if there are more stages than layers.
    """
    costs = [_layer_cost(layer, length) for layer in model.model.layers]
    if stages > len(costs):
        raise ValueError(f"{stages} stages exceed the {len(costs)} layers of the model; choose a smaller pp or 1f1b")
    head = model.model.embed_tokens.weight.numel()
    return balance([*costs[:-1], costs[-1] + head], stages)


def balance(costs: Sequence[float], parts: int) -> list[Span]:
    """Divide a row of costs into `parts` runs whose largest sum is least, and of those the most even ones."""
    totals = [0.0]
    for cost in costs:
        totals.append(totals[-1] + cost)
    # For every end the best division of what lies before: largest sum, sum of squares, and where its runs begin.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *([None] * len(costs))]
    for _ in range(parts):
        longer: list[tuple[float, float, tuple[int, ...]] | None] = [None] * len(best)
        for end in range(1, len(best)):
            found = []
            for start in range(end):
                if (before := best[start]) is not None:
                    run = totals[end] - totals[start]
                    found.append((max(before[0], run), before[1] + run * run, (*before[2], start)))
            longer[end] = min(found, default=None)
        best = longer
    chosen = best[-1]
    assert chosen is not None, "more parts than costs"
    return list(zip(chosen[2], (*chosen[2][1:], len(costs)), strict=True))


def _layer_cost(layer: nn.Module, length: int) -> float:
    matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    attention = getattr(layer, "self_attn", None)
    if attention is None:  # a recurrence
        return matrices
    assert isinstance(attention.spec, AttentionSpec)
    window = attention.spec.window
    seen = length / 2 if window is None else min(length / 2, window)
    width: int = attention.get_parameter("o_proj.weight").shape[1]
    return matrices + 2 * width * seen
