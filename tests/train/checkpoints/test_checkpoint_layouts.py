"""Checkpoints written under one layout and read under others, bit by bit, their export, and ranges of flat parts."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from strata.comm.launch import World
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.weights import load as load_model
from strata.parallel.data_parallel import gradient_axes
from strata.parallel.layout import Layout
from strata.parallel.parallelize import Parallel, parallelize
from strata.parallel.schedules import make_schedule
from strata.parallel.stages import ModelStages, layer_spans
from strata.train.checkpoints.checkpointer import Checkpointer
from strata.train.checkpoints.flat_ranges import Box, FlatRange, are_disjoint, copy_common
from strata.train.checkpoints.folder import newest
from strata.train.checkpoints.index import Index, StoredShard
from strata.train.checkpoints.reader import load
from strata.train.checkpoints.state import StateShard, state_shards
from strata.train.finish import export
from tests.parallel.models import config_of, random_model
from tests.parallel.ranks import run_ranks

# Sizes that ranks do not divide, an embedding that is tied, and head norms of two elements: of four ranks of FSDP, two
# have none of them.
CONFIGS = {"dense": config_of("qwen3-biases-tied", head_dim=2), "experts": config_of("qwen3-moe", head_dim=2)}
LAYOUTS: dict[int, dict[str, tuple[str, Layout]]] = {
    1: {"dense": ("dense", Layout()), "experts": ("experts", Layout())},
    2: {
        "dp2": ("dense", Layout(dp=2)),
        "zero2": ("dense", Layout(shard=2, zero=2)),
        "tp2": ("dense", Layout(tp=2)),
        "fsdp2": ("dense", Layout(shard=2, zero=3)),
        "pp2": ("dense", Layout(pp=2)),
        "ep2": ("experts", Layout(shard=2, ep=2, zero=1)),
    },
    4: {
        "zero1-tp": ("dense", Layout(shard=2, tp=2, zero=1, sequence_parallel=True)),
        "hsdp": ("dense", Layout(dp=2, shard=2, zero=3)),
        "fsdp4": ("dense", Layout(shard=4, zero=3)),
        "pp2-dp": ("dense", Layout(pp=2, dp=2)),
        "ep2-fsdp4": ("experts", Layout(shard=4, ep=2, zero=3)),
    },
}
KINDS = ("exp_avg", "exp_avg_sq")
RECIPE = {"run": {"seed": 1}}


def value_of(kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Of a whole tensor, the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))
    return torch.randn(shape, generator=generator)


def model_of(config: ModelConfig, layout: Layout, world: World) -> Any:
    """Whole, or this rank's stages."""
    model = random_model(config, torch.float32)
    if layout.pp == 1:
        return model
    schedule = make_schedule(layout.schedule, layout.pp, layout.micro_batches)
    stages = schedule.stages_of(layout.mesh(world).axis("pp").index)
    return ModelStages(model, layer_spans(model, schedule.stages, 8), stages)


def pieces_under(world: World, config: ModelConfig, layout: Layout) -> tuple[list[StateShard], Parallel]:
    """A rank's masters and moments, with no values yet."""
    mesh = layout.mesh(world)
    model = model_of(config, layout, world)
    parallel = parallelize(model, config, layout, mesh, compute_dtype=torch.bfloat16, bucket_elements=1)
    parts = parallel.gradients.shards
    state = {kind: [torch.zeros(part.master.numel()) for part in parts] for kind in KINDS}
    axes = gradient_axes(mesh, parallel.sharding, layout.zero)
    shards = state_shards(parts, state, parallel.sharding, axes)
    assert len(shards) == 3 * len(parts)
    forget(shards)
    return shards, parallel


def forget(shards: list[StateShard]) -> None:
    for shard in shards:
        shard.tensor.fill_(torch.nan)


def wanted(shard: StateShard, parallel: Parallel) -> Tensor:
    """By the cut that training makes."""
    part = parallel.sharding.shard(shard.name, value_of(shard.kind, shard.name, shard.shape))
    assert list(part.shape) == [end - first for first, end in shard.box]
    return part.flatten()[shard.start : shard.start + shard.tensor.numel()]


def write_and_read(world: World, folder: Path, others: list[str]) -> dict[str, Any]:
    """Write a checkpoint of every layout of this world, and read those and the `others` of the folder under each.

    Returns what was not equal, and by layout which parameters this rank has something of.
    """
    layouts = LAYOUTS[world.size]
    made = {name: pieces_under(world, CONFIGS[kind], layout) for name, (kind, layout) in layouts.items()}
    for name, (shards, parallel) in made.items():
        for shard in shards:
            shard.tensor.copy_(wanted(shard, parallel))
        checkpointer = Checkpointer(folder / name, world, keep=1, warn=_fail)
        checkpointer.start(7, {"recipe": RECIPE, "position": {"step": 7}}, shards)
        checkpointer.before_update()
        forget(shards)
        path = checkpointer.finish()
        assert path == folder / name / "step-00000007"
        assert checkpointer.finish() is None
    wrong = []
    for name, (shards, parallel) in made.items():
        for source in [*layouts, *others]:
            if family_of(source) == family_of(name):
                forget(shards)
                load(folder / source / "step-00000007", shards)
                wrong += [
                    f"{source} under {name}: {shard.kind} of {shard.name}"
                    for shard in shards
                    if not torch.equal(shard.tensor, wanted(shard, parallel))
                ]
    held = {name: sorted({shard.name for shard in shards}) for name, (shards, _) in made.items()}
    return {"wrong": wrong, "held": held}


def family_of(name: str) -> str:
    return next(layouts[name][0] for layouts in LAYOUTS.values() if name in layouts)


def _fail(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every layout of two and four ranks, which read each other's."""
    folder = tmp_path_factory.mktemp("layouts")
    two = run_ranks(write_and_read, 2, folder, timeout=120, others=[])
    four = run_ranks(write_and_read, 4, folder, timeout=120, others=list(LAYOUTS[2]))
    assert [rank["wrong"] for rank in (*two, *four)] == [[]] * 6
    # What the layouts were chosen for: ranks with other parameters, and with nothing of a parameter that others divide.
    assert not set(two[0]["held"]["pp2"]) & set(two[1]["held"]["pp2"])
    assert set(four[3]["held"]["fsdp4"]) < set(four[0]["held"]["fsdp4"])
    return folder


def test_one_process_reads_what_any_layout_wrote(written: Path) -> None:
    world = World(0, 0, 1, torch.device("cpu"), None)
    for family in CONFIGS:
        shards, _ = pieces_under(world, CONFIGS[family], Layout())
        for source in (name for size in (2, 4) for name in LAYOUTS[size] if family_of(name) == family):
            forget(shards)
            path = newest(written / source, _fail)
            assert path is not None
            load(path, shards)
            for shard in shards:
                whole = value_of(shard.kind, shard.name, shard.shape)
                assert torch.equal(shard.tensor.view(shard.shape), whole), (source, shard.kind, shard.name)


def test_ranks_that_hold_the_same_share_the_writing(written: Path) -> None:
    for name in ("dp2", "hsdp"):
        files = json.loads((written / name / "step-00000007" / "index.json").read_text())["files"]
        sizes = [size for file, size in files.items() if file.startswith("rank-")]
        assert max(sizes) < 1.4 * min(sizes), (name, files)


@pytest.mark.parametrize("source", ["fsdp4", "pp2", "ep2"])
def test_export_is_the_masters_rounded(source: str, written: Path, tmp_path: Path) -> None:
    config = CONFIGS[family_of(source)]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    path = written / source / "step-00000007"
    export(path, config, tmp_path / "tokenizer", tmp_path / "out")
    model, read = load_model(tmp_path / "out")
    assert (read.dtype, read.tied) == (torch.bfloat16, config.tied)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert_masters(model, torch.bfloat16)
    export(path, config, tmp_path / "tokenizer", tmp_path / "wide", torch.float32)
    assert_masters(load_model(tmp_path / "wide")[0], torch.float32)


def assert_masters(model: nn.Module, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, value_of("master", name, tuple(parameter.shape)).to(dtype)), name


def test_another_model_is_an_error_that_names_the_difference(written: Path, tmp_path: Path) -> None:
    path = written / "zero2" / "step-00000007"
    for changes, reason in (
        ({"intermediate_size": 39}, r"has model\.layers\.0\.mlp\.gate_proj\.weight of shape \[37, 24\], the model \["),
        ({"num_hidden_layers": 3}, r"has no master of model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"has model\.layers\.1\..*, which this model has not"),
    ):
        with pytest.raises(ValueError, match=reason):
            export(path, config_of("qwen3-biases-tied", head_dim=2, **changes), tmp_path, tmp_path / "out")
    momentum = StateShard("momentum", "model.norm.weight", (24,), ((0, 24),), 0, torch.zeros(24))
    with pytest.raises(ValueError, match=r"has no momentum of model\.norm\.weight; it is of another model or another"):
        load(path, [momentum])


def test_a_state_that_does_not_fit_its_part_is_an_error() -> None:
    world = World(0, 0, 1, torch.device("cpu"), None)
    layout = Layout()
    mesh = layout.mesh(world)
    with torch.device("meta"):
        model = build(CONFIGS["dense"])
    parallel = parallelize(model, CONFIGS["dense"], layout, mesh)
    parts, axes = parallel.gradients.shards, gradient_axes(mesh, parallel.sharding, 0)
    state: Mapping[str, list[Tensor]] = {"momentum": [torch.zeros(0) for _ in parts]}
    assert {shard.kind for shard in state_shards(parts, state, parallel.sharding, axes)} == {"master"}
    elsewhere = [torch.zeros(part.master.numel()) for part in parts]
    made = state_shards(parts, {"master": elsewhere}, parallel.sharding, axes)
    assert [shard.tensor.data_ptr() for shard in made] == [tensor.data_ptr() for tensor in elsewhere]
    with pytest.raises(ValueError, match=r"momentum of .* has 3 elements, its shard"):
        state_shards(parts, {"momentum": [torch.zeros(3) for _ in parts]}, parallel.sharding, axes)


def flat_places(shape: tuple[int, ...], run: FlatRange) -> Tensor:
    """Which elements of the flattened tensor a run covers, in its order."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    inside = numbers[tuple(slice(first, end) for first, end in run.box)].flatten()
    return inside[run.start : run.start + run.elements]


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], FlatRange, FlatRange]:
    """A shape and two runs of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))

    def run() -> FlatRange:
        edges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        box: Box = tuple((first, end) for first, end in edges)
        size = math.prod(end - first for first, end in box)
        first, end = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        return FlatRange(box, first, end - first)

    return shape, run(), run()


@settings(max_examples=300, deadline=None)
@given(runs())
def test_what_two_runs_share_is_copied_and_nothing_else(drawn: tuple[tuple[int, ...], FlatRange, FlatRange]) -> None:
    shape, source, target = drawn
    values = torch.randn(math.prod(shape), dtype=torch.float64)
    have, want = flat_places(shape, source), flat_places(shape, target)
    out = torch.full((target.elements,), float("nan"), dtype=torch.float64)
    copied = copy_common(source, values[have], target, out)
    shared = torch.isin(want, have)
    assert copied == int(shared.sum())
    assert source.overlaps(target) == (copied > 0)
    assert torch.equal(out[shared], values[want][shared])
    assert out[~shared].isnan().all()


def test_an_empty_run_between_two_hides_no_overlap() -> None:
    assert not are_disjoint([FlatRange(((0, 9),), *one) for one in ((0, 5), (2, 0), (3, 2))])
    assert are_disjoint([FlatRange(((0, 9),), *one) for one in ((0, 5), (2, 0), (5, 2))])


def test_a_run_is_few_rectangles() -> None:
    assert len(FlatRange(((0, 128), (0, 64)), 10, 5000).rectangles) == 3
    assert len(FlatRange(((3, 8),), 1, 3).rectangles) == 1
    assert FlatRange(((2, 4), (5, 9)), 0, 8).rectangles[0].box == ((2, 4), (5, 9))


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[int, ...], list[FlatRange]]:
    """A shape and runs that make up the whole, of which some may then be moved: the sum of their elements remains."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))}) for size in shape]
    boxes = itertools.product(*(itertools.pairwise(edges) for edges in cuts))
    runs: list[FlatRange] = []
    for box in boxes:
        size = math.prod(end - first for first, end in box)
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        runs += [FlatRange(box, first, end - first) for first, end in itertools.pairwise(edges)]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(runs) - 1))
        whole = tuple((0, size) for size in shape)
        last = math.prod(shape) - runs[at].elements
        runs[at] = FlatRange(whole, draw(st.integers(0, last)), runs[at].elements)
    return shape, draw(st.permutations(runs))


@settings(max_examples=300, deadline=None)
@given(tables())
def test_a_table_is_good_if_every_element_lies_in_one_shard(drawn: tuple[tuple[int, ...], list[FlatRange]]) -> None:
    shape, runs = drawn
    covered = torch.zeros(math.prod(shape), dtype=torch.int64)
    for run in runs:
        covered[flat_places(shape, run)] += 1
    shards = [StoredShard("a", "master", "w", shape, one.box, one.start, one.elements, "float32", 0) for one in runs]
    index = Index({}, 0, shards)
    if (covered == 1).all():
        index.check()
    else:
        with pytest.raises(ValueError, match="two shards of master/w overlap"):
            index.check()
