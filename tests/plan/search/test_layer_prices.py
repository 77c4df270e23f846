"""Prices from graphs of a few layers against graphs of all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from strata.comm.symmetric import imagined
from strata.cost.step_model import StepModel
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.models.folder import BUILTIN_FOLDER
from strata.models.quantized.calibrate.quantize import quantize
from strata.models.quantized.calibrate.settings import Rounding
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard
from strata.plan.meta_model import find_config, meta_model
from strata.plan.search.layer_prices import LayerPrices
from strata.plan.search.layout import ServingLayout
from strata.plan.search.machine import Machine
from strata.plan.search.precision import AS_CHECKPOINT, IN_FEWER_BITS, Precision, stored_scheme
from strata.plan.search.report import ServingPlan, serving_plan
from strata.plan.search.traffic import Objectives, Traffic

H200 = device("h200")
STEPS = {
    "decode": Workload((1,) * 20, (900,) * 20),
    "mixed": Workload((1,) * 8 + (700,), (900,) * 8 + (700,)),
    "launched by the host": Workload((20_000,), (20_000,)),
}


@pytest.mark.parametrize(("model", "tensor"), [("0.6B", 1), ("0.6B", 4), ("30B-A3B", 2)])
def test_few_layers_give_the_time_of_all(machine: Machine, model: str, tensor: int) -> None:
    config = find_config(model)
    if config.experts is not None:  # two kinds of layers, in an order that does not repeat
        sparse = (False, True, True, False, *(True,) * 4)
        experts = replace(config.experts, layers=sparse)
        config = replace(config, num_layers=8, windows=(None,) * 8, experts=experts)
    shard = None if tensor == 1 else RankShard.of(config, tensor, 0, imagined(TENSOR_AXIS, tensor))
    whole = StepModel(meta_model(config, H200, shard=shard, max_num_seqs=1024), H200)
    prices = LayerPrices(config, machine, ServingLayout(tensor), torch.bfloat16)
    for workload in STEPS.values():
        assert prices.price(workload).seconds == pytest.approx(whole.predict(workload).seconds, rel=1e-6)


@pytest.mark.parametrize("precision", IN_FEWER_BITS, ids=lambda one: one.name)
def test_fewer_bits_take_what_their_own_graphs_take(machine: Machine, precision: Precision) -> None:
    """Within 6 %: what rounds rows stands in these graphs alone."""
    config = find_config("8B").with_layers([0, 1])
    plain = LayerPrices(config, machine, ServingLayout(), torch.bfloat16)
    packed = LayerPrices(config, machine, ServingLayout(), torch.bfloat16, precision)
    for workload in STEPS.values():
        (found,) = plain.prices(workload, [precision])
        assert found.seconds == pytest.approx(packed.price(workload).seconds, rel=0.06)
        assert found.bounds.memory == pytest.approx(packed.price(workload).bounds.memory, rel=0.001)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "V2-Lite"])  # attention reads sinks, and what makes keys of latents
def test_products_alone_take_less_in_fewer_bits(machine: Machine, model: str) -> None:
    config = find_config(model).with_layers([0, 1])
    workload = Workload((4096,), (4096,))
    (found,) = LayerPrices(config, machine, ServingLayout(), torch.bfloat16).prices(workload, [Precision("fp8")])
    packed = LayerPrices(config, machine, ServingLayout(), torch.bfloat16, Precision("fp8")).price(workload)
    assert found.bounds.compute == pytest.approx(packed.bounds.compute, rel=0.001)
    assert found.bounds.memory == pytest.approx(packed.bounds.memory, rel=0.001)
    assert found.seconds == pytest.approx(packed.seconds, rel=0.06)


def test_fewer_bits_are_read_as_such(machine: Machine) -> None:
    prices = LayerPrices(find_config("8B"), machine, ServingLayout(), torch.bfloat16)
    plain, fp8, fp8_kv, int4 = prices.prices(STEPS["decode"], [AS_CHECKPOINT, *IN_FEWER_BITS])
    layers = 32 * (4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    bandwidth = H200.ceiling("bandwidth").value
    assert plain.bounds.memory - fp8.bounds.memory == pytest.approx(layers / bandwidth, rel=2e-3)  # a byte a weight
    assert plain.bounds.memory - int4.bounds.memory == pytest.approx(1.46875 * layers / bandwidth, rel=2e-3)
    cached = 20 * 900 * 32 * 2 * 8 * (2 * 128 - 129)  # a byte an element, and one a row of a head
    assert fp8.bounds.memory - fp8_kv.bounds.memory == pytest.approx(cached / bandwidth, rel=1e-6)
    assert fp8_kv.seconds < fp8.seconds < plain.seconds
    assert fp8.origins["analytic"] > plain.origins["analytic"]


def test_a_folder_that_is_packed_is_priced_by_what_it_holds(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "int4"
    quantize(BUILTIN_FOLDER, folder, Rounding.of("int4", "rtn", 64, ()), [], torch.device("cpu"))
    config = find_config(str(folder))
    scheme = stored_scheme(config, folder)
    assert scheme is not None
    assert (scheme.values, scheme.columns) == ("int4", 64)
    prices = LayerPrices(config, machine, ServingLayout(), torch.bfloat16)
    weights = sum(
        layer.numel() for name, layer in load_file(BUILTIN_FOLDER / "model.safetensors").items() if "_proj" in name
    )
    saved = weights * (2 - 0.5 - 4 / 64)  # of 64 values in 4 bits a scale in float32
    for workload in STEPS.values():
        plain, found = prices.prices(workload, [AS_CHECKPOINT, Precision(stored=scheme)])
        assert plain.bounds.memory - found.bounds.memory == pytest.approx(
            saved / H200.ceiling("bandwidth").value, rel=0.002
        )
    assert stored_scheme(find_config(str(BUILTIN_FOLDER)), BUILTIN_FOLDER) is None


def test_a_plan_of_such_a_folder_reads_less(tmp_path: Path) -> None:
    def plan(folder: Path) -> ServingPlan:
        traffic, none = Traffic.of(100, 20), Objectives(None, None)
        return serving_plan(str(folder), str(folder), H200, 1, traffic, none, 1, 1e9, None)

    quantize(BUILTIN_FOLDER, tmp_path / "int4", Rounding.of("int4", "rtn", 64, ()), [], torch.device("cpu"))
    packed, plain = plan(tmp_path / "int4"), plan(BUILTIN_FOLDER)
    assert packed.decode.bounds.memory < plain.decode.bounds.memory
    assert packed.question.precision.words == plain.question.precision.words == []
    assert packed.found.best.held.weights < plain.found.best.held.weights
