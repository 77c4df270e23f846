"""`strata train`: trains, evaluates and exports a model as a TOML file says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from strata.engine.llm import LLM
from strata.engine.sampling_params import SamplingParams
from strata.hardware import specs
from strata.models.config import config_from_dict
from strata.train.config import RECOMPUTE, EvaluateConfig, TrainConfig, read_train_config
from strata.train.encode import Encoder
from strata.train.estimate import choose_recompute, least_seconds, memory, step_shape
from strata.train.export import accuracy_table, export
from strata.train.loop import Progress, Run, Trained, read_tokenizer
from strata.train.score import Score, questions, score

GIB = 2**30


def train(
    config: Annotated[Path, typer.Argument(help="TOML file; examples/builtin.toml is one.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Continue from the latest checkpoint in the output folder.")] = False,
    steps: Annotated[int | None, typer.Option(help="Replaces run.steps.", show_default=False)] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda; replaces run.device.", show_default=False)
    ] = None,
    out: Annotated[str | None, typer.Option(help="Replaces run.out.", show_default=False)] = None,
    estimate: Annotated[
        str | None,
        typer.Option(help="A GPU (h200): print a step's memory and least time on it, and end.", show_default=False),
    ] = None,
) -> None:
    """Train a model, and evaluate and export it if the config has those sections.

    Loss, learning rate, tokens/s and MFU go to the screen and to log.jsonl in the output folder.

    Example: strata train examples/builtin.toml
    """
    console = Console(stderr=True, highlight=False)
    recipe = read_train_config(config)
    flags: dict[str, Any] = {"steps": steps, "device": device, "out": out}
    given = {name: value for name, value in flags.items() if value is not None}
    recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, **given))
    if estimate is not None:
        typer.echo(estimate_text(recipe, specs.device(estimate)))
        return
    console.print("Making the tokenizer and the model ...")
    trained = _train(Run(recipe, peak_flops(recipe.run.device), resume=resume), console)
    console.print(f"Model: {trained.model}")
    if recipe.evaluate is None:
        return
    torch.cuda.empty_cache()  # the trainer's memory, which the engine may now take
    scores = evaluate(trained.model, recipe.evaluate, trained.device)
    table = json.dumps(accuracy_table(scores), indent=2) + "\n"
    (Path(recipe.run.out) / "accuracy.json").write_text(table, encoding="utf-8")
    console.print(_score_table(scores))
    if recipe.export is not None:
        target = Path(recipe.export.folder)
        export(trained, target, scores, dataclasses.asdict(recipe))
        console.print(f"Exported to {target}")


def estimate_text(recipe: TrainConfig, device: specs.Device) -> str:
    """Memory and least time of the run's largest step, for each way to recompute; the one that a run takes is marked.

    The tokenizer is taken to have all the tokens that the config allows.
    """
    config = config_from_dict(recipe.model | {"vocab_size": recipe.tokenizer.vocab_size}, "model")
    shape, room = step_shape(config, recipe), int(device.ceiling("memory").value)
    chosen = choose_recompute(shape, room) if recipe.run.recompute == "auto" else recipe.run.recompute
    lines = [
        f"{shape.batches} x {shape.tokens} tokens, {recipe.run.precision}, {device.product} ({room / GIB:.1f} GiB)"
    ]
    for recompute in RECOMPUTE:
        found = memory(shape, recompute)
        seconds = least_seconds(shape, recompute, device)
        mark = "*" if recompute == chosen else " "
        lines.append(
            f"{mark} recompute {recompute}: {found.total / GIB:.1f} GiB (state {found.state / GIB:.1f}, gradient sums "
            f"{found.sums / GIB:.1f}, activations {found.kept / GIB:.1f}, working {found.working / GIB:.1f}); "
            f"at least {seconds * 1e3:.1f} ms"
        )
    return "\n".join(lines)


def peak_flops(device: str) -> float | None:
    """The maker's dense bfloat16 peak of the GPU that a run will use, FLOP/s; None on a CPU or an unlisted GPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    known = specs.recognize(torch.cuda.get_device_name())
    return None if known is None else known.ceiling("compute", "bfloat16", measured=False).value


def evaluate(folder: Path, config: EvaluateConfig, device: torch.device) -> list[Score]:
    """Held-out accuracy of the model in `folder` by task, greedily decoded by the engine."""
    encoder = Encoder(read_tokenizer(folder))
    examples = questions(config.examples)
    llm = LLM(folder, device=str(device))
    params = SamplingParams(temperature=0.0, max_tokens=config.max_tokens)
    prompts = [{"prompt_token_ids": encoder.prompt(example)} for example in examples]
    outputs = llm.generate(prompts, params)
    return score(examples, (output.outputs[0].text for output in outputs))


def _train(run: Run, console: Console) -> Trained:
    speed = TextColumn("{task.description}")
    with Bar(
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), speed, TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task("starting", total=run.config.run.steps, completed=run.position.step)
        return run.train(lambda progress: _show(bar, task, progress))


def _show(bar: Bar, task: TaskID, progress: Progress) -> None:
    mfu = "" if progress.mfu is None else f"  MFU {progress.mfu:.1%}"
    text = (
        f"loss {progress.loss:.4f}  lr {progress.learning_rate:.2e}  norm {progress.gradient_norm:.2f}  "
        f"{progress.tokens_per_second:,.0f} tokens/s{mfu}"
    )
    bar.update(task, completed=progress.step, description=text)
    if not bar.console.is_terminal:
        bar.console.print(f"step {progress.step}  {text}")


def _score_table(scores: list[Score]) -> Table:
    table = Table("task", "right", "asked", "accuracy", title="Held-out accuracy")
    for one in scores:
        table.add_row(one.task, str(one.correct), str(one.total), f"{one.accuracy:.1%}")
    return table
