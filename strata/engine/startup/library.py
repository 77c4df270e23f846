"""Whether cuDNN attends for prompts: made sure of, before steps are recorded with it."""

from __future__ import annotations

import torch

from strata.cache.block_tables import table_pages
from strata.cache.pool import KVPool
from strata.engine.recorded_steps import fresh_rows_of, gathered_rows_of
from strata.engine.startup.clock import Log
from strata.kernels.attention.cudnn_prompts import PlanShape, plan_for
from strata.kernels.attention.virtual_sequences import MAX_TOKENS
from strata.models.config import ModelConfig
from strata.models.layers import Attention


def library_scales(model: torch.nn.Module) -> set[float]:
    """What the layers that cuDNN can attend for multiply their scores by: a plan is made for each, mostly one."""
    specs = (module.spec for module in model.modules() if isinstance(module, Attention))
    return {spec.scale for spec in specs if spec.window is None}


def has_library_plan(
    config: ModelConfig, scales: set[float], pool: KVPool, max_length: int, fresh: bool, log: Log
) -> bool:
    """Make the plans that layers share, of which the first takes a second; fresh: also for steps over their own keys.
    False, once a line has said why, if that fails."""
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    page_size = pool.shape.page_size
    rows = [(fresh_rows_of(heads, pool.shape), MAX_TOKENS)] if fresh else []
    if pool.shape.rounded is None:
        rows.append((gathered_rows_of(heads, pool.shape), table_pages(max_length, page_size) * page_size))
    try:
        for scale in sorted(scales):
            for own, longest in rows:
                vectors = own.queries, own.keys, own.values
                shape = PlanShape(pool.shape.dtype, heads, kv_heads, width, *vectors, longest, scale)
                plan_for(shape, pool.keys[0].device)
    except Exception as error:  # the library's own kinds, and those of a front end that does not fit it
        log(without_library(str(error).strip().partition("\n")[0]))
        return False
    return True


def without_library(reason: str) -> str:
    """The line that says that steps run without it."""
    return f"steps attend for prompts without cuDNN: {reason}"
