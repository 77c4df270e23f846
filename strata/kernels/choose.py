"""Which kernel runs a call: the only place where one is chosen.

What a device's table of measured calls lists (`kernels.tuned`) comes first: an implementation that such calls prefer
says in `supports` that it takes those alone. Then what the rules expect, of which each threshold is a row of a device's
table, with the measurement that it comes from. Then the order in which implementations were registered, the reference
last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from strata.kernels import tuned
from strata.kernels.device_limits import DeviceLimits, implementations_for

Candidate = TypeVar("Candidate")
# Of a device without a table of its own, thresholds are those of this one.
MEASURED = "NVIDIA H200"
_FOLDER = Path(__file__).parent / "thresholds"


def first_fitting(
    ways: Sequence[tuple[Callable[..., bool] | None, Candidate]], given: tuple[Any, ...]
) -> Candidate | None:
    """Of candidates in order of preference, each behind what tells whether it can run a call, the first that can; None
    if none can. given: see `Operation.call_args`."""
    for supports, candidate in ways:
        if supports is None or supports(*given):
            return candidate
    return None


@dataclass(frozen=True)
class Thresholds:
    """Where one kernel, or one kind of step, takes over from another on a device.

    local_choices: of more choices, those of other ranks too, a rank's experts are multiplied by the library.
    choice_tokens: of up to so many tokens each reads the weights of its experts by itself. converted_rows: of up to so
    many rows an expert packed weights become floats where their scheme rounds activations, of more both are multiplied
    in 8 bits. library_rows: of more rows an expert, what leads out of experts is the library's product. sorted_choices:
    up to so many choices are sorted by expert in one launch. gated_rows: of so many rows or more a product with gating
    is ours whole. linear_rows: of more rows a product that the library has, too, is the library's. quantized_rows: of
    more rows a product is in 8 bits where the weight's scheme rounds activations; others multiply them as they are.
    chunked_tokens: with so many new tokens of a sequence or more a recurrence goes chunk after chunk, and with
    parallel_chunk_tokens, and parallel_chunk_tokens_each for each sequence of the step, its chunks run side by side.
    split_rows: up to so many rows products in 8 bits may divide the width.

    By the number of ranks: one_shot_bytes: of the largest message that is added up in one shot; flagged_bytes: with its
    norm in one shot with flags. one_shot_norm_bytes: with its norm from packets. sent_rows: up to so many rows of a
    product are sent instead of stored. quantized_message_tokens: from so many tokens on sums travel in 8 bits.

    fused_rows: up to so many rows, products take up norms, gating and residuals; beyond, where that is faster by the
    table of tuned kernels, in which fused ones take fused_in_layers times what they take alone, or up to
    fused_rows_unmeasured if none tells.
    """

    local_choices: int
    choice_tokens: int
    converted_rows: int
    library_rows: int
    sorted_choices: int
    gated_rows: int
    linear_rows: int
    quantized_rows: int
    chunked_tokens: int
    parallel_chunk_tokens: int
    parallel_chunk_tokens_each: int
    split_rows: int
    one_shot_bytes: Mapping[int, int]
    flagged_bytes: Mapping[int, int]
    one_shot_norm_bytes: int
    sent_rows: int
    quantized_message_tokens: int
    fused_rows: int
    fused_rows_unmeasured: int
    fused_in_layers: float


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    value: Any
    measured: str


class _ThresholdFile(msgspec.Struct, forbid_unknown_fields=True):
    device: str
    thresholds: list[_Row]


def thresholds(device: torch.device | DeviceLimits) -> Thresholds:
    """Those of a device, also of one that a tensor on the meta device stands for."""
    # Which device "meta" stands for may change; that of all others is looked up once.
    is_meta = isinstance(device, torch.device) and device.type == "meta"
    return _find(device) if is_meta else _known(device)


@cache
def _known(device: torch.device | DeviceLimits) -> Thresholds:
    return _find(device)


def _find(device: torch.device | DeviceLimits) -> Thresholds:
    is_cuda = isinstance(device, DeviceLimits) or implementations_for(device) == "cuda"
    return thresholds_of(DeviceLimits.of(device).product if is_cuda else MEASURED)


@cache
def thresholds_of(product: str) -> Thresholds:
    """Those of a device by the name that its driver reports. Raises ValueError for a table that is none."""
    path = tuned.path_of(product, _FOLDER)
    if not path.is_file() and product != MEASURED:
        return thresholds_of(MEASURED)
    try:
        read = msgspec.json.decode(path.read_bytes(), type=_ThresholdFile)
        found = {row.name: row.value for row in read.thresholds if row.measured}
        wanted = {field.name for field in fields(Thresholds)}
        if found.keys() != wanted or len(read.thresholds) != len(wanted):
            raise ValueError(f"{path} must have one row, with its measurement, for each of {', '.join(sorted(wanted))}")
        return msgspec.convert(found, Thresholds, strict=False)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no table of thresholds: {error}") from None
