"""The layers that the families share, with the checkpoint's parameter names.

Parameters are created uninitialized: fill them with `strata.models.weights.load` or `strata.models.initialize`.
"""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from strata.kernels.activation.scale import scale, softcap
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.linear.embedding import embedding
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm, wide_rms_norm
from strata.kernels.rotary.rope import partial_rope, rope, rope_angles
from strata.kernels.state.groups import of_group
from strata.kernels.state.kv_write import kv_write
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.rotary import Rotary
from strata.models.state import LayerState, attention_states, group_numbers


class Linear(nn.Module):
    """y = x W^T (+ b): [..., inputs] to [..., outputs]; weight [outputs, inputs]."""

    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        if bias:
            self.bias = nn.Parameter(torch.empty(outputs))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class TokenEmbedding(nn.Module):
    """Token ids [tokens] to their rows of weight [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """Root mean square normalization over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class WideRMSNorm(RMSNorm):
    """`RMSNorm` that multiplies by `offset + weight`, in float32 until the end."""

    offset: ClassVar[float] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return wide_rms_norm(x, self.weight, self.eps, self.offset)


class OffsetRMSNorm(WideRMSNorm):
    """`WideRMSNorm` that multiplies by `1 + weight`."""

    offset: ClassVar[float] = 1.0


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), [tokens, hidden] to the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, intermediate, bias=bias)
        self.up_proj = Linear(hidden, intermediate, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions: [tokens, hidden] to the same.

    A query sees the keys of its own sequence up to its own position, the last `config.windows[layer]` of them when
    the layer has a window. The batch says whether keys come from this batch alone or from the pages. Layers that
    `config.rotated` leaves unrotated learn of positions from the causal order alone (Yang et al. 2025, RNoPE).

    qkv_bias, output_bias: whether projections have biases; None: as `config.attention_bias` says. head_norm: of queries
    and of keys, over head_dim, shared by the heads, unless `config.head_norms` is false; None: there is none.
    """

    qkv_bias: ClassVar[bool | None] = None
    output_bias: ClassVar[bool | None] = None
    head_norm: ClassVar[type[RMSNorm] | None] = None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        qkv_bias = config.attention_bias if self.qkv_bias is None else self.qkv_bias
        output_bias = config.attention_bias if self.output_bias is None else self.output_bias
        self.head_dim = config.head_dim
        self.is_partial = config.rotary_dim < config.head_dim
        self.is_rotated = not config.rotated or config.rotated[layer]
        self.spec = AttentionSpec(layer, config.attention_scale, config.windows[layer])
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, bias=qkv_bias)
        self.k_proj = Linear(config.hidden_size, keys, bias=qkv_bias)
        self.v_proj = Linear(config.hidden_size, keys, bias=qkv_bias)
        self.o_proj = Linear(queries, config.hidden_size, bias=output_bias)
        self.q_norm = self.k_norm = None
        if self.head_norm is not None and config.head_norms is not False:
            self.q_norm, self.k_norm = (self.head_norm(config.head_dim, config.norm_eps) for _ in range(2))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim], not yet rotated."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return (q, k, v) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k), v)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries or keys [tokens, heads, head_dim], rotated by the angles of their positions (`rope_angles`)."""
        if not self.is_rotated:
            return x
        return partial_rope(x, cos, sin) if self.is_partial else rope(x, cos, sin)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q = self.rotate(q, cos, sin)
        k = self.rotate(k, cos, sin)
        k, v = kv_write(k, v, batch.pages, self.spec.layer)
        return self.o_proj(self.mix(q, k, v, batch).flatten(-2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Rotated queries and keys, and values, to what each head finds: [tokens, heads, head_dim]."""
        return attention(q, k, v, batch, self.spec)


class LayerAttention(Protocol):
    """What a layer attends by: `Attention`, or another module that is called alike. spec: what it fixes."""

    spec: AttentionSpec

    def __call__(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor: ...


class MakesAttention(Protocol):
    """A class of attention, or what chooses one by the layer."""

    def __call__(self, config: ModelConfig, layer: int) -> LayerAttention: ...


class Layer(nn.Module):
    """What `Decoder.forward` calls one after another: hidden states, batch and angles to hidden states."""

    @property
    def has_window(self) -> bool:
        """Whether its angles are those of layers with a window."""
        return False


class DecoderLayer(Layer):
    """Pre-norm residual block: attention, then the MLP."""

    def __init__(self, config: ModelConfig, attention: LayerAttention, norm: type[RMSNorm]) -> None:
        """norm: what normalizes hidden states."""
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = norm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    @property
    def has_window(self) -> bool:
        return self.self_attn.spec.window is not None

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


Angles = tuple[Tensor, Tensor]


def layer_angles(
    positions: Tensor, rotary: Rotary | None, window_rotary: Rotary | None
) -> tuple[Angles, Angles] | tuple[tuple[None, None], tuple[None, None]]:
    """Cosines and sines (`rope_angles`) for layers that see everything, and for those with a window; None without
    attention."""
    if rotary is None:
        return (None, None), (None, None)
    cos, sin = rope_angles(positions, rotary.table)
    if window_rotary is None:
        return (cos, sin), (cos, sin)
    window_cos, window_sin = rope_angles(positions, window_rotary.table)
    return (cos, sin), (window_cos, window_sin)


class Decoder(nn.Module):
    """Embedding, decoder layers, last norm: what checkpoints call `model`.

    embedding_scale: what embeddings are multiplied by; None: nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[Layer],
        norm: RMSNorm,
        embedding_scale: float | None,
        max_length: int,
        groups: tuple[int, ...],
    ) -> None:
        """groups: of each layer, by the state that it keeps (`group_numbers`)."""
        super().__init__()
        self.groups = groups
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.embedding_scale = embedding_scale
        self.rotary = None
        if any(config.attends):
            self.rotary = Rotary(config.rope, config.rotary_dim, config.max_length, max_length)
        self.window_rotary = None
        if config.window_rope is not None:
            self.window_rotary = Rotary(config.window_rope, config.rotary_dim, config.max_length, max_length)

    def embed(self, tokens: Tensor) -> Tensor:
        """The hidden states [tokens, hidden] that enter the first layer."""
        x = self.embed_tokens(tokens)
        return x if self.embedding_scale is None else scale(x, self.embedding_scale)

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch.tokens)
        angles, window_angles = layer_angles(batch.positions, self.rotary, self.window_rotary)
        batches = [of_group(batch, group) for group in range(max(self.groups) + 1)] if any(self.groups) else [batch]
        for layer, group in zip(self.layers, self.groups, strict=True):
            x = layer(x, batches[group], *(window_angles if layer.has_window else angles))
        return self.norm(x)


class CausalLM(nn.Module):
    """A decoder and its head: Llama (Touvron et al. 2023) as it is, and what other families change.

    forward: Batch to hidden states [tokens, hidden] after the last norm.
    head: hidden states [rows, hidden] to logits [rows, vocab]; apart, so that only wanted rows are projected.
    attention: of one layer, by its number. decoder_layer: a layer around its attention. norm: of hidden states.
    joined: by their names in a layer, the matrices that checkpoints of the family hold one above the other in one, and
    what these parts are called (`strata.models.joined`). has_layers_behind: whether checkpoints may hold layers after
    the last, which predict further tokens and are not read. passed_over: how names of other tensors begin that
    checkpoints may hold and that are not read. renamed: parts of names of parameters, and what stands
    there in checkpoints of the family; the first that a name has counts.
    """

    attention: ClassVar[MakesAttention] = Attention
    decoder_layer: ClassVar[type[DecoderLayer]] = DecoderLayer
    norm: ClassVar[type[RMSNorm]] = RMSNorm
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    has_layers_behind: ClassVar[bool] = False
    passed_over: ClassVar[tuple[str, ...]] = ()
    renamed: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: ModelConfig, max_length: int) -> None:
        super().__init__()
        layers = [self.layer(config, layer) for layer in range(config.num_layers)]
        groups = group_numbers(self.states(config))
        scaled = self.embedding_scale(config)
        self.model = Decoder(config, layers, self.last_norm(config), scaled, max_length, groups)
        self.logit_softcap = config.logit_softcap
        # A tied head has no parameter of its own, so there is nothing that could come apart.
        self.lm_head = None if config.tied else Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def layer(cls, config: ModelConfig, layer: int) -> Layer:
        """One layer, by its number."""
        return cls.decoder_layer(config, cls.attention(config, layer), cls.norm)

    @classmethod
    def last_norm(cls, config: ModelConfig) -> RMSNorm:
        """What hidden states pass through before the head."""
        return cls.norm(config.hidden_size, config.norm_eps)

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float | None:
        """What embeddings are multiplied by."""
        return None

    @staticmethod
    def states(config: ModelConfig) -> tuple[LayerState, ...]:
        """What each layer keeps of a sequence."""
        return attention_states(config)

    def forward(self, batch: Batch) -> Tensor:
        return self.model(batch)

    def head(self, hidden: Tensor) -> Tensor:
        weight = self.model.embed_tokens.weight
        logits = linear(hidden, weight, None) if self.lm_head is None else self.lm_head(hidden)
        return logits if self.logit_softcap is None else softcap(logits, self.logit_softcap)
