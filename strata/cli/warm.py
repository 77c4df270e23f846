"""`strata warm`: compiles a model's kernels into the cache on the disk, so that its first start need not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli import options
from strata.cli.groups import Values, grouped
from strata.hardware.specs import DEVICES
from strata.models.folder import folder_or_shape
from strata.models.shapes import SHAPES

if TYPE_CHECKING:
    from strata.kernels.device_limits import DeviceLimits


@grouped
def warm(
    model: Annotated[
        str, typer.Argument(help=f"Checkpoint folder, org/model, builtin, or a shape: {options.SHAPE_NAMES}.")
    ],
    hardware: Annotated[
        str, typer.Option(help="Whose kernels: auto, cuda:N, or a name (h200), which need not be here.")
    ] = "auto",
    device: options.HardwareBefore = None,
    *,
    engine: Annotated[
        Values,
        options.engine(
            "quantization sparsity dtype max_model_len max_num_seqs max_num_batched_tokens deterministic "
            "tensor_parallel_size message_dtype pipeline_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size enable_expert_parallel enable_dp_attention"
        ),
    ],
) -> None:
    """Compile all kernels that serving a model takes, before anybody waits for them.

    They go where Triton keeps its own, TRITON_CACHE_DIR or ~/.triton/cache, for this version of Strata and of Triton.
    Give the options of the start that is to come, on which kernels depend. No weights are read, and with --hardware
    h200 no GPU is needed. Exit code 1 if a kernel could not be compiled.

    Example: strata warm 8B --hardware h200
    """
    limits = _limits(hardware)
    from strata.engine.ahead.ahead import compiling, shown  # needs Triton, as the limits say
    from strata.engine.engine_config import EngineConfig
    from strata.engine.startup.sequences import listed_place, with_sequences
    from strata.kernels.compiling.disk_cache import require_writable
    from strata.models import weights

    require_writable()
    found = folder_or_shape(model)
    asked = EngineConfig(found, load_format="dummy" if found in SHAPES else "auto", **engine)
    asked = with_sequences(asked, weights.resolve(asked.model, asked.load_format)[0], listed_place(limits))
    with compiling(asked, limits) as process:
        last = shown(process.progress(), lambda line: typer.echo(line, err=True), show=True)
    for fault in last.faults:
        typer.echo(f"strata: error: could not be compiled: {fault}", err=True)
    compiled = last.done - last.found - len(last.faults)
    typer.echo(f"kernels of {model}: {compiled} compiled, {last.found} found on the disk")
    if last.faults:
        raise typer.Exit(1)


def _limits(name: str) -> DeviceLimits:
    """Of a device in the database, or of one that is here. Raises ValueError if the kernels cannot run there."""
    import torch

    from strata.engine.engine_config import EngineConfig
    from strata.kernels.device_limits import DeviceLimits, why_not

    known = {name: DeviceLimits.listed(one) for name, one in DEVICES.items() if one.cuda is not None}
    if name in DEVICES:
        found = DeviceLimits.listed(DEVICES[name])
    elif name != "auto" and not name.startswith("cuda"):
        raise ValueError(f"device {name!r} is unknown; use auto, cuda, cuda:N, or one of {', '.join(known)}")
    elif not torch.cuda.is_available():
        able = [name for name, limits in known.items() if why_not(limits, has_triton=True) is None]
        raise ValueError(f"no CUDA device is here: name the one to compile for, --hardware {' or '.join(able)}")
    else:
        found = DeviceLimits.of(EngineConfig("", device=name).resolve_device())
    limit = why_not(found)
    if limit is not None:
        raise ValueError(f"{limit}: there is nothing to compile")
    return found
