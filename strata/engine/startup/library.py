"""Whether cuDNN attends for prompts: made sure of, before steps are recorded with it."""

from __future__ import annotations

import torch

from strata.cache.block_tables import table_pages
from strata.cache.pool import KVPool
from strata.engine.recorded_steps import fresh_rows_of
from strata.engine.startup.clock import Log
from strata.kernels.attention.cudnn_plan import Packed, Pages, PlanShape, plan_for
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
    row, page_size = (heads + kv_heads) * width, pool.shape.page_size
    sources: list[Pages | Packed] = []
    if pool.shape.rounded is None:
        sources.append(Pages(pool.pages, page_size, table_pages(max_length, page_size)))
    if fresh:
        rows = fresh_rows_of(heads, pool.shape)
        assert rows.values is not None
        sources.append(Packed(rows.key_row, rows.values))
    try:
        for scale in sorted(scales):
            for source in sources:
                shape = PlanShape(pool.shape.dtype, heads, kv_heads, width, row, scale, source)
                plan_for(shape, pool.keys[0].device)
    except Exception as error:  # the library's own kinds, and those of a front end that does not fit it
        log(without_library(str(error).strip().partition("\n")[0]))
        return False
    return True


def without_library(reason: str) -> str:
    """The line that says that steps run without it."""
    return f"steps attend for prompts without cuDNN: {reason}"
