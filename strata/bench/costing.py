"""A model named on the command line, on the meta device: its config, its graphs and its batches, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from strata.files.json_object import read_existing_object
from strata.graph.capture import capture, capture_head
from strata.graph.cost import StepCosts, meta_indices, meta_pages, operation_counts, step_costs
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.hardware.roofline import Workload
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.models.families import build
from strata.models.shapes import SHAPES


def find_config(model: str) -> ModelConfig:
    """The config of a named shape, a checkpoint folder or a config.json. Raises ValueError if it is none of them."""
    if model in SHAPES:
        return config_from_dict(SHAPES[model], model)
    path = Path(model)
    if path.is_dir():
        return read_config(path)
    if not path.is_file():
        raise ValueError(
            f"{model!r} is neither a folder nor a file nor a known shape; give a checkpoint folder, a config.json, "
            f"or one of {', '.join(SHAPES)}"
        )
    values = read_existing_object(path)
    return config_from_dict(values, str(path))


@dataclass(frozen=True)
class MetaModel:
    """A model without weights: its merged and fused graph and that of its head, in `dtype`.

    captured: how many nodes of each operation the graph had before it was merged and fused.
    """

    config: ModelConfig
    dtype: torch.dtype
    graph: fx.GraphModule
    head: fx.GraphModule
    captured: dict[str, int]

    def batch(self, workload: Workload, page_size: int = 16) -> Batch:
        """What the graph is called with in a step of that workload."""
        config = self.config
        pages = meta_pages(
            workload,
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            page_size=page_size,
        )
        tokens = meta_indices(workload.tokens)
        return Batch(tokens, tokens, meta_indices(len(workload.new) + 1), max(workload.new), pages)

    def step_costs(self) -> StepCosts:
        """The least that steps of this model cost."""
        return step_costs(self.graph, self.head, self.batch(Workload((1,), (1,))))


def meta_model(config: ModelConfig, dtype: torch.dtype | None = None) -> MetaModel:
    """Build, capture, merge and fuse a model; `dtype` is the checkpoint's by default, bfloat16 if that says nothing."""
    dtype = dtype or config.dtype or torch.bfloat16
    with torch.device("meta"):
        model = build(config).to(dtype)
    graph = capture(model)
    captured = dict(operation_counts(graph))
    return MetaModel(config, dtype, fuse(merge(graph)), capture_head(model), captured)


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which the device database lists a dtype."""
    return str(dtype).removeprefix("torch.")
