"""`strata bench kernels` without a GPU: which products it measures, what it says, and what it writes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.kernels import command as bench_kernels
from benchmarks.kernels.command import HEADINGS, KernelRow, sizes_of
from strata.cli.bench.inference import bench
from strata.graph.trace import operation_of
from strata.hardware.specs import device
from strata.kernels import tuned
from strata.kernels.linear.linear import linear
from strata.kernels.tuned import Key, TunedChoice, row_bucket
from strata.plan.meta_model import find_config, meta_model

pytest.importorskip("triton")

from benchmarks.kernels import algorithms, tuning
from benchmarks.kernels.products import Product, arguments, products
from benchmarks.kernels.published import PUBLISHED, Published
from benchmarks.kernels.tuning import BUCKETS, Finding


@pytest.mark.parametrize("model", ["8B", "0.6B"])
def test_the_products_are_those_of_the_merged_graph(model: str) -> None:
    config = find_config(model)
    built = meta_model(config, device("h200")).program
    wanted = {
        tuple(attrgetter(str(node.args[1].target))(graph).shape)
        for graph in (built.hidden, built.head)
        for node in graph.graph.nodes
        if operation_of(node) is linear
    }
    assert {(product.out, product.width) for product in products(model, config)} == wanted


def test_every_weight_is_tuned_alone_and_fused() -> None:
    found = [(product.name, product.operation) for product in products("8B", find_config("8B"))]
    assert found == [
        ("qkv", "linear"), ("qkv", "scaled_linear"), ("o", "linear"), ("o", "linear_add"),
        ("gate_up", "linear"), ("gate_up", "scaled_linear_silu_mul"), ("down", "linear"), ("down", "linear_add"),
        ("lm_head", "linear"), ("lm_head", "scaled_linear"),
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_calls_are_what_their_operations_take(rows: int) -> None:
    for product in products("0.6B", find_config("0.6B")):
        weight = torch.empty(product.out, product.width, dtype=torch.bfloat16, device="meta")
        result = product.operator.meta(*arguments(product.call(rows, weight)))
        first = result[0] if isinstance(result, tuple) else result
        assert first.shape == (rows, product.out // (2 if "silu" in product.operation else 1))


def test_models_are_shapes_folders_or_published(tmp_path: Path) -> None:
    config = find_config("0.6B")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    found = sizes_of(f"8B,Qwen3-4B,{tmp_path}")
    assert list(found) == ["8B", "Qwen3-4B", str(tmp_path)]
    assert found[str(tmp_path)] == config
    assert sizes_of("published") == PUBLISHED
    with pytest.raises(ValueError, match=r"0\.6B.*Llama-3\.3-70B/8"):
        sizes_of("8B,Qwen3-5B")
    assert sizes_of("8B/2")["8B/2"] == Published(4096, 7168, 16, 4, 128, 64128, ranks=2)
    with pytest.raises(ValueError, match="among 0 ranks"):
        sizes_of("8B/0")
    with pytest.raises(ValueError, match="30B-A3B has experts"):
        sizes_of("30B-A3B")
    with pytest.raises(ValueError, match="'' is neither a folder"):
        sizes_of("8B,")


class TestTuning:
    """The table that is written, of findings that are given."""

    @staticmethod
    def finding(out: int, seconds: float) -> Finding:
        product = Product("tiny", "o", "linear", out, 32)
        return Finding(product, Key("linear", "bfloat16", out, 32, 1), TunedChoice("cublas", {}, seconds, seconds))

    @pytest.fixture
    def tune(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Iterable[Finding]], None]:
        monkeypatch.setattr(algorithms, "tune_algorithms", lambda *_: iter(()))

        def run(path: Path, findings: Iterable[Finding]) -> None:
            monkeypatch.setattr(tuning, "tune", lambda _: ((one.product, [one]) for one in findings))
            bench_kernels._tune([], "NVIDIA Test 1", path)

        return run

    def test_a_weight_takes_the_place_of_its_entries_alone(
        self, tmp_path: Path, tune: Callable[[Path, Iterable[Finding]], None]
    ) -> None:
        path = tmp_path / "table.json"
        old, other, new = self.finding(16, 1.0), self.finding(48, 2.0), self.finding(16, 3.0)
        tune(path, [old, other])
        tune(path, [new])
        assert tuned.read_file(path) == {other.key: other.choice, new.key: new.choice}

    def test_what_another_process_found_meanwhile_stays(
        self, tmp_path: Path, tune: Callable[[Path, Iterable[Finding]], None]
    ) -> None:
        path = tmp_path / "table.json"
        first, others = self.finding(16, 1.0), self.finding(48, 2.0)

        def findings() -> Iterator[Finding]:
            tuned.write(path, "NVIDIA Test 1", {others.key: others.choice})
            yield first

        tune(path, findings())
        assert tuned.read_file(path) == {others.key: others.choice, first.key: first.choice}

    def test_a_table_that_cannot_be_written_ends_it_before_anything_is_measured(
        self, tmp_path: Path, tune: Callable[[Path, Iterable[Finding]], None]
    ) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            tune(tmp_path / "file" / "table.json", iter(lambda: pytest.fail("measured"), None))


def test_a_shard_has_its_part_of_every_weight() -> None:
    whole, shard = (
        {product.name: (product.out, product.width) for product in products(name, PUBLISHED[name])}
        for name in ("Llama-3.3-70B", "Llama-3.3-70B/8")
    )
    assert whole == {
        "qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672),
        "lm_head": (128256, 8192),
    }  # fmt: skip
    assert shard == {
        "qkv": (1280, 8192), "o": (8192, 1024), "gate_up": (7168, 8192), "down": (8192, 3584), "lm_head": (16032, 8192),
    }  # fmt: skip
    with pytest.raises(ValueError, match="among 3 ranks"):
        PUBLISHED["Llama-3.3-70B"].shard(3)


def test_every_count_of_rows_up_to_256_has_its_bucket() -> None:
    for rows in range(1, 257):
        assert min(bucket for bucket in BUCKETS if bucket >= rows) <= row_bucket(rows)


def test_columns_stand_under_their_headings() -> None:
    row = KernelRow("linear", "8B", "qkv 4096->6144", 1, "cublas", 15e-6, 11.8e-6, 0.78, "memory", 3.4e12, 17.6e-6)
    said = row.sentence()
    for heading, value in (("us", "15.0"), ("floor us", "11.8"), ("share", "78%"), ("TB/s", "3.40")):
        end = HEADINGS.index(f"{heading} ") + len(heading)
        assert said[:end].endswith(value)
    unknown = KernelRow("rope", "8B", "32x128", 1, "triton", 2e-6, None, None, None, 1e9, None).sentence()
    assert "None" not in unknown
    assert len(unknown.split()) == len(HEADINGS.split()) - 2  # two headings are of two words


@pytest.mark.parametrize("options", ["", "--tune --models published", "--tune --table table.json"])
def test_without_a_gpu_it_says_what_to_do(options: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(bench, ["kernels", *options.split()])
    assert isinstance(result.exception, ValueError)
    assert "there is none here: run it on a machine with an NVIDIA GPU" in str(result.exception)
    assert not list(tmp_path.iterdir())
