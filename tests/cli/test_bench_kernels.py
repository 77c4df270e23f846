"""`strata bench kernels` without a GPU: which products it measures, what it says, and what it writes of them."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from strata.bench.costing import find_config, meta_model
from strata.cli.bench import bench
from strata.cli.bench_kernels import HEADINGS, Row
from strata.graph.capture import operation_of
from strata.hardware.specs import device
from strata.kernels.linear.linear import linear
from strata.kernels.tuned import row_bucket

pytest.importorskip("triton")

from strata.bench.kernels.products import arguments, products
from strata.bench.kernels.tuning import BUCKETS


@pytest.mark.parametrize("model", ["8B", "0.6B"])
def test_the_products_are_those_of_the_merged_graph(model: str) -> None:
    config = find_config(model)
    built = meta_model(config, device("h200")).graphs
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


def test_every_count_of_rows_up_to_256_has_its_bucket() -> None:
    for rows in range(1, 257):
        assert min(bucket for bucket in BUCKETS if bucket >= rows) <= row_bucket(rows)


def test_columns_stand_under_their_headings() -> None:
    row = Row("linear", "8B", "qkv 4096->6144", 1, "cublas", 15e-6, 11.8e-6, 0.78, "memory", 3.4e12, 17.6e-6)
    said = row.sentence()
    for heading, value in (("us", "15.0"), ("floor us", "11.8"), ("share", "78%"), ("TB/s", "3.40")):
        end = HEADINGS.index(f"{heading} ") + len(heading)
        assert said[:end].endswith(value)
    unknown = Row("rope", "8B", "32x128", 1, "triton", 2e-6, None, None, None, 1e9, None).sentence()
    assert "None" not in unknown
    assert len(unknown.split()) == len(HEADINGS.split()) - 2  # two headings are of two words


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(bench, ["kernels", "--tune", "--table", str(tmp_path / "table.json")])
    assert isinstance(result.exception, ValueError)
    assert "CUDA" in str(result.exception)
    assert not list(tmp_path.iterdir())
