"""`strata graph`: what one step of a model costs, operation by operation, and the least time a device needs for it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.hardware.roofline import Workload, floor
from strata.hardware.specs import Device, device
from strata.models.folder import folder_shape_or_file

if TYPE_CHECKING:
    from strata.bench.costing import MetaModel
    from strata.graph.cost import NodeCost

# Beyond these, sizes of tensors no longer fit into 64 bits, or lengths of sequences into the memory.
_MOST_TOKENS, _MOST_SEQUENCES = 10**8, 10**5


def graph(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, config.json, builtin, or a shape: 0.6B, 1B, 8B, 30B-A3B.")
    ],
    tokens: Annotated[int, typer.Option(min=1, max=_MOST_TOKENS, help="New tokens of each sequence in this step.")] = 1,
    context: Annotated[
        int, typer.Option(min=0, max=_MOST_TOKENS, help="Tokens of each sequence that are cached already.")
    ] = 0,
    sequences: Annotated[int, typer.Option(min=1, max=_MOST_SEQUENCES, help="Sequences in this step.")] = 1,
    on: Annotated[str, typer.Option("--device", help="Device whose floor is shown.")] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what a step costs, by operation and by part of the model, without weights or device.

    Merged projections are joined by & (gate_proj&up_proj), fused operations by + (input_layernorm+add). The head runs
    on a row a sequence.

    Example, a decode step: strata graph 8B --context 1000 --sequences 32
    """
    from strata.bench.costing import find_config, meta_model

    spec, config = device(on), find_config(folder_shape_or_file(model))
    priced = price(meta_model(config), Workload((tokens,) * sequences, (tokens + context,) * sequences), spec)
    step = {"model": model, "tokens": tokens, "context": context, "sequences": sequences}
    if as_json:
        print(json.dumps(step | priced.to_dict()))
    else:
        priced.draw(f"{model}: {sequences} x {tokens} new tokens, {context} cached each")


@dataclasses.dataclass(frozen=True)
class PricedStep:
    """A step of a model: what its nodes cost and their floors on a device.

    captured, run: how many nodes of each operation its graph has as captured, and after the passes.
    """

    forward: list[NodeCost]
    head: list[NodeCost]
    device: Device
    dtype: str
    tokens: int
    step_floor: float
    captured: dict[str, int]
    run: dict[str, int]

    @property
    def rows(self) -> dict[str, list[Any]]:
        from strata.graph.draw import rows_by

        heads = {id(node) for node in self.head}

        def operation_of(node: NodeCost) -> tuple[str, str]:
            part = node.module.rpartition(".")[2]
            return node.operation, part if node.parameters or "+" in part else ""

        def part_of(node: NodeCost) -> tuple[str, str]:
            if id(node) in heads:
                return "", "head"
            if node.layer is not None:
                return "", "layers"
            return "", "embedding" if node.operation in ("embedding", "rope_angles") else "final norm"

        nodes = self.forward + self.head
        return {
            "operations": rows_by(nodes, operation_of, self.device, self.dtype),
            "parts": rows_by(nodes, part_of, self.device, self.dtype),
        }

    def totals(self) -> dict[str, Any]:
        """Counts, bytes and seconds of the whole step."""
        from strata.graph.cost import parameter_count, total

        nodes = self.forward + self.head
        cost = total(nodes)
        return {
            "parameters": parameter_count(nodes),
            "flops": cost.flops,
            "flops_per_token": cost.flops / self.tokens,
            "bytes": cost.bytes,
            "nodes_floor_s": sum(floor(node.cost, self.device, self.dtype).seconds for node in nodes),
            "step_floor_s": self.step_floor,
        }

    def to_dict(self) -> dict[str, Any]:
        tables = {
            name: [dataclasses.asdict(row) | {"bytes": row.cost.bytes} for row in rows]
            for name, rows in self.rows.items()
        }
        counts = {"graph": {"captured": self.captured, "run": self.run}}
        return {"device": self.device.key, "dtype": self.dtype} | self.totals() | counts | tables

    def draw(self, title: str) -> None:
        from rich.console import Console

        from strata.graph.draw import counts_table, duration, quantity, table

        console, totals, rows = Console(highlight=False), self.totals(), self.rows
        whole = totals["nodes_floor_s"]
        captured, run = (sum(counts.values()) for counts in (self.captured, self.run))
        console.print(f"{captured:,} operations, {run:,} after merging and fusion")
        console.print(counts_table(self.captured, self.run))
        console.print(table(title, rows["operations"], whole=whole))
        console.print(table("By part of the model", rows["parts"], whole=whole))
        compute, bandwidth = self.device.ceiling("compute", self.dtype), self.device.ceiling("bandwidth")
        console.print(f"parameters        {totals['parameters']:,}")
        console.print(f"FLOPs per token   {quantity(totals['flops_per_token'])}")
        console.print(f"bytes             {quantity(totals['bytes'])}B")
        console.print(f"floor, summed     {duration(whole)}: every operation at its own floor, one after the other")
        console.print(f"floor of the step {duration(self.step_floor)}: weights and cached keys and values read once")
        for figure in (compute, bandwidth):
            kind = "measured" if figure.measured else "promised"
            what = f"{self.dtype}, dense" if figure.quantity == "compute" else "memory, read + written"
            unit = "FLOP/s" if figure.quantity == "compute" else "B/s"
            rate = f"{self.device.product}: {quantity(figure.value)}{unit} ({what})"
            console.print(f"{rate}, {kind}: {figure.source}, {figure.date}", style="dim")


def price(model: MetaModel, workload: Workload, spec: Device) -> PricedStep:
    """Cost every node of a step, the head for one row a sequence."""
    import torch

    from strata.bench.costing import dtype_name
    from strata.graph.cost import node_costs, operation_counts

    name, rows = dtype_name(model.dtype), len(workload.new)
    forward = node_costs(model.graph, model.batch(workload), workload)
    hidden = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device="meta")
    head = node_costs(model.head, hidden, workload)
    least = floor(model.step_costs().step(workload, rows), spec, name).seconds
    run = dict(operation_counts(model.graph))
    return PricedStep(forward, head, spec, name, workload.tokens, least, model.captured, run)
