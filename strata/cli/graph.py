"""`strata graph`: what one step of a model runs on a device, what that costs, and the least time it needs there."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli import options
from strata.cli.groups import Values, grouped
from strata.hardware.figures import Device, Figure
from strata.hardware.links import Link
from strata.hardware.prediction import ORIGINS, Prediction
from strata.hardware.roofline import Floor, Workload, floor
from strata.hardware.specs import cuda_device
from strata.models.folder import folder_shape_or_file
from strata.text.counted import counted

if TYPE_CHECKING:
    from strata.bench.measured_step import MeasuredNodes, Part
    from strata.cost.draw import CostRow
    from strata.cost.drawing.why import Why
    from strata.cost.nodes import NodeCost
    from strata.cost.predict import StepPredictor
    from strata.cost.step_model import StepNodes
    from strata.engine.program.meta_model import MetaModel
    from strata.graph.buffers import BufferPlan
    from strata.kernels.compiling.launched import LaunchedKernel

# Beyond these, sizes of tensors no longer fit into 64 bits, or lengths of sequences into the memory.
_MAX_TOKENS, _MAX_SEQUENCES = 10**8, 10**5


@grouped
def graph(
    model: options.ModelOrSizes,
    tokens: Annotated[int, typer.Option(min=1, max=_MAX_TOKENS, help="New tokens of each sequence in this step.")] = 1,
    context: Annotated[
        int, typer.Option(min=0, max=_MAX_TOKENS, help="Tokens of each sequence that are cached already.")
    ] = 0,
    sequences: Annotated[int, typer.Option(min=1, max=_MAX_SEQUENCES, help="Sequences in this step.")] = 1,
    prompt: Annotated[
        int, typer.Option(min=0, max=_MAX_TOKENS, help="Tokens of a new prompt beside them; 0 for none.")
    ] = 0,
    hardware: Annotated[
        str | None,
        typer.Option(help="Device whose kernels and floors are shown, h200 if left out; cpu: the processor here."),
    ] = None,
    device: options.HardwareBefore = None,
    *,
    engine: Annotated[
        Values,
        options.engine(
            "tensor_parallel_size message_dtype pipeline_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size enable_expert_parallel enable_dp_attention"
        ),
    ],
    packing: Annotated[Values, options.engine("quantization sparsity")],
    stage: Annotated[int, typer.Option(min=0, help="Which of the stages is shown, from 0.")] = 0,
    passes: Annotated[
        str,
        typer.Option(
            help="Which run: all, exact, none, names that alone run, -name without, +name with it; list shows them."
        ),
    ] = "all",
    draw: Annotated[
        Path | None,
        typer.Option(help="Also draw it into this file (.svg), a layer and the model, before the passes too."),
    ] = None,
    why: Annotated[
        str | None,
        typer.Option(help="A node, an operation or a part of the model: show what could run it, and why which does."),
    ] = None,
    occupancy: Annotated[
        bool,
        typer.Option("--occupancy", help="Also compile its kernels, and show how many blocks of each fit at once."),
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run it on the device that is here, whose floors are shown then.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what a step runs and costs, by operation and by part of the model, without weights or device; of several
    ranks, what the first one of a stage does; with --enable-dp-attention as many sequences are on each of the others.

    The graph is the one that the engine runs for such a step on that device; a row of each sequence is sampled.
    Merged projections are joined by & (gate_proj&up_proj), fused operations by + (input_layernorm+add).

    --measure makes weights at random, where the model has none, and times each operation of the step.

    Example, a decode step: strata graph 8B --context 1000 --sequences 32
    """
    import torch

    from strata.bench.result import ending_in, report_console
    from strata.comm.symmetric import imagined
    from strata.engine.compatibility import check_states
    from strata.engine.engine_config import EngineConfig
    from strata.engine.ranks.prefill_context_parallel import CONTEXT_AXIS
    from strata.graph.passes import listing
    from strata.kernels.triton_import import HAS_TRITON
    from strata.parallel.serving_shard import TENSOR_AXIS, RankShard
    from strata.plan.explain.ceilings import PROCESSOR, device_here
    from strata.plan.meta_model import find_config, meta_model

    ending_in(draw, "--draw", ".svg")
    if draw is not None and not draw.parent.is_dir():
        raise ValueError(f"--draw {draw}: there is no folder {draw.parent}; make it first")
    if passes == "list":
        typer.echo(listing())
        return
    source = folder_shape_or_file(model)
    here = device_here(hardware) if measure or hardware == PROCESSOR else None
    others = f", or {PROCESSOR}, the processor of this machine"
    spec, config = cuda_device(hardware or "h200", others) if here is None else here.device, find_config(source)
    size, stages, parts = (engine[f"{one}_parallel_size"] for one in ("tensor", "pipeline", "prefill_context"))
    ranks, along = size * stages * parts, imagined(CONTEXT_AXIS, parts) if parts > 1 else None
    expert_parallel, attention_dp = engine["enable_expert_parallel"], engine["enable_dp_attention"]
    if attention_dp and size == 1:
        raise ValueError(
            "--enable-dp-attention is of experts that --tensor-parallel-size ranks divide; make that 2 or more"
        )
    if stage >= stages:
        raise ValueError(f"--stage {stage} of --pipeline-parallel-size {stages}: stages count from 0 to {stages - 1}")
    check_states(EngineConfig(model, **engine | {"enable_expert_parallel": expert_parallel or attention_dp}), config)
    shard = None
    if size * stages > 1:
        axis = imagined(TENSOR_AXIS, size) if size > 1 else None
        own: dict[str, Any] = {"expert_parallel": expert_parallel, "attention_dp": attention_dp}
        own["key_ranks"] = engine["decode_context_parallel_size"]
        shard = RankShard.of(config, size, 0, axis, stages=stages, stage=stage, **own)
    if here is not None and ranks > 1:
        shown = (
            "--measure runs a step on one device" if measure else f"--hardware {hardware} shows a step of one process"
        )
        raise ValueError(f"{shown}; leave out the other ranks")
    if draw is not None and ranks > 1:
        raise ValueError("--draw shows a model before it is divided and after, of one rank; leave out the other ranks")
    beside = (prompt,) * bool(prompt)
    workload = Workload((tokens,) * sequences + beside, (tokens + context,) * sequences + beside)
    folder = Path(source) if Path(source).is_dir() else None
    by: dict[str, Any] = {**packing, "folder": folder, "passes": passes}
    if here is not None and here.is_processor:
        meta = meta_model(config, None, config.dtype or torch.float32, **by)
    else:
        meta = meta_model(config, spec, shard=shard, context=along, message_dtype=engine["message_dtype"], **by)
    priced = price(meta, workload, spec)
    if here is not None:
        priced = dataclasses.replace(priced, sources=(*priced.sources, *here.sources))
    if here is not None and measure:
        from strata.bench.measured_step import engine_for, measure_step

        asked = engine_for(source, meta, "cpu" if here.is_processor else "cuda", passes=passes, **packing)
        held = sum(node.cost.weights for node in priced.step.timed) / 2**30
        many = f"{held:.1f} GiB of weights and {counted(len(priced.step.timed), 'operation')}, one after another"
        typer.echo(f"measuring on {spec.product}: {many}", err=True)  # of a large model on a processor for minutes
        measured = measure_step(asked, workload, meta.choose(workload).size, priced.step.graph)
        priced = dataclasses.replace(priced, measured=measured)
    step = {"model": model, "tokens": tokens, "context": context, "sequences": sequences, "prompt": prompt}
    step |= {**packing, "ranks": ranks, "stages": stages, "stage": stage}
    title = f"{model}: {sequences} x {counted(tokens, 'new token')}, {context} cached each"
    title += f"; a new prompt of {prompt}" * bool(prompt) + f"; one rank of {ranks}" * (ranks > 1)
    if (packed := packing["quantization"] or packing["sparsity"]) is not None:
        title += f"; weights packed as {packed}"
    step["passes"] = passes
    title += f"; passes {passes}" * (passes != "all")
    if occupancy:
        if meta.limits is None or spec.cuda is None or ranks > 1 or not HAS_TRITON:
            raise ValueError(
                "--occupancy compiles a GPU's kernels, of one rank, by Triton: leave out other ranks and --hardware "
                "cpu, on a machine that has Triton (Linux)"
            )
        from strata.kernels.compiling.launched import launched_elsewhere

        run, given = meta.called(workload)
        launched = launched_elsewhere(lambda: run(*given), meta.limits, spec.cuda)
        priced = dataclasses.replace(priced, launched=launched)
    if draw is not None:
        draw.write_text(priced.drawing(title, meta.traced(workload)), encoding="utf-8")
        typer.echo(f"drawn in {draw}", err=True)
    if why is not None:
        reasons = priced.why(meta, why)
        if as_json:
            print(json.dumps(step | reasons.to_dict()))
        else:
            report_console().print(reasons.table())
    elif as_json:
        print(json.dumps(step | priced.to_dict()))
    else:
        longest = max(workload.total)
        title += f"; {longest} tokens are more than its {config.longest}" * (longest > config.longest)
        priced.draw(title + f", of stage {stage} of {stages}" * (stages > 1))


@dataclasses.dataclass(frozen=True)
class PricedStep:
    """A step of a model on a device: what its nodes cost, and their floors.

    step_floor: of the model; sampling and the making of inputs stand beside it. captured: how many nodes of each
    operation the model has before the passes. link: to the other ranks, if there are some. predictor: of the workload's
    time. sources: of what was measured, in words. buffers: see `MetaModel.buffers`. measured:
    how long it took here; None: nobody looked. launched: the kernels of the model's graph that are Triton's; None: they
    were not asked for.
    """

    step: StepNodes
    device: Device
    dtype: str
    tokens: int
    step_floor: Floor
    captured: dict[str, int]
    link: Link | None
    predictor: StepPredictor
    workload: Workload
    sources: tuple[str, ...]
    buffers: BufferPlan | None = None
    measured: MeasuredNodes | None = None
    launched: list[LaunchedKernel] | None = None

    @property
    def run(self) -> dict[str, int]:
        """How many nodes of each operation the graph has that runs."""
        return dict(Counter(node.operation for node in self.step.model))

    @property
    def nodes(self) -> list[NodeCost]:
        return [*self.step.inputs, *self.step.model, *self.step.draw]

    @property
    def predicted(self) -> Prediction:
        """All nodes at the size to which the step is padded, their launches, and what is between two steps."""
        return self.predictor.step(self.step.timed, self.workload, captured=self.step.captured)

    @property
    def origins(self) -> dict[str, float]:
        """Which share of the nodes' predicted time is measured, interpolated and analytic."""
        seconds = dict.fromkeys(ORIGINS, 0.0)
        for one in (self.predictor.node(node, self.workload) for node in self.step.timed):
            seconds[one.origin] += one.seconds
        return {origin: value / sum(seconds.values()) for origin, value in seconds.items()}

    @property
    def rows(self) -> dict[str, list[CostRow]]:
        from strata.cost.draw import rows_by

        model = self.step.model
        first = next(index for index, node in enumerate(model) if node.layer is not None)
        last = max(index for index, node in enumerate(model) if node.parameters)
        parts = {id(node): "inputs" for node in self.step.inputs} | {id(node): "sampling" for node in self.step.draw}
        before = "embedding" if any(node.parameters for node in model[:first]) else "stage before"
        parts |= {id(node): before for node in model[:first]}
        parts |= {id(node): "head" for node in model[last:] if node.layer is None}

        def operation_of(node: NodeCost) -> tuple[str, str, str]:
            part = node.module.rpartition(".")[2]
            if parts.get(id(node)) == "head" and part == "embed_tokens":  # a tied head, beside the lookup
                part = "lm_head (embed_tokens)"
            return node.operation, part if node.parameters or "+" in part else "", node.implementation

        def part_of(node: NodeCost) -> tuple[str, str, str]:
            return "", parts.get(id(node), "final norm" if node.layer is None else "layers"), ""

        counted: tuple[tuple[Part, list[NodeCost], str], ...] = (
            ("inputs", self.step.inputs, ""),
            ("model", model, self.step_floor.bound),
            ("draw", self.step.draw, ""),
        )
        took = {part: None if self.measured is None else self.measured.of(part) for part, _, _ in counted}
        return {
            name: [
                row
                for part, nodes, bound in counted
                for row in rows_by(nodes, kind, self.device, self.dtype, bound, self.link, took[part])
            ]
            for name, kind in (("operations", operation_of), ("parts", part_of))
        }

    def why(self, model: MetaModel, asked: str) -> Why:
        """See `strata.cost.drawing.why.why`. Raises ValueError, too, for steps of which no kernels are known."""
        from strata.cost.drawing.why import why
        from strata.kernels import tuned

        if model.limits is None or self.buffers is None:
            raise ValueError(f"--why {asked}: kernels are known of a GPU, and of steps that ranks do not divide")
        table = tuned.read(model.limits.product)
        return why(
            *model.called(self.workload), asked, self.workload, model.limits, table,
            lambda node: self.predictor.node(node, self.workload).seconds,
        )  # fmt: skip

    def totals(self) -> dict[str, Any]:
        """Counts, bytes and seconds of the whole step."""
        from strata.cost.nodes import parameter_count, total

        cost = total(self.nodes)
        return {
            "parameters": parameter_count(self.nodes),
            "flops": cost.flops,
            "flops_per_token": cost.flops / self.tokens,
            "bytes": cost.bytes,
            "messages": cost.messages,
            "sent_bytes": cost.sent,
            "messages_floor_s": floor(cost, self.device, self.dtype, self.link).communication,
            "nodes_floor_s": sum(floor(node.cost, self.device, self.dtype, self.link).seconds for node in self.nodes),
            "activation_bytes": None if self.buffers is None else self.buffers.peak,
            "step_floor_s": self.step_floor.seconds,
            "predicted_s": self.predicted.seconds,
            "measured_s": None if self.measured is None else self.measured.step,
            "predicted_from": self.origins,
            "measurements": list(self.sources),
        }

    def to_dict(self) -> dict[str, Any]:
        tables = {
            name: [dataclasses.asdict(row) | {"bytes": row.cost.bytes} for row in rows]
            for name, rows in self.rows.items()
        }
        counts = {"graph": {"captured": self.captured, "run": self.run}}
        ran: dict[str, Any] = {"runs": self.step.graph, "kernels": self.step.kernels}
        if self.launched is not None:
            ran["occupancy"] = [dataclasses.asdict(one) for one in self.launched]
        return {"device": self.device.key, "dtype": self.dtype} | self.totals() | ran | counts | tables

    def drawing(self, title: str, captured: list[NodeCost]) -> str:
        """An SVG of it beside the nodes of the model before the passes."""
        from strata.cost.draw import duration
        from strata.cost.drawing.boxes import boxes
        from strata.cost.drawing.correspondence import correspondence
        from strata.cost.drawing.page import Drawing

        took = None if self.measured is None else self.measured.of("model")
        before = boxes(captured, self.device, self.dtype, self.link)
        after = boxes(self.step.model, self.device, self.dtype, self.link, took)
        notes = [
            f"floor of the step {duration(self.step_floor.seconds)}: weights and cached keys and values moved once; "
            f"predicted {duration(self.predicted.seconds)} with inputs, sampling and launches"
        ]
        notes += [self._measured_note] if self.measured is not None else []
        notes += [f"{what}: {figure.source}, {figure.date}" for what, figure in self._rates()]
        where = f"{title}, {self.device.product}, {self.dtype}"
        return Drawing(where, before, after, correspondence(captured, self.step.model), notes).svg()

    def draw(self, title: str) -> None:
        from strata.bench.result import report_console
        from strata.cost.draw import counts_table, duration, quantity, table

        console, totals, rows = report_console(), self.totals(), self.rows
        whole = totals["step_floor_s"]
        tables = [table(title, rows["operations"], whole=whole)]
        tables.append(table("By part of the model", rows["parts"], whole=whole))
        # A terminal that is narrower breaks lines; a table that is squeezed into it would lose names and figures.
        unbounded = console.options.update(max_width=sys.maxsize)
        console.width = max(console.width, *(console.measure(one, options=unbounded).minimum for one in tables))
        captured, run = (sum(counts.values()) for counts in (self.captured, self.run))
        console.print(f"{counted(captured, 'operation')}, {run:,} after merging and fusion: {self.step.graph}")
        if self.step.kernels:  # those of a CPU have no names
            console.print(f"{counted(len(self.step.kernels), 'kernel')} with inputs and sampling")
        console.print(counts_table(self.captured, self.run))
        if self.launched is not None:
            from strata.cost.drawing.why import occupancy_table

            tables.append(occupancy_table(self.launched))
        for one in tables:
            console.print(one)
        summed = duration(totals["nodes_floor_s"])
        console.print(f"parameters        {totals['parameters']:,}")
        console.print(f"FLOPs per token   {quantity(totals['flops_per_token'])}")
        console.print(f"bytes             {quantity(totals['bytes'])}B")
        if self.buffers is not None:
            plan = self.buffers
            where = f"most of it alive at {plan.peak_node}; {quantity(plan.made)}B made in all"
            console.print(f"activations       {quantity(plan.peak)}B, {where}")
        if self.link is not None:
            sent, least = quantity(totals["sent_bytes"]), duration(totals["messages_floor_s"])
            console.print(f"messages          {totals['messages']:,}, {sent}B sent to other ranks: {least} at least")
        console.print(f"floor, summed     {summed}: every operation at its own floor, one after the other")
        console.print(f"floor of the step {duration(whole)}: weights and cached keys and values moved once")
        shares = ", ".join(f"{share:.0%} {origin}" for origin, share in self.origins.items() if share >= 0.005)
        launched = "replayed" if self.step.captured else "launched by the host"
        console.print(f"predicted         {duration(self.predicted.seconds)}, {launched}: {shares}")
        if self.measured is not None:
            console.print(self._measured_note)
        for source in self.sources:
            console.print(f"from {source}", style="dim", soft_wrap=True)
        for rate, figure in self._rates():
            console.print(f"{rate}: {figure.source}, {figure.date}", style="dim")
        if self.link is not None:
            link = self.link
            rate = f"{quantity(link.bandwidth)}B/s each way, {duration(link.latency)} a message"
            best = f"{quantity(link.fastest or link.bandwidth)}B/s, {duration(link.min_seconds(1, 0))}"
            if link.fastest is not None or link.shortest is not None:
                rate += f" (floors by the best that was seen: {best})"
            console.print(f"link between ranks: {rate}: {link.source}, {link.date}", style="dim")

    @property
    def _measured_note(self) -> str:
        from strata.cost.draw import duration, share

        assert self.measured is not None
        found = self.measured
        without = "sampling" if self.step.captured else "inputs and sampling"
        inputs, model, draw = (duration(sum(found.of(part).values())) for part in ("inputs", "model", "draw"))
        return (
            f"measured          {duration(found.step)} the step without {without}, "
            f"{share(self.step_floor.seconds, found.step)} of which is its floor; its operations {model}, "
            f"inputs {inputs}, sampling {draw}: {found.how}"
        )

    def _rates(self) -> list[tuple[str, Figure]]:
        """The ceilings that floors are made of, in words."""
        from strata.cost.draw import quantity

        found = []
        for figure in (self.device.ceiling("compute", self.dtype), self.device.ceiling("bandwidth")):
            kind = "borrowed" if figure.borrowed else "measured" if figure.measured else "promised"
            what = f"{self.dtype}, dense" if figure.quantity == "compute" else "memory, read + written"
            unit = "FLOP/s" if figure.quantity == "compute" else "B/s"
            found.append((f"{self.device.product}: {quantity(figure.value)}{unit} ({what}), {kind}", figure))
        return found


def price(model: MetaModel, workload: Workload, spec: Device) -> PricedStep:
    """Cost every node of a step that samples one row a sequence."""
    from strata.cost.nodes import total
    from strata.cost.step_model import StepModel

    times, step = StepModel(model, spec), model.step(workload)
    whole = floor(total(step.model).in_step, times.device, times.dtype, times.link)
    captured = dict(model.program.traced)
    return PricedStep(
        step, times.device, times.dtype, workload.tokens, whole, captured, times.link, times.predictor, workload,
        times.sources, model.buffers(workload),
    )  # fmt: skip
