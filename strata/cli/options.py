"""Options that several commands share, so that they mean and read the same everywhere."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from strata.cli.groups import OptionGroup, Values
from strata.engine.scheduling.prompt_budget import SERVER_TPOT_MS, SERVER_TTFT_MS
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
# The names of `strata.kernels.quant.schemes`, which loads PyTorch.
_SCHEMES = "fp8, fp8_block, fp8_weights, int8, int8_weights, int4, mxfp4 or nvfp4"


def _renamed(old: str, new: str) -> Any:
    """An option that had another name: whoever gives the old one is told the new one."""

    def tell(value: str | None) -> None:
        if value is not None:
            raise ValueError(f"{old} is called {new} now: give {new} {value}")

    return typer.Option(old, hidden=True, expose_value=False, callback=tell)


HardwareBefore = Annotated[str | None, _renamed("--device", "--hardware")]
InputLenBefore = Annotated[str | None, _renamed("--isl", "--input-len")]
OutputLenBefore = Annotated[str | None, _renamed("--osl", "--output-len")]


class EngineOptions:
    """Of an engine, with the names and the meaning that `strata.engine.engine_config.EngineConfig` gives them."""

    tokenizer: Annotated[str | None, engine_option(help="Folder of the tokenizer; the model's own if left out.")] = None
    quantization: Annotated[
        str | None, engine_option(help=f"How the weights of products are packed: {_SCHEMES}; not, if left out.")
    ] = None
    sparsity: Annotated[
        str | None, engine_option(help="2:4: weights with two zeros in each four columns are kept without them.")
    ] = None
    passes: Annotated[
        str,
        engine_option(help="Over graphs: all, exact, none, names that alone run, -name or +name; graph --passes list."),
    ] = "all"
    dtype: Annotated[str, engine_option(help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, engine_option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    tensor_parallel_size: Annotated[
        int, engine_option(min=1, help="Ranks that divide each matrix: GPUs, or processes on a CPU.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, engine_option(min=1, help="Stages that divide the layers, each of --tensor-parallel-size ranks.")
    ] = 1
    prefill_context_parallel_size: Annotated[
        int, engine_option(min=1, help="Ranks, each of --tensor-parallel-size, that divide the tokens of long prompts.")
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        engine_option(
            min=1, help="Ranks that would have the same KV heads, and keep different tokens of them instead."
        ),
    ] = 1
    data_parallel_size: Annotated[
        int, engine_option(min=1, help="Engines that requests are divided among, each with GPUs of its own.")
    ] = 1
    overlap_tokens: Annotated[
        int | None,
        engine_option(
            min=0, help="From so many tokens on, messages of ranks beside products; where it pays if left out, 0: none."
        ),
    ] = None
    message_dtype: Annotated[
        str, engine_option(help="Of sums over ranks: auto, or fp8, rounded in steps of many tokens.")
    ] = "auto"
    all_reduce_group_size: Annotated[
        int, engine_option(min=1, help="Neighbours that a faster link joins, and that add up first; 1: all at once.")
    ] = 1
    enable_expert_parallel: Annotated[
        bool, engine_option(help="Ranks have different experts of a mixture, whole; one has all.")
    ] = False
    enable_dp_attention: Annotated[
        bool, engine_option(help="Those ranks have sequences and KV pages of their own, and share the experts alone.")
    ] = False
    enable_eplb: Annotated[bool, engine_option(help="Experts move between ranks, so that these bear alike.")] = False
    num_redundant_experts: Annotated[
        int, engine_option(min=0, help="Room of a layer for copies of experts, all ranks'.")
    ] = 0
    eplb_step_interval: Annotated[int, engine_option(min=1, help="Steps after which experts are placed anew.")] = 3000
    load_format: Annotated[str | None, engine_option(help="auto reads safetensors, dummy makes random weights.")] = (
        "auto"
    )
    max_model_len: Annotated[int | None, engine_option(help="Most tokens of a sequence, prompt and output.")] = None
    max_num_seqs: Annotated[
        int | None, engine_option(min=1, help="Sequences that run at once. [default: by memory, from 256 on]")
    ] = None
    max_num_batched_tokens: Annotated[int | None, engine_option(min=1, help="Most tokens of a step.")] = None
    gpu_memory_utilization: Annotated[
        float, engine_option(help="Share of the GPU's memory that may be in use with the engine, others' included.")
    ] = 0.9
    num_pages: Annotated[int | None, engine_option(min=1, help="KV pages; what memory allows if left out.")] = None
    page_size: Annotated[int, engine_option(min=1, help="Tokens of a KV page.")] = 16
    enable_prefix_caching: Annotated[bool, engine_option(help="Reuse the pages of prompts that begin alike.")] = True
    tpot_target_ms: Annotated[
        float,
        engine_option(
            min=0,
            help="What a step takes at most beside those who read along, as long as prompts keep up; 0: no target.",
        ),
    ] = SERVER_TPOT_MS
    step_target_ms: Annotated[str | None, _renamed("--step-target-ms", "--tpot-target-ms")] = None
    ttft_target_ms: Annotated[
        float, engine_option(min=1, help="In what time prompts in line are to be read: longer lines make steps longer.")
    ] = SERVER_TTFT_MS
    seed: Annotated[
        int | None, engine_option(help="Of requests that bring none; left out, every start draws anew.")
    ] = None
    deterministic: Annotated[bool, engine_option(help="Bits that do not depend on what else runs.")] = False
    kv_cache_dtype: Annotated[str, engine_option(help="Of keys and values in pages: auto, fp8 or int8.")] = "auto"
    decode_pages: Annotated[
        int | None,
        engine_option(min=2, help="To how many of its pages a sequence attends that decodes; all, if left out."),
    ] = None
    sparse_prefill: Annotated[
        float | None,
        engine_option(help="Long prompts see keys with this share of a pooled softmax, in (0, 1]; all, if left out."),
    ] = None
    sparse_prefill_min_keys: Annotated[int, engine_option(min=1, help="Keys of a prompt that is long.")] = 16384
    sparse_prefill_block: Annotated[
        int, engine_option(min=16, help="Keys that are kept or left out together; small for short texts.")
    ] = 128
    executor: Annotated[str, engine_option(help="graph; or compile, torch.compile's kernels, to compare with.")] = (
        "graph"
    )


def engine(names: str, **defaults: Any) -> OptionGroup:
    """These options of the engine, by name; defaults: where they are not those of all commands."""
    return OptionGroup(EngineOptions, names, defaults=defaults)


class SamplingOptions:
    """Of a request; None: the model's own."""

    max_tokens: Annotated[int | None, sampling_option(help="Most tokens to generate.")] = None
    temperature: Annotated[float | None, sampling_option(help="0 is greedy; the model's default if left out.")] = None
    top_p: Annotated[float | None, sampling_option(help="Nucleus sampling, in [0, 1].")] = None
    top_k: Annotated[int | None, sampling_option(help="Keep this many likeliest tokens; 0 keeps all.")] = None
    seed: Annotated[int | None, sampling_option(help="The same seed draws the same tokens.")] = None


Sampling = Annotated[Values, OptionGroup(SamplingOptions)]


def is_passed(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
