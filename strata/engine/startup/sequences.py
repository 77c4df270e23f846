"""How many sequences run at once where nobody says it: as many as find room and make the engine faster."""

from __future__ import annotations

from dataclasses import replace

import torch

from strata.cost.evidence import MEMORY, PRODUCTS
from strata.engine.engine_config import MAX_NUM_SEQS, EngineConfig
from strata.engine.startup.memory import RankPlace, RankSetup, listed_memory, rank_ledger, rank_setup
from strata.hardware.figures import Device
from strata.hardware.specs import recognize
from strata.kernels.device_limits import DeviceLimits
from strata.models.config import ModelConfig

# What a layer's eight kernels take longer than their work, because they begin and end.
_LAYER_SECONDS = 35e-6
# Tokens that each of them has on average: served prompts and answers are often shorter.
_TOKENS = 448
# Twice as many are chosen as long as that makes a step's tokens a second so much more.
_GAIN = 1.02
_MOST = 2048


def with_sequences(asked: EngineConfig, config: ModelConfig, place: RankPlace) -> EngineConfig:
    """What was asked, with a number of sequences: 256 or twice, four or eight times as many.

    So many find room in a device of the kind that nobody else uses, by what the first rank has of the model: all ranks
    choose alike, and so do a simulation and kernels that are compiled ahead. Of one rank, also in the device as it is.
    """
    if asked.max_num_seqs is not None or place.limits is None:
        return asked
    device = recognize(place.limits.product)
    if device is None:
        return replace(asked, max_num_seqs=MAX_NUM_SEQS)
    places = [place if place.memory is not None else listed_place(place.limits)]
    if place.memory is None and asked.ranks == 1:
        places.append(place)
    part = rank_setup(asked, config, places[0])
    count = MAX_NUM_SEQS
    while count < _MOST and _gain(part, device, count) >= _GAIN:
        count *= 2
    while count > MAX_NUM_SEQS and not all(_has_room(asked, count, config, one) for one in places):
        count //= 2
    return replace(asked, max_num_seqs=count)


def listed_place(limits: DeviceLimits) -> RankPlace:
    """Of a first rank, on a device of the kind that need not be here."""
    device = recognize(limits.product)
    return RankPlace(torch.device("cuda"), limits, memory=None if device is None else listed_memory(device))


def _gain(part: RankSetup, device: Device, count: int) -> float:
    """How many times as fast twice as many sequences make an engine.

    A step of n decodes takes `step` seconds, however many they are, and each of them its products and the way of its
    keys and states. Where the weights come sooner than the products are done, twice as many make it faster by (step + n
    * each) / (step / 2 + n * each). Of a mixture the products of all experts are counted, which is too many.
    """
    sizes = part.sizes
    token = sum(group.shape.page_bytes for group in sizes.groups) // sizes.pool.page_tokens
    state = 0 if sizes.states is None else sizes.states.row_bytes  # read and written
    memory = device.ceiling("bandwidth", measured=False).value * MEMORY
    products = device.ceiling("compute", "bfloat16", measured=False).value * PRODUCTS
    each = 2 * sizes.parameters / products + (_TOKENS * token + 2 * state) / memory
    step = part.config.num_layers * _LAYER_SECONDS
    return (step + count * each) / (step / 2 + count * each)


def _has_room(asked: EngineConfig, count: int, config: ModelConfig, place: RankPlace) -> bool:
    """Whether the memory holds all that so many sequences take, and pages for the tokens of each."""
    given = replace(asked, max_num_seqs=count)
    try:
        ledger = rank_ledger(given, config, place, rank_setup(given, config, place))
    except ValueError:
        return False
    return ledger.tokens >= count * _TOKENS
