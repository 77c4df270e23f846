"""How many sequences run at once where nobody says it: as many as find room and make the engine faster."""

from __future__ import annotations

from dataclasses import replace

from strata.engine.engine_config import MAX_NUM_SEQS, EngineConfig
from strata.engine.ledger import available_memory
from strata.engine.scheduling.step_times import LAYER_SECONDS, MEMORY, PRODUCTS
from strata.engine.startup.memory import RankPlace, rank_part
from strata.hardware.specs import recognize
from strata.models.config import ModelConfig

# Tokens that each of them has on average: served prompts and answers are often shorter.
_TOKENS = 512
# Twice as many are chosen as long as that makes a step's tokens a second so much more.
_GAIN = 1.02
_MOST = 2048


def with_sequences(asked: EngineConfig, config: ModelConfig, place: RankPlace) -> EngineConfig:
    """What was asked, with a number of sequences: 256 or twice, four or eight times as many.

    A step of n decodes takes `step` seconds, however many they are, and each of them its products and the way of its
    keys. Where the weights come sooner than the products are done, twice as many make it faster by (step + n * each) /
    (step / 2 + n * each). All ranks choose alike: by what the first has of the model, and all memory of a device of
    the kind.
    """
    if asked.max_num_seqs is not None or place.limits is None:
        return asked
    part = rank_part(asked, config, replace(place, index=0))
    sizes = part.sizes
    total = available_memory(place.device)[1] if place.memory is None else place.memory.total
    room = total * asked.gpu_memory_utilization - sizes.weight_bytes
    token = sum(group.shape.page_bytes for group in sizes.groups) // sizes.pool.page_tokens
    state = 0 if sizes.states is None else sizes.states.row_bytes
    device = recognize(place.limits.product)
    step, each = part.config.num_layers * LAYER_SECONDS, 0.0
    if device is not None:
        memory = device.ceiling("bandwidth", measured=False).value * MEMORY
        products = device.ceiling("compute", "bfloat16", measured=False).value * PRODUCTS
        each = 2 * sizes.parameters / products + _TOKENS * token / memory
    count = MAX_NUM_SEQS
    while count < _MOST and 2 * count * (_TOKENS * token + state) <= room:
        if device is None or step + count * each < _GAIN * (step / 2 + count * each):
            break
        count *= 2
    return replace(asked, max_num_seqs=count)
