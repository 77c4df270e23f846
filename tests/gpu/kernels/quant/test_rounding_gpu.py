"""Rows that are rounded where they are made, on CUDA: the bits of the operations one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.engine.step_graphs import step_graphs
from strata.graph.cost import operation_counts
from strata.kernels.activation.rounded_silu_mul import silu_mul_round
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.linear import linear
from strata.kernels.linear.rounded_linear import rounded_linear
from strata.kernels.norm.norm import add_rms_norm, rms_norm
from strata.kernels.norm.rounded_norm import add_rms_norm_round, rms_norm_round, wide_rms_norm_round
from strata.kernels.norm.wide_norm import wide_rms_norm
from strata.kernels.op import Operation
from strata.kernels.quant.packed import pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.initialize import randomize
from tests.models.batches import packed, random_sequences

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

EPS = 1e-5
WAYS = [("e4m3", 0), ("int8", 0), ("e4m3", 128), ("int8", 128)]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def run(operation: Operation, *arguments: Any) -> Any:
    return operation.bind("cuda", deterministic=True)(*arguments)


def assert_identical(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("kind", "columns"), WAYS)
@pytest.mark.parametrize("width", [64, 200, 1024, 4096, 5000, 14336, 16384, 28672])
def test_fused_kernels_have_the_bits_of_their_parts(width: int, kind: str, columns: int) -> None:
    for rows in (1, 65, 300):
        left, right = draw(rows, 2 * width + 16)[:, 16:].split(width, 1)
        gated = run(round_rows, run(silu_mul, left, right), kind, columns)
        assert_identical(run(silu_mul_round, left, right, kind, columns), gated)
        if width > 16384 or width < columns:
            continue
        weight = draw(width)
        assert rms_norm_round.bind("cuda").choose(left, weight, EPS, kind, columns, True).name == "triton"
        normed = run(rms_norm, left, weight, EPS)
        rounded = run(round_rows, normed, kind, columns)
        assert_identical(run(rms_norm_round, left, weight, EPS, kind, columns, False), rounded)
        assert_identical(run(rms_norm_round, left, weight, EPS, kind, columns, True), (*rounded, normed))
        wide = run(wide_rms_norm, left, weight, EPS, 1.0)
        found = run(wide_rms_norm_round, left, weight, EPS, 1.0, kind, columns, True)
        assert_identical(found, (*run(round_rows, wide, kind, columns), wide))
        total, normed = run(add_rms_norm, left, right, weight, EPS)
        rounded = run(round_rows, normed, kind, columns)
        found = run(add_rms_norm_round, left, right, weight, EPS, kind, columns, True)
        assert_identical(found, (total, *rounded, normed))
        found = run(add_rms_norm_round, left, right, weight, EPS, kind, columns, False)
        assert_identical(found, (total, *rounded))


def test_what_is_no_number_shows_in_its_row_alone() -> None:
    gate, up = draw(9, 4096), draw(9, 4096)
    gate[4, 77] = torch.nan
    for _, scales in (
        run(silu_mul_round, gate, up, "int8", 0),
        run(rms_norm_round, gate, up[0], EPS, "int8", 0, False),
        run(add_rms_norm_round, gate, up, up[0], EPS, "int8", 0, False)[1:],
    ):
        assert scales.isnan().flatten().tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8_block"])
@pytest.mark.parametrize("rows", [65, 300, 2048])
def test_products_of_rounded_rows_have_the_bits_of_others(rows: int, scheme: str) -> None:
    weight = pack(torch.randn(1008, 2048) / 45, SCHEMES[scheme]).to("cuda")
    x, bias = draw(rows, 2048), draw(1008)
    values, scales = run(round_rows, x, weight.kind, weight.columns)
    bound = rounded_linear.bind("cuda", packed=True)
    for added in (None, bias):
        chosen = bound.choose(values, scales, weight, added, x.dtype)
        assert chosen.name == linear.bind("cuda", packed=True).choose(x, weight, added).name
        found = chosen.run(values, scales, weight, added, x.dtype)
        assert torch.equal(found, linear.bind("cuda", packed=True)(x, weight, added))


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 512,
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8_block"])
def test_steps_of_many_rows_have_the_bits_of_others(scheme: str) -> None:
    model = build(config_from_dict(LLAMA)).requires_grad_(False)
    randomize(model, 0)
    model = model.bfloat16().cuda()
    names = [name for name, one in model.named_parameters() if one.dim() == 2 and "proj" in name]
    weights = {name: pack(model.get_parameter(name).data.cpu(), SCHEMES[scheme]).to("cuda") for name in names}
    limits = DeviceLimits.of(torch.device("cuda", torch.cuda.current_device()))
    graphs = step_graphs(model, "cuda", deterministic=False, packed=weights, limits=limits)
    assert graphs.rounded_logits is not None
    assert operation_counts(graphs.rounded_logits)["rounded_linear"] == 4
    batch = packed(random_sequences(512, (90, 40)))
    moved = {name: getattr(batch, name).cuda() for name in ("tokens", "positions", "offsets")}
    batch, rows = replace(batch, **moved), torch.tensor([89, 129], dtype=torch.int32, device="cuda")
    with torch.inference_mode():
        wanted, found = graphs.logits(batch, rows), graphs.logits_of(130)(batch, rows)
    assert wanted.isfinite().all()
    assert torch.equal(found, wanted)
