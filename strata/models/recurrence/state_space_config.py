"""What config.json says of recurrent layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from strata.files.fields import Fields
from strata.kernels.recurrent.short_convolution import WIDTHS

if TYPE_CHECKING:
    from strata.models.config import ModelConfig


@dataclass(frozen=True)
class StateSpaceConfig:
    """The state spaces of a model (Dao and Gu 2024). layers: for each layer whether it has one.

    heads, head_dim, state_size, groups: of its heads, whose states are [head_dim, state_size] each, and of the groups
    that share the inputs and outputs of states. width: tokens that the short convolution sees. bias, conv_bias: of the
    products around it, and of the convolution. min_step, max_step: bounds of a time step. wide_residual: whether
    what layers add up is float32 whatever the weights are. has_mlps: whether these layers have MLPs besides.
    """

    layers: tuple[bool, ...]
    heads: int
    head_dim: int
    state_size: int
    groups: int
    width: int
    bias: bool = False
    conv_bias: bool = True
    min_step: float = 0.0
    max_step: float = math.inf
    wide_residual: bool = False
    has_mlps: bool = False

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: what goes into states, and into and out of them in each group."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def product_size(self) -> int:
        """Rows of the matrix that makes gate, channels and time steps of a token."""
        return self.inner_size + self.conv_size + self.heads


# Of the values that training begins with, and of how transformers computes, or in checkpoints but not read there.
_WITHOUT_EFFECT = (
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale"),
    *("time_step_init_scheme", "rescale_prenorm_residual", "chunk_size", "norm_before_gate"),
)


class SpaceKeys(NamedTuple):
    """What a family calls the fields of its state spaces."""

    heads: str
    groups: str
    state_size: str
    width: str
    bias: str
    conv_bias: str


MAMBA2 = SpaceKeys("num_heads", "n_groups", "state_size", "conv_kernel", "use_bias", "use_conv_bias")


def read_mamba2(fields: Fields, hidden_size: int, num_layers: int) -> StateSpaceConfig:
    """The fields of transformers' Mamba2Config, whose gate always comes before the norm."""
    expand, heads, head_dim = fields.count("expand", 2), fields.count("num_heads", 128), fields.count("head_dim", 64)
    if heads * head_dim != expand * hidden_size:
        expected = f"expand * hidden_size / head_dim = {expand} * {hidden_size} / {head_dim}"
        raise fields.wrong("num_heads", heads, expected)
    for key in _WITHOUT_EFFECT:
        fields.take(key, None)
    fields.only("intermediate_size", heads * head_dim, "it follows from expand")
    space = read_space(fields, MAMBA2, (True,) * num_layers, heads, head_dim, groups=8, state_size=128)
    return replace(space, wide_residual=fields.flag("residual_in_fp32", True))


def read_space(
    fields: Fields,
    keys: SpaceKeys,
    layers: tuple[bool, ...],
    heads: int,
    head_dim: int,
    *,
    groups: int,
    state_size: int,
) -> StateSpaceConfig:
    """groups, state_size: where their fields are absent."""
    groups = fields.count(keys.groups, groups)
    if heads % groups:
        raise fields.wrong(keys.groups, groups, f"a divisor of {keys.heads} = {heads}")
    least, most = _read_limits(fields)
    return StateSpaceConfig(
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        state_size=fields.count(keys.state_size, state_size),
        groups=groups,
        width=read_width(fields, keys.width),
        bias=fields.flag(keys.bias, False),
        conv_bias=fields.flag(keys.conv_bias, True),
        min_step=least,
        max_step=most,
    )


def read_width(fields: Fields, key: str) -> int:
    width = fields.count(key, 4)
    if width not in WIDTHS:
        raise fields.wrong(key, width, "one of " + ", ".join(map(str, WIDTHS)))
    return width


def _read_limits(fields: Fields) -> tuple[float, float]:
    """Infinity is the number of that name, or transformers 5's object that names it."""
    given = fields.take("time_step_limit", None)
    if given is None:
        return 0.0, math.inf
    pair = [one.get("__float__") if isinstance(one, dict) else one for one in given] if isinstance(given, list) else []
    found: list[Any] = [math.inf if one == "Infinity" else one for one in pair]
    numbers = len(found) == 2 and all(isinstance(one, int | float) and not isinstance(one, bool) for one in found)
    if not numbers or not 0 <= found[0] < found[1]:
        raise fields.wrong("time_step_limit", given, "two numbers of at least 0, the second the larger or Infinity")
    return float(found[0]), float(found[1])


def mamba2_fields(config: ModelConfig) -> dict[str, Any]:
    """What `read_mamba2` reads."""
    space = config.recurrence
    assert isinstance(space, StateSpaceConfig)
    return space_fields(space, MAMBA2) | {
        "expand": space.inner_size // config.hidden_size,
        "head_dim": space.head_dim,
        "residual_in_fp32": space.wide_residual,
    }


def space_fields(space: StateSpaceConfig, keys: SpaceKeys) -> dict[str, Any]:
    """What `read_space` reads; `time_step_limit` where there are limits."""
    values = space.heads, space.groups, space.state_size, space.width, space.bias, space.conv_bias
    found: dict[str, Any] = dict(zip(keys, values, strict=True))
    if (space.min_step, space.max_step) != (0.0, math.inf):
        most = {"__float__": "Infinity"} if space.max_step == math.inf else space.max_step
        found["time_step_limit"] = [space.min_step, most]
    return found
