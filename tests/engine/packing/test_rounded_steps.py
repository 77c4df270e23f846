"""Which steps of packed models round rows where they are made, and what they launch on a device that is not here."""

from __future__ import annotations

import pytest
import torch

from strata.engine.program.meta_model import MetaModel
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.kernels.choose import MEASURED, thresholds_of
from strata.plan.meta_model import find_config, meta_model
from tests.engine.program.programs import decode, graph_of, replayed

pytest.importorskip("triton")
LAYERS = 2


def model_of(scheme: str | None, gpu: str = "h200", deterministic: bool = False, **changes: object) -> MetaModel:
    config = find_config("8B").with_layers((0, 1))
    found = meta_model(config, device(gpu), deterministic=deterministic, quantization=scheme, **changes)
    return found.of_sizes(attends=False)


PRODUCTS = {"fp8": "(cuBLAS)", "int8": "rounded_product_kernel", "fp8_block": "rounded_product_kernel"}


@pytest.fixture(scope="module", params=PRODUCTS)
def scheme(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(scheme: str) -> MetaModel:
    return model_of(scheme)


def decodes(sequences: int) -> Workload:
    return Workload((1,) * sequences, (1000,) * sequences)


def test_prompts_round_where_rows_are_made(model: MetaModel, scheme: str) -> None:
    step = model.step(Workload((4096,), (4096,)))
    assert step.graph == "rounded_logits"
    product = PRODUCTS[scheme]
    first = step.kernels.index("rms_norm_kernel")
    assert step.kernels[first : first + 12] == [
        "rms_norm_kernel", product, "qk_rope_kv_write_kernel", "attention_kernel", "round_rows_kernel", product,
        "rms_norm_kernel", product, "rounded_silu_mul_kernel", product, "rms_norm_kernel", product,
    ]  # fmt: skip
    # Behind the last attention one row is left, and few rows are not rounded.
    assert step.kernels.count("round_rows_kernel") == LAYERS - 1


def test_the_number_of_rows_decides(model: MetaModel) -> None:
    most = thresholds_of(MEASURED).quantized_rows
    graphs = model.program
    assert replayed(graphs, most) is graphs.logits
    assert replayed(graphs, most + 1) is graph_of(graphs, "rounded_logits")
    assert decode(graphs, most) is graph_of(graphs, "decode_small_batch")
    assert decode(graphs, most + 1) is graph_of(graphs, "decode_large_batch")
    many = model.step(decodes(most + 1)).kernels
    assert many.count("rms_norm_kernel") == 2 * LAYERS + 1
    assert many.count("rounded_silu_mul_kernel") == many.count("round_rows_kernel") == LAYERS
    assert not any("round" in kernel for kernel in model.step(decodes(most)).kernels)
    assert not any("round" in name for name in operation_counts(graphs.logits))


@pytest.mark.parametrize(
    ("scheme", "gpu", "changes"),
    [
        (None, "h200", {}),
        ("int4", "h200", {}),
        ("fp8_weights", "h200", {}),
        ("fp8", "a100", {}),
        ("fp8", "h200", {"deterministic": True}),
        ("fp8", "h200", {"dtype": torch.float16}),
    ],
)
def test_what_rounds_no_rows_has_no_such_graph(scheme: str | None, gpu: str, changes: dict[str, object]) -> None:
    graphs = model_of(scheme, gpu, **changes).program
    assert graphs.variant("rounded_logits") is None
    assert replayed(graphs, 4096) is graphs.logits
    if graphs.variant("decode_large_batch") is not None:
        assert not any("round" in name for name in operation_counts(graph_of(graphs, "decode_large_batch")))
