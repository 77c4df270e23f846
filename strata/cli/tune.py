"""`strata tune`: trains on tokenized data as a TOML file says: pretraining from text, SFT, LoRA, DPO."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from strata.train.tune import Tuning, override
from strata.train.tune_config import read_tune_config


def tune(
    config: Annotated[Path, typer.Argument(help="TOML file; examples/sft.toml is one.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Continue from the latest checkpoint in the output folder.")] = False,
    steps: Annotated[int | None, typer.Option(help="Replaces run.steps.", show_default=False)] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda; replaces run.device.", show_default=False)
    ] = None,
    out: Annotated[str | None, typer.Option(help="Replaces run.out.", show_default=False)] = None,
) -> None:
    """Train on what `strata data` has written: chats (SFT, LoRA), preferences (DPO) or text.

    Example: strata tune examples/sft.toml
    """
    console = Console(stderr=True, highlight=False)
    recipe = override(read_tune_config(config), steps=steps, device=device, out=out)
    run = Tuning(recipe, resume=resume)
    with Bar(
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
        console=console,
    ) as bar:  # fmt: skip
        task = bar.add_task("starting", total=recipe.run.steps, completed=run.position.step)

        def show(line: dict[str, Any]) -> None:
            shown = ("loss", "preferred", "margin", "gradient_norm", "learning_rate", "utilisation")
            text = "  ".join(f"{name} {line[name]:.4g}" for name in shown if name in line)
            bar.update(task, completed=line["step"], description=text)
            if not console.is_terminal:
                console.print(f"step {line['step']}  {text}")

        folder = run.train(show)
    console.print(f"Model: {folder}")
