"""What config.json says of the mathematics, read strictly, in the classic form and in that of transformers 5."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from strata.files.fields import Fields
from strata.files.json_object import read_existing_object
from strata.models.expert_config import ExpertsConfig
from strata.models.family.fixed_fields import WITHOUT_EFFECT, take_fixed
from strata.models.family.latent_config import LatentConfig, read_latent
from strata.models.family_config import FAMILY_CONFIGS, FamilyConfig, RecurrenceConfig
from strata.models.layer_config import read_rotated, read_windows
from strata.models.quantized.method import QUANTIZED_METHODS, take_method
from strata.models.recurrence.granite_config import Multipliers, read_multipliers
from strata.models.recurrence.state_space_config import StateSpaceConfig
from strata.models.rope_config import Ropes, read_ropes, write_ropes
from strata.models.rotary import RopeConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """One model. Sizes are counts of elements.

    windows: for each layer, how many of the latest tokens a query sees (itself included); None means all.
    latent: of attention whose keys and values are made from one row a token; None in other families. `head_dim` is of
        its queries and keys then, all dimensions of them.
    attention_bias, mlp_bias: the fields of that name; false in families without them.
    window_rope: of the layers with a window; None: they have the one of all.
    partial_rotary: which part of a head positions rotate, its first dimensions.
    rotated: for each layer whether positions rotate its queries and keys; empty: all do.
    head_norms: whether queries and keys are normalized; None: as the family does it anyway.
    query_scalar: attention scores are divided by its root; None: head_dim.
    logit_softcap: what keeps logits within bounds; None: nothing does.
    tied: whether the head is the embedding matrix.
    experts: None in families without them.
    recurrence: of layers that have one instead of attention; None in families without them. In a model without
        attention the heads are the recurrence's, and intermediate_size is all of them together.
    multipliers: None in families without them.
    max_length: max_position_embeddings, to which the rotary embedding relates; `longest` is what a sequence may have.
    dtype: of the checkpoint; None when config.json does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_length: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    rotated: tuple[bool, ...] = ()
    window_rope: RopeConfig | None = None
    partial_rotary: float = 1.0
    head_norms: bool | None = None
    query_scalar: int | None = None
    logit_softcap: float | None = None
    latent: LatentConfig | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    dtype: torch.dtype | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    experts: ExpertsConfig | None = None
    recurrence: RecurrenceConfig | None = None
    multipliers: Multipliers | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the checkpoint is made for."""
        return self.rope.longest(self.max_length)

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head positions rotate."""
        if self.latent is not None:
            return self.latent.rope
        return int(self.head_dim * self.partial_rotary)

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by."""
        if self.multipliers is not None:
            return self.multipliers.attention
        scale = float((self.head_dim if self.query_scalar is None else self.query_scalar) ** -0.5)
        return scale if self.latent is None else scale * self.rope.score_factor

    @property
    def attends(self) -> tuple[bool, ...]:
        """For each layer whether it has attention."""
        if self.recurrence is None:
            return (True,) * self.num_layers
        return tuple(not recurrent for recurrent in self.recurrence.layers)

    @property
    def has_sinks(self) -> bool:
        """Whether each head has a learned score in the softmax of all its queries."""
        return FAMILY_CONFIGS[self.architecture].has_sinks

    @property
    def has_query_gates(self) -> bool:
        """Whether a gate of each query lets its result through, made by the same product."""
        return FAMILY_CONFIGS[self.architecture].has_query_gates

    @property
    def num_experts(self) -> int:
        """Of a layer that has some; 0 in families without them."""
        return 0 if self.experts is None else self.experts.count

    @property
    def layer_kinds(self) -> list[tuple[Any, ...]]:
        """For each layer what it may have other than its neighbours: window, rotation, experts, attention."""
        rotated = self.rotated or (True,) * self.num_layers
        sparse = (False,) * self.num_layers if self.experts is None else self.experts.layers
        return list(zip(self.windows, rotated, sparse, self.attends, strict=True))

    def with_layers(self, layers: Sequence[int]) -> ModelConfig:
        """The config of a model of these layers alone, by their numbers here."""
        experts = self.experts
        if experts is not None:
            experts = replace(experts, layers=tuple(experts.layers[layer] for layer in layers))
        recurrence = self.recurrence
        if recurrence is not None:
            recurrence = replace(recurrence, layers=tuple(recurrence.layers[layer] for layer in layers))
        return replace(
            self,
            num_layers=len(layers),
            windows=tuple(self.windows[layer] for layer in layers),
            rotated=tuple(self.rotated[layer] for layer in layers) if self.rotated else (),
            experts=experts,
            recurrence=recurrence,
        )

    def to_dict(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 and vLLM read; `config_from_dict` gives this config again."""
        family = FAMILY_CONFIGS[self.architecture]
        values: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "max_position_embeddings": self.max_length,
            family.norm_eps_key: self.norm_eps,
            "tie_word_embeddings": self.tied,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None,
            "pad_token_id": self.pad_id,
        }
        if self.dtype is not None:
            values["torch_dtype"] = str(self.dtype).removeprefix("torch.")
        if family.attends:
            values |= {
                family.intermediate_key: self.intermediate_size,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                **write_ropes(self.rope, self.window_rope),
            }
        return values | family.family_fields(self)


def read_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder. Raises ValueError if it is missing, is not JSON, or cannot be honoured."""
    path = Path(folder) / "config.json"
    try:
        values = read_existing_object(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; a model folder needs a config.json") from None
    return config_from_dict(values, str(path))


def config_from_dict(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The config that the contents of a config.json describe; `where` names them in errors.

    Raises ValueError, naming field and value, for an unknown architecture, activation or rope type, for a missing or
    bad value, and for any field that is not known to leave the mathematics alone.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(values).__name__}")
    fields = Fields(values, where)
    architecture = _read_architecture(fields)
    family = FAMILY_CONFIGS[architecture]
    num_layers = fields.count("num_hidden_layers")
    hidden_size = fields.count("hidden_size")
    recurrence = None if family.recurrence is None else family.recurrence[0](fields, hidden_size, num_layers)
    latent = None
    if not family.attends:
        assert isinstance(recurrence, StateSpaceConfig)
        num_heads = num_kv_heads = recurrence.heads
        head_dim, intermediate_size = recurrence.head_dim, recurrence.inner_size
    else:
        intermediate_size = fields.count(family.intermediate_key)
        if family.latent is None:
            num_heads, num_kv_heads, head_dim = _read_heads(fields, family, hidden_size)
        else:
            num_heads = num_kv_heads = fields.count("num_attention_heads")
            latent = read_latent(fields, num_heads, family.latent == "paired or halves")
            head_dim = latent.nope + latent.rope
    max_length = fields.count("max_position_embeddings", family.max_length)
    rotated = read_rotated(fields, family, num_layers)
    if family.attends:
        ropes = read_ropes(fields, family, head_dim if latent is None else latent.rope, max_length)
        windows = read_windows(fields, family, num_layers, rotated)
    else:
        ropes, windows = Ropes(RopeConfig(family.rope_theta), None, 1.0), (None,) * num_layers
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number(family.norm_eps_key, family.norm_eps),
        max_length=max_length,
        rope=ropes.rope,
        window_rope=ropes.window,
        partial_rotary=ropes.partial,
        head_norms=fields.flag("use_qk_norm", False) if family.has_head_norms_field else None,
        query_scalar=family.query_scalar and fields.count("query_pre_attn_scalar", family.query_scalar),
        logit_softcap=fields.optional(fields.number, "final_logit_softcapping") if family.softcaps else None,
        latent=latent,
        windows=windows,
        rotated=rotated,
        attention_bias="attention_bias" in family.biases and fields.flag("attention_bias", family.biased),
        mlp_bias="mlp_bias" in family.biases and fields.flag("mlp_bias", family.biased),
        tied=fields.flag("tie_word_embeddings", family.tied),
        dtype=_read_dtype(fields),
        bos_id=_read_id(fields, "bos_token_id", family.bos_id),
        eos_ids=fields.ids("eos_token_id", family.eos_id),
        pad_id=_read_id(fields, "pad_token_id", family.pad_id),
        experts=None if family.experts is None else family.experts[0](fields, num_layers, intermediate_size),
        recurrence=recurrence,
        multipliers=read_multipliers(fields) if family.has_multipliers else None,
    )
    fields.choice(family.activation_key, family.activations, family.activations[0])
    _read_packing(fields, family)
    take_fixed(fields, architecture, family.fixed)
    _refuse_misspelt(fields, values, config.to_dict())
    fields.finish(WITHOUT_EFFECT)
    return config


def _refuse_misspelt(fields: Fields, values: Collection[str], known: Collection[str]) -> None:
    """Refuse an unread field whose name is almost that of a known one."""
    for key in values:
        is_unread = key not in WITHOUT_EFFECT and (fields.has(key) or fields.is_null(key))
        if is_unread and (close := get_close_matches(key, known, n=1, cutoff=0.8)):
            raise ValueError(
                f"{fields.where}: unknown field {key}; it may change the mathematics; is {close[0]} meant?"
            )


def _read_architecture(fields: Fields) -> str:
    named = fields.take("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(FAMILY_CONFIGS):
        raise fields.wrong("architectures", named, "a list with one of " + ", ".join(FAMILY_CONFIGS))
    architecture: str = named[0]
    family = FAMILY_CONFIGS[architecture]
    fields.choice("model_type", (family.model_type, *family.also_called, None), None)
    return architecture


def _read_heads(fields: Fields, family: FamilyConfig, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, key/value heads, dimensions of a head."""
    num_heads = fields.count("num_attention_heads")
    # An explicit null means as many as query heads, an absent field the default of the family.
    as_many = fields.is_null("num_key_value_heads") or family.num_kv_heads is None
    num_kv_heads = fields.count("num_key_value_heads", num_heads if as_many else family.num_kv_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}")
    default = family.head_dim
    if default is not None and fields.is_null("head_dim"):
        raise fields.wrong("head_dim", None, "a number, because this family does not derive it from the hidden size")
    if default is None and not fields.has("head_dim"):
        if hidden_size % num_heads:
            raise fields.wrong("num_attention_heads", num_heads, f"a divisor of hidden_size = {hidden_size}")
        default = hidden_size // num_heads
    head_dim = fields.count("head_dim", default)
    if head_dim % 2:
        raise fields.wrong("head_dim", head_dim, "an even number, because rotary embeddings turn pairs")
    return num_heads, num_kv_heads, head_dim


def _read_packing(fields: Fields, family: FamilyConfig) -> None:
    """What is packed, and how, is told by the checkpoint's tensors; here methods that are not read are refused."""
    values = fields.take("quantization_config", None)
    if values is None:
        return
    if not isinstance(values, dict):
        raise fields.wrong("quantization_config", values, "an object or null")
    packing = Fields(values, f"{fields.where}, quantization_config")
    own = () if family.packed is None else (family.packed,)
    if take_method(packing, (*own, *QUANTIZED_METHODS)) not in own:
        return  # the rest is read with the weights
    packing.take("modules_to_not_convert", None)  # the tensors' names tell it
    packing.finish(frozenset())


def _read_dtype(fields: Fields) -> torch.dtype | None:
    legacy = fields.choice("torch_dtype", [*DTYPES, None], None)
    name = fields.choice("dtype", [*DTYPES, None], None) or legacy
    return None if name is None else DTYPES[name]


def _read_id(fields: Fields, key: str, default: int | None) -> int | None:
    ids = fields.ids(key, default)
    if len(ids) > 1:
        raise fields.wrong(key, list(ids), "a token id or null")
    return ids[0] if ids else None
