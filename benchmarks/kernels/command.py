"""`strata bench kernels` (T8): every operation at the shapes of the models, beside its floor and the library's time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.hardware.roofline import Cost, Workload, floor
from strata.hardware.specs import recognize

if TYPE_CHECKING:
    from benchmarks.kernels.case import Case
    from benchmarks.kernels.products import Product
    from benchmarks.kernels.published import Sizes
    from benchmarks.kernels.tuning import Finding
    from strata.kernels.compiling.launched import LaunchedKernel
    from strata.kernels.tuned import Table

MODELS = ("8B", "0.6B")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
FUSED_ROWS = ROWS[:9]
# What the arguments of one case may take together, in bytes.
_MAX_BYTES = 4 << 30
# About what a device reaches: only for how often to repeat a call.
_BYTES_PER_SECOND, _FLOPS_PER_SECOND = 4e12, 6e14


@dataclass(frozen=True)
class KernelRow:
    """One line of the table. seconds, floor and library_seconds are of one call; share: of the floor's speed.

    bandwidth: bytes that the call must move, a second. kernels: of Triton that the call launches.
    """

    operation: str
    model: str
    shape: str
    rows: int
    implementation: str
    seconds: float
    floor: float | None
    share: float | None
    bound: str | None
    bandwidth: float
    library_seconds: float | None
    kernels: tuple[LaunchedKernel, ...] = ()

    def sentence(self) -> str:
        library = "-" if self.library_seconds is None else f"{self.library_seconds * 1e6:.1f}"
        reached = "-" if self.share is None else f"{self.share:.0%}"
        floor = "-" if self.floor is None else f"{self.floor * 1e6:.1f}"
        ran = "".join((self.implementation, *(f"; {one.sentence()}" for one in self.kernels)))
        return (
            f"{self.operation:22} {self.model:5} {self.shape:28} {self.rows:6} {self.seconds * 1e6:10.1f} {floor:>10} "
            f"{reached:>5} {self.bound or '-':8} {self.bandwidth / 1e12:6.2f} {library:>10}  {ran}"
        )


HEADINGS = (
    f"{'operation':22} {'model':5} {'shape':28} {'rows':>6} {'us':>10} {'floor us':>10} {'share':>5} {'bound':8} "
    f"{'TB/s':>6} {'library us':>10}  implementation"
)


def kernels(
    tune: Annotated[
        bool, typer.Option(help="First find the fastest tiles and algorithms and write them to the table.")
    ] = False,
    table: Annotated[Path | None, typer.Option(help="The table of tuned tiles; the package's if left out.")] = None,
    models: Annotated[
        str,
        typer.Option(
            help="Shapes, checkpoint folders, published models, between commas; /N: the shard of one of N; or published"
        ),
    ] = ",".join(MODELS),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """T8: time, floor and implementation of every operation at the shapes of models; of published ones, the products.

    --tune adds to the table what it finds, weight by weight, so one that was interrupted goes on with other models.

    Example: strata bench kernels --tune --models 8B,Qwen3-4B,Llama-3.3-70B/8 --json
    """
    import torch

    from strata.kernels.triton_import import HAS_TRITON

    if not (torch.cuda.is_available() and HAS_TRITON):
        raise ValueError(
            "strata bench kernels measures a CUDA device through Triton, and there is none here: run it on a machine "
            "with an NVIDIA GPU, or see a step's kernels and floors with `strata graph MODEL --hardware h200`"
        )

    from benchmarks.kernels.attention_cases import attention_cases
    from benchmarks.kernels.cases import cases
    from benchmarks.kernels.products import products
    from strata.kernels import tuned
    from strata.models.config import ModelConfig

    device = torch.cuda.get_device_name()
    path = table or tuned.path_of(device)
    sizes = sizes_of(models)
    weights = [product for model, size in sizes.items() for product in products(model, size)]
    if tune:
        _tune(weights, device, path)
    elif table is not None and not table.is_file():
        raise ValueError(f"there is no table {table}; give an existing one, or --tune to make it")
    measured: tuned.Table = tuned.read_file(path) if path.is_file() else {}
    if not as_json:
        typer.echo(HEADINGS)
    failed = 0
    configs = {model: size for model, size in sizes.items() if isinstance(size, ModelConfig)}
    calls = {model: (*cases(config), *attention_cases(config)) for model, config in configs.items()}
    for label, measure in _measurements(weights, measured, device, calls):
        try:
            row = measure()
        except (RuntimeError, TypeError, ValueError) as error:  # the others are still worth having
            failed += 1
            print(f"{label} failed: {error}", file=sys.stderr)
        else:
            typer.echo(json.dumps(asdict(row) | {"device": device}) if as_json else row.sentence())
    if failed:
        raise ValueError(f"{failed} measurements failed; the lines above say why")


def sizes_of(models: str) -> dict[str, Sizes]:
    """The models that are asked for; of NAME/N, the shard of one of N ranks.

    Raises ValueError, naming what is known, for one that is not.
    """
    from benchmarks.kernels.published import PUBLISHED, Published
    from strata.plan.meta_model import find_config

    found: dict[str, Sizes] = {}
    for name in models.split(","):
        if name == "published":
            found |= PUBLISHED
        elif name in PUBLISHED:
            found[name] = PUBLISHED[name]
        elif name.rpartition("/")[2].isdigit() and not Path(name).exists():
            whole, _, ranks = name.rpartition("/")
            (sizes,) = sizes_of(whole).values()
            found[name] = Published.of(sizes).shard(int(ranks))
        else:
            try:
                config = find_config(name)
            except ValueError as error:
                raise ValueError(f"{error}; or of the published models {', '.join(PUBLISHED)}") from None
            if config.experts is not None:
                raise ValueError(f"{name} has experts, whose products have no table; give a dense model")
            found[name] = config
    return found


def _tune(weights: Sequence[Product], device: str, path: Path) -> None:
    from benchmarks.kernels.algorithms import tune_algorithms
    from benchmarks.kernels.tuning import tune
    from strata.kernels import tuned

    known: tuned.Table = tuned.read_file(path) if path.is_file() else {}
    tuned.write(path, device, known)  # whether it can be written is seen before minutes are spent
    start = time.perf_counter()
    for product, tiles in tune(weights):
        found = {one.key: one.choice for one in tiles}
        algorithms = list(tune_algorithms([product], found, known))
        for one in (*tiles, *algorithms):
            print(_tuned(one), file=sys.stderr)
        shape = (product.operation, product.out, product.width)
        # After each, so that an interrupted run leaves what it found; beside what others have written meanwhile.
        before = tuned.read_file(path).items()
        table = {key: choice for key, choice in before if (key.operation, key.out, key.width) != shape}
        tuned.write(path, device, table | found | {one.key: one.choice for one in algorithms})
        end = time.perf_counter()
        name = f"{product.operation} {product.model} {product.name} {product.width}->{product.out}"
        print(f"tuned {name} in {end - start:.1f} s", file=sys.stderr)
        start = end


def _tuned(found: Finding) -> str:
    product, choice = found.product, found.choice
    words = " ".join([choice.implementation, *(f"{name}={value}" for name, value in choice.parameters.items())])
    times = f"{choice.seconds * 1e6:.1f} us, the library's product {choice.library_seconds * 1e6:.1f} us"
    return f"tuned {product.operation} {product.model} {product.name} x{found.key.rows}: {times}: {words}"


def _measurements(
    weights: Sequence[Product], table: Table, device: str, cases: dict[str, tuple[Case, ...]]
) -> Iterator[tuple[str, Callable[[], KernelRow]]]:
    import torch

    for product in weights:
        drawn = product.weights()
        for rows in ROWS if product.operation == "linear" else FUSED_ROWS:
            label = f"{product.operation} {product.model} {product.name} x{rows}"
            yield label, partial(_product_row, product, drawn, rows, table, device)
        del drawn
        torch.cuda.empty_cache()
    for model, chosen in cases.items():
        for case in chosen:
            label = f"{case.operation.name} {model} {case.shape} x{case.rows}"
            yield label, partial(_case_row, model, case, device)
            torch.cuda.empty_cache()


def _product_row(product: Product, weights: Sequence[Any], rows: int, table: Table, device: str) -> KernelRow:
    """library: of its product alone, whatever is fused with ours."""
    import torch
    import torch.nn.functional as F

    from benchmarks.kernels.algorithms import calls_by_table
    from benchmarks.kernels.products import DTYPE, arguments
    from benchmarks.kernels.tuning import LIBRARY
    from strata.hardware.replay import time_replayed
    from strata.kernels.device_limits import DeviceLimits
    from strata.kernels.linear.small_m import multiply
    from strata.kernels.linear.small_m_tiles import IMPLEMENTATION, tiles_of
    from strata.kernels.linear.tile_rule import choose_tile

    call, estimate = product.call(rows, weights[0]), product.estimate(rows)
    library = time_replayed([partial(F.linear, call.x, weight) for weight in weights], estimate=estimate).seconds
    limits = DeviceLimits.of(torch.device("cuda", torch.cuda.current_device()))
    tile = choose_tile(product.operation, rows, product.out, product.width, DTYPE, tiles_of(table), limits)
    name, seconds = LIBRARY, library
    kernels: tuple[LaunchedKernel, ...] = ()
    if tile is not None:
        name = " ".join([IMPLEMENTATION, *(f"{key}={value}" for key, value in asdict(tile).items())])
        calls = [partial(multiply, replace(call, weight=weight), tile) for weight in weights]
        seconds, kernels = time_replayed(calls, estimate=estimate).seconds, _launched(calls[0], device)
    elif (measured := calls_by_table(product, call.x, weights, table)) is not None:
        name, seconds = "cublaslt", time_replayed(measured, estimate=estimate).seconds
    cost = product.operator.cost(*arguments(call), workload=Workload((1,) * rows, (1,) * rows))
    shape = f"{product.name} {product.width}->{product.out}"
    found = _beside_floor(cost, "bfloat16", seconds, device)
    return KernelRow(product.operation, product.model, shape, rows, name, seconds, *found, library, kernels)


def _case_row(model: str, case: Case, device: str) -> KernelRow:
    import torch
    from torch.utils import _pytree as pytree

    from strata.hardware.replay import copies_beyond_l2, time_replayed

    def make() -> tuple[Any, ...]:
        with torch.device("cuda"):
            return case.make()

    first = make()
    cost = case.operation.cost(*first, workload=case.workload)
    size = sum(leaf.nbytes for leaf in pytree.tree_leaves(first) if isinstance(leaf, torch.Tensor))
    copies = max(1, min(copies_beyond_l2(cost.bytes), _MAX_BYTES // max(1, size)))
    arguments = [first, *(make() for _ in range(copies - 1))]
    estimate = max(cost.bytes / _BYTES_PER_SECOND, cost.flops / _FLOPS_PER_SECOND)

    def seconds(run: Callable[..., object], calls: list[tuple[Any, ...]]) -> float:
        return time_replayed([partial(run, *call) for call in calls], estimate=estimate).seconds

    chosen = case.operation.bind("cuda").choose(*first)
    taken = seconds(chosen.run, [case.operation.call_args(*args) for args in arguments])
    libraries = []
    for library in case.libraries:
        try:
            libraries.append(seconds(library, arguments))
        except RuntimeError as error:  # no such kernel in this build of torch
            print(f"{case.operation.name} {case.shape} x{case.rows}: no library time: {error}", file=sys.stderr)
    found, name = _beside_floor(cost, case.dtype, taken, device), case.operation.name
    least, kernels = (
        min(libraries, default=None),
        _launched(partial(chosen.run, *case.operation.call_args(*first)), device),
    )
    return KernelRow(name, model, case.shape, case.rows, chosen.name, taken, *found, least, kernels)


def _launched(call: Callable[[], object], device: str) -> tuple[LaunchedKernel, ...]:
    """Those of a call; none on a device that the database does not know."""
    from strata.kernels.compiling.launched import launched

    known = recognize(device)
    return () if known is None or known.cuda is None else tuple(launched(call, known.cuda))


def _beside_floor(
    cost: Cost, dtype: str, seconds: float, device: str
) -> tuple[float | None, float | None, str | None, float]:
    """floor, share, bound and bandwidth of a `KernelRow`."""
    known = recognize(device)
    if known is None:
        return None, None, None, cost.bytes / seconds
    least = floor(cost, known, dtype)
    return least.seconds, least.seconds / seconds, least.bound, cost.bytes / seconds
