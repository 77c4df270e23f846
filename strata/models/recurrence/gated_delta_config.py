"""What config.json says of gated delta networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strata.files.fields import Fields
from strata.models.recurrence.state_space_config import read_width

if TYPE_CHECKING:
    from strata.models.config import ModelConfig

_KINDS = {"linear_attention": True, "full_attention": False}


@dataclass(frozen=True)
class GatedDeltaConfig:
    """The gated delta networks of a model (Yang, Kautz and Hatamizadeh 2024). layers: for each layer whether it has
    one.

    heads, value_dim: of values, whose states are [key_dim, value_dim] each. key_heads, key_dim: of queries and keys;
    each head of them serves as many heads of values. width: tokens that the short convolution sees. has_mlps: these
    layers have MLPs besides. wide_residual: whether what layers add up is float32 whatever the weights are.
    """

    layers: tuple[bool, ...]
    key_heads: int
    key_dim: int
    heads: int
    value_dim: int
    width: int

    has_mlps: ClassVar[bool] = True
    wide_residual: ClassVar[bool] = False

    @property
    def inner_size(self) -> int:
        return self.heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner_size

    @property
    def product_size(self) -> int:
        """Rows of the matrices that make channels, gates, and the decays and strengths of a token."""
        return self.conv_size + self.inner_size + 2 * self.heads


def read_gated_delta(fields: Fields, hidden_size: int, num_layers: int) -> GatedDeltaConfig:
    """The fields of transformers' Qwen3NextConfig but those of attention and experts."""
    interval, types = fields.count("full_attention_interval", 4), fields.take("layer_types", None)
    if types is None:
        types = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(_KINDS) for kind in types):
        raise fields.wrong("layer_types", types, f"a list of {num_layers} of " + ", ".join(map(repr, _KINDS)))
    key_heads, heads = fields.count("linear_num_key_heads", 16), fields.count("linear_num_value_heads", 32)
    if heads % key_heads:
        raise fields.wrong("linear_num_key_heads", key_heads, f"a divisor of linear_num_value_heads = {heads}")
    return GatedDeltaConfig(
        layers=tuple(_KINDS[kind] for kind in types),
        key_heads=key_heads,
        key_dim=fields.count("linear_key_head_dim", 128),
        heads=heads,
        value_dim=fields.count("linear_value_head_dim", 128),
        width=read_width(fields, "linear_conv_kernel_dim"),
    )


def gated_delta_fields(config: ModelConfig) -> dict[str, Any]:
    """What `read_gated_delta` reads."""
    delta = config.recurrence
    assert isinstance(delta, GatedDeltaConfig)
    return {
        "layer_types": ["linear_attention" if recurrent else "full_attention" for recurrent in delta.layers],
        "linear_num_key_heads": delta.key_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_num_value_heads": delta.heads,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.width,
    }
