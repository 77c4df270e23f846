"""A model named on the command line, on the meta device: its config and its graphs, without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from strata.comm.mesh import Axis
from strata.cost.step_model import dtype_name
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.program.meta_model import MetaModel
from strata.engine.program.program import StepProgram
from strata.engine.program.source import Target
from strata.engine.step_cost import token_sharding
from strata.files.json_object import read_existing_object
from strata.hardware.figures import Device
from strata.kernels.device_limits import DeviceLimits, implementations_for
from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.models.families import build
from strata.models.shapes import SHAPES
from strata.parallel.serving_shard import RankShard


def find_config(model: str) -> ModelConfig:
    """The config of a named shape, a checkpoint folder or a config.json. Raises ValueError if it is none of them."""
    if model in SHAPES:
        return config_from_dict(SHAPES[model], model)
    path = Path(model)
    if model and path.is_dir():  # no name is no folder
        return read_config(path)
    if not path.is_file():
        raise ValueError(
            f"{model!r} is neither a folder nor a file nor a known shape; give a checkpoint folder, a config.json, "
            f"or one of {', '.join(SHAPES)}"
        )
    values = read_existing_object(path)
    return config_from_dict(values, str(path))


def meta_model(
    config: ModelConfig,
    device: Device | None,
    dtype: torch.dtype | None = None,
    shard: RankShard | None = None,
    context: Axis | None = None,
    folder: Path | None = None,
    **options: Any,
) -> MetaModel:
    """What an engine of a model runs on a device; None: on a CPU.

    dtype: the checkpoint's by default, bfloat16 if that says nothing. shard: of `config`, for the graphs of its rank.
    context: along which ranks divide the tokens of steps. folder: of the checkpoint, which may be packed. options: of
    `EngineConfig`. Raises ValueError for what an engine refuses.
    """
    asked = _asked(config, dtype or config.dtype or torch.bfloat16, shard, context, folder, options)
    return engine_model(asked, config, device, shard, context)


def engine_model(
    asked: EngineConfig,
    config: ModelConfig,
    device: Device | None,
    shard: RankShard | None = None,
    context: Axis | None = None,
) -> MetaModel:
    """The same of an engine that is asked for so."""
    limits = None if device is None else DeviceLimits.listed(device)
    own = config if shard is None else shard.config
    sizes = EngineSizes.of(asked, own, torch.device("cpu" if limits is None else "cuda"), limits, shard)
    with torch.device("meta"):
        model = (build(own) if shard is None else shard.build()).to(sizes.pool.dtype)
    has_copies = shard is not None and shard.size == 2  # as `with_peer_copies` finds if the machine allows it
    target = Target(
        "cpu" if limits is None else implementations_for(limits),
        limits,
        device if has_copies else None,
        shard,
        context=context,
        packed=sizes.packing.planned,
    )
    program = StepProgram.of(model, asked, target, sizes)
    made = MetaModel(own, limits, program, sizes, shard, asked.deterministic)
    if context is None or limits is None:
        return made
    return replace(made, program=replace(program, division=token_sharding(made, context, "cuda", limits.product)))


def _asked(
    config: ModelConfig,
    dtype: torch.dtype,
    shard: RankShard | None,
    context: Axis | None,
    folder: Path | None,
    options: dict[str, Any],
) -> EngineConfig:
    """The options of an engine that has such ranks."""
    load_format = "dummy" if folder is None else "auto"
    given = {"dtype": dtype_name(dtype), "load_format": load_format} | options
    if shard is not None:
        given |= {
            "tensor_parallel_size": shard.size,
            "pipeline_parallel_size": shard.stages,
            "decode_context_parallel_size": shard.kept.ranks,
            "enable_dp_attention": shard.attention_dp,
            "enable_expert_parallel": shard.attention_dp,
        }
    if context is not None:
        given["prefill_context_parallel_size"] = context.size
    return EngineConfig(str(folder or config.architecture), **given)
