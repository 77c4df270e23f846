"""Options that several commands share, so that they mean and read the same everywhere."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from strata.models.shapes import SHAPES

SHAPE_NAMES = ", ".join(SHAPES)
# Under a heading of their own in `--help`.
engine_option = partial(typer.Option, rich_help_panel="Engine")
sampling_option = partial(typer.Option, rich_help_panel="Sampling")

Model = Annotated[
    str | None,
    typer.Option(help="Checkpoint folder, org/model of the Hugging Face cache, or builtin, which it is if left out."),
]
ModelOrSizes = Annotated[
    str, typer.Argument(help=f"Checkpoint folder, org/model, config.json, builtin, or a shape ({SHAPE_NAMES}).")
]
Hardware = Annotated[str, typer.Option(help="Device of the database, such as h200, b200 or mi300x.")]


def _renamed(old: str, new: str) -> Any:
    """An option that had another name: whoever gives the old one is told the new one."""

    def tell(value: str | None) -> None:
        if value is not None:
            raise ValueError(f"{old} is called {new} now: give {new} {value}")

    return Annotated[str | None, typer.Option(old, hidden=True, expose_value=False, callback=tell)]


HardwareBefore = _renamed("--device", "--hardware")
TpotTargetMsBefore = _renamed("--step-target-ms", "--tpot-target-ms")
InputLenBefore, OutputLenBefore = _renamed("--isl", "--input-len"), _renamed("--osl", "--output-len")
Dtype = Annotated[str, engine_option(help="auto, float32, bfloat16 or float16.")]
# The names of `strata.kernels.quant.schemes`, which loads PyTorch.
_SCHEMES = "fp8, fp8_block, fp8_weights, int8, int8_weights, int4, mxfp4 or nvfp4"
Quantization = Annotated[
    str | None, engine_option(help=f"How the weights of products are packed: {_SCHEMES}; not, if left out.")
]
Sparsity = Annotated[
    str | None, engine_option(help="2:4: weights with two zeros in each four columns are kept without them.")
]
Passes = Annotated[
    str,
    engine_option(help="Over graphs: all, exact, none, names that alone run, -name or +name; graph --passes list."),
]
Device = Annotated[str, engine_option(help="auto, cpu, cuda or cuda:N.")]
TensorParallelSize = Annotated[
    int, engine_option(min=1, help="Ranks that divide each matrix: GPUs, or processes on a CPU.")
]
PipelineParallelSize = Annotated[
    int, engine_option(min=1, help="Stages that divide the layers, each of --tensor-parallel-size ranks.")
]
PrefillContextParallelSize = Annotated[
    int, engine_option(min=1, help="Ranks, each of --tensor-parallel-size, that divide the tokens of long prompts.")
]
DecodeContextParallelSize = Annotated[
    int,
    engine_option(min=1, help="Ranks that would have the same KV heads, and keep different tokens of them instead."),
]
OverlapTokens = Annotated[
    int | None,
    engine_option(
        min=0, help="From so many tokens on, messages of ranks beside products; where it pays if left out, 0: none."
    ),
]
MessageDtype = Annotated[str, engine_option(help="Of sums over ranks: auto, or fp8, rounded in steps of many tokens.")]
AllReduceGroupSize = Annotated[
    int, engine_option(min=1, help="Neighbours that a faster link joins, and that add up first; 1: all at once.")
]
EnableExpertParallel = Annotated[
    bool, engine_option(help="Ranks have different experts of a mixture, whole; one has all.")
]
EnableDpAttention = Annotated[
    bool, engine_option(help="Those ranks have sequences and KV pages of their own, and share the experts alone.")
]
EnableEplb = Annotated[bool, engine_option(help="Experts move between ranks, so that these bear alike.")]
NumRedundantExperts = Annotated[int, engine_option(min=0, help="Room of a layer for copies of experts, all ranks'.")]
EplbStepInterval = Annotated[int, engine_option(min=1, help="Steps after which experts are placed anew.")]
MaxModelLen = Annotated[int | None, engine_option(help="Most tokens of a sequence, prompt and output.")]
MaxNumSeqs = Annotated[
    int | None, engine_option(min=1, help="Sequences that run at once. [default: by memory, from 256 on]")
]
TpotTargetMs = Annotated[
    float,
    engine_option(
        min=0, help="What a step takes at most beside those who read along, as long as prompts keep up; 0: no target."
    ),
]
TtftTargetMs = Annotated[
    float, engine_option(min=1, help="In what time prompts in line are to be read: longer lines make steps longer.")
]
GpuMemoryUtilization = Annotated[
    float, engine_option(help="Share of the GPU's memory that may be in use with the engine, others' included.")
]
Executor = Annotated[str, engine_option(help="graph; or compile, torch.compile's kernels, to compare with.")]
LoadFormat = Annotated[str, engine_option(help="auto reads safetensors, dummy makes random weights.")]
KvCacheDtype = Annotated[str, engine_option(help="Of keys and values in pages: auto, fp8 or int8.")]
SparsePrefill = Annotated[
    float | None,
    engine_option(help="Long prompts see keys with this share of a pooled softmax, in (0, 1]; all, if left out."),
]
DecodePages = Annotated[
    int | None, engine_option(min=2, help="To how many of its pages a sequence attends that decodes; all, if left out.")
]
SparsePrefillMinKeys = Annotated[int, engine_option(min=1, help="Keys of a prompt that is long.")]
Deterministic = Annotated[bool, engine_option(help="Bits that do not depend on what else runs.")]
MaxTokens = Annotated[int | None, sampling_option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, sampling_option(help="0 is greedy; the model's default if left out.")]
TopP = Annotated[float | None, sampling_option(help="Nucleus sampling, in [0, 1].")]
TopK = Annotated[int | None, sampling_option(help="Keep this many likeliest tokens; 0 keeps all.")]
Seed = Annotated[int | None, sampling_option(help="The same seed draws the same tokens.")]


def is_passed(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
