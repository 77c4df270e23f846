"""Options that several commands share, so that they mean and read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option(help="Checkpoint folder, or builtin, which it is if left out.", show_default=False),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Most tokens of a sequence, prompt and output.", show_default=False)
]
LoadFormat = Annotated[str, typer.Option(help="auto reads safetensors, dummy makes random weights.")]
Deterministic = Annotated[bool, typer.Option(help="Bits that do not depend on what else runs.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.", show_default=False)]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; the model's default if left out.", show_default=False)
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling, in [0, 1].", show_default=False)]
TopK = Annotated[int | None, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.", show_default=False)]
