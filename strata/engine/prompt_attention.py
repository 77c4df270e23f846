"""Whether cuDNN attends for the prompts of an engine's recorded steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from strata.cache.block_tables import table_pages
from strata.cache.pool import KVPool
from strata.kernels.attention.cudnn_plan import PlanShape, plan_for, why_no_plan
from strata.kernels.device_limits import DeviceLimits
from strata.models.config import ModelConfig


def library_limit(limits: DeviceLimits, config: ModelConfig, dtype: torch.dtype, page_size: int) -> str | None:
    """Why it cannot be, in words; None if it should."""
    if None not in config.windows:
        return "all layers have windows"
    return why_no_plan(limits, dtype, config.head_dim, page_size)


def has_library_plan(config: ModelConfig, pool: KVPool, max_length: int, log: Callable[[str], None]) -> bool:
    """Make the plan that all layers share, which takes a second. False, once a line has said why, if that fails."""
    shape = PlanShape(
        dtype=pool.shape.dtype,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        query_row=(config.num_heads + config.num_kv_heads) * config.head_dim,
        pages=pool.pages,
        page_size=pool.shape.page_size,
        most_pages=table_pages(max_length, pool.shape.page_size),
        scale=config.head_dim**-0.5,
    )
    try:
        plan_for(shape, pool.keys[0].device)
    except Exception as error:  # the library's own kinds, and those of a front end that does not fit it
        log(without_library(str(error).strip().partition("\n")[0]))
        return False
    return True


def without_library(reason: str) -> str:
    """The line that says that steps run without it."""
    return f"recorded steps attend for prompts without cuDNN: {reason}"
