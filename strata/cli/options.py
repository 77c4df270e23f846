"""Options that several commands share, so that they mean and read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

ENGINE, SAMPLING = "Engine", "Sampling"

Model = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint folder, org/model of the Hugging Face cache, or builtin, which it is if left out.",
        show_default=False,
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=ENGINE)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE)]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Most tokens of a sequence, prompt and output.", show_default=False, rich_help_panel=ENGINE),
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences that run at once.", rich_help_panel=ENGINE)]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(
        help="Share of the GPU's memory that may be in use with the engine, others' included.", rich_help_panel=ENGINE
    ),
]
LoadFormat = Annotated[
    str, typer.Option(help="auto reads safetensors, dummy makes random weights.", rich_help_panel=ENGINE)
]
Deterministic = Annotated[bool, typer.Option(help="Bits that do not depend on what else runs.", rich_help_panel=ENGINE)]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens to generate.", show_default=False, rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy; the model's default if left out.", show_default=False, rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None, typer.Option(help="Nucleus sampling, in [0, 1].", show_default=False, rich_help_panel=SAMPLING)
]
TopK = Annotated[
    int | None,
    typer.Option(help="Keep this many likeliest tokens; 0 keeps all.", show_default=False, rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed draws the same tokens.", show_default=False, rich_help_panel=SAMPLING)
]
