"""Rows that are rounded where they are made, alone and in steps, and rounded parts of sums over ranks, on CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.graph.walk import operation_counts
from strata.kernels.activation.quantized_silu_mul import silu_mul_round
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.collective.quantized_shards import (
    GROUP,
    dequantize_shards,
    quantize_shards,
    shard_bytes,
    sum_shards,
)
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.linear import linear
from strata.kernels.linear.quantized_linear import quantized_linear
from strata.kernels.norm.norm import (
    add_rms_norm,
    add_rms_norm_round,
    rms_norm,
    rms_norm_round,
    wide_rms_norm,
    wide_rms_norm_round,
)
from strata.kernels.op import Operation
from strata.kernels.quant.quantized import pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import config_from_dict
from strata.models.families import build
from tests.dummies import randomize
from tests.engine.program.programs import graph_of, replayed, step_program
from tests.gpu.tensors import draw
from tests.models.batches import packed, random_sequences

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

EPS = 1e-5
# Kind, columns that share a scale, and one for all rows.
WAYS = [
    ("e4m3", 0, None), ("int8", 0, None), ("e4m3", 128, None), ("int8", 128, None), ("e4m3", 0, 0.01), ("int8", 0, 0.02)
]  # fmt: skip


def run(operation: Operation, *arguments: Any) -> Any:
    return operation.bind("cuda", deterministic=True)(*arguments)


def assert_identical(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("kind", "columns", "static"), WAYS)
@pytest.mark.parametrize("width", [64, 200, 1024, 4096, 5000, 14336, 16384, 28672])
def test_fused_kernels_have_the_bits_of_their_parts(width: int, kind: str, columns: int, static: float | None) -> None:
    for rows in (1, 65, 300):
        left, right = draw(rows, 2 * width + 16)[:, 16:].split(width, 1)
        gated = run(round_rows, run(silu_mul, left, right), kind, columns, static)
        assert_identical(run(silu_mul_round, left, right, kind, columns, static), gated)
        if width > 16384 or width < columns:
            continue
        weight = draw(width)
        assert rms_norm_round.bind("cuda").choose(left, weight, EPS, kind, columns, True, static).name == "triton"
        normed = run(rms_norm, left, weight, EPS)
        rounded = run(round_rows, normed, kind, columns, static)
        assert_identical(run(rms_norm_round, left, weight, EPS, kind, columns, False, static), rounded)
        assert_identical(run(rms_norm_round, left, weight, EPS, kind, columns, True, static), (*rounded, normed))
        wide = run(wide_rms_norm, left, weight, EPS, 1.0)
        found = run(wide_rms_norm_round, left, weight, EPS, 1.0, kind, columns, True, static)
        assert_identical(found, (*run(round_rows, wide, kind, columns, static), wide))
        total, normed = run(add_rms_norm, left, right, weight, EPS)
        rounded = run(round_rows, normed, kind, columns, static)
        found = run(add_rms_norm_round, left, right, weight, EPS, kind, columns, True, static)
        assert_identical(found, (total, *rounded, normed))
        found = run(add_rms_norm_round, left, right, weight, EPS, kind, columns, False, static)
        assert_identical(found, (total, *rounded))


@pytest.mark.parametrize("static", [None, 0.01])
def test_what_is_no_number_shows_in_its_row_alone(static: float | None) -> None:
    gate, up = draw(9, 4096), draw(9, 4096)
    gate[4, 77] = torch.nan
    for _, scales in (
        run(silu_mul_round, gate, up, "int8", 0, static),
        run(rms_norm_round, gate, up[0], EPS, "int8", 0, False, static),
        run(add_rms_norm_round, gate, up, up[0], EPS, "int8", 0, False, static)[1:],
    ):
        assert scales.isnan().flatten().tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize(
    ("scheme", "static"), [("fp8", None), ("int8", None), ("fp8_block", None), ("fp8", 0.01), ("int8", 0.02)]
)
@pytest.mark.parametrize("rows", [65, 300, 2048])
def test_products_of_rounded_rows_have_the_bits_of_others(rows: int, scheme: str, static: float | None) -> None:
    weight = pack(torch.randn(1008, 2048) / 45, SCHEMES[scheme]).to("cuda")._replace(input_scale=static)
    x, bias = draw(rows, 2048), draw(1008)
    values, scales = run(round_rows, x, weight.kind, weight.columns, static)
    bound = quantized_linear.bind("cuda", packed=True)
    for added in (None, bias):
        chosen = bound.choose(values, scales, weight, added, x.dtype)
        assert chosen.name == linear.bind("cuda", packed=True).choose(x, weight, added).name
        found = chosen.run(*quantized_linear.call_args(values, scales, weight, added, x.dtype))
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
    graphs = step_program(model, "cuda", deterministic=False, limits=limits, target={"packed": weights})
    assert graphs.variant("quantized_logits") is not None
    assert operation_counts(graph_of(graphs, "quantized_logits"))["quantized_linear"] == 4
    batch = packed(random_sequences(512, (90, 40)))
    moved = {name: getattr(batch, name).cuda() for name in ("tokens", "positions", "offsets")}
    batch, rows = replace(batch, **moved), torch.tensor([89, 129], dtype=torch.int32, device="cuda")
    with torch.inference_mode():
        wanted, found = graphs.logits(batch, rows), replayed(graphs, 130)(batch, rows)
    assert wanted.isfinite().all()
    assert torch.equal(found, wanted)


def same(found: Tensor, wanted: Tensor, width: int) -> bool:
    """But for signs of zeros, and what fills parts up."""
    behind = -(-width // 16) * 16
    exponents = slice(behind, behind - (-width // GROUP))
    assert found.shape[2] == wanted.shape[2] == shard_bytes(width)
    values, others = (one[..., :width].cpu().contiguous().view(torch.float8_e4m3fn).float() for one in (found, wanted))
    return torch.equal(found[..., exponents].cpu(), wanted[..., exponents]) and torch.equal(values, others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("ranks", "width", "rows"), [(2, 2048, 1024), (8, 512, 77), (2, 300, 5), (3, 7, 9)])
def test_kernels_have_the_bits_of_their_references(ranks: int, width: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [
        (torch.randn(rows, ranks * width) * torch.randn(rows, ranks * width).exp()).to(dtype) for _ in range(ranks)
    ]
    parts[0][1], parts[0][2, 3], parts[1][4, 0] = 0.0, float("inf"), float("nan")
    sent = [quantize_shards.reference(part, ranks) for part in parts]
    for part, wanted in zip(parts, sent, strict=True):
        # A view whose rows lie further apart, as those of a product with more columns.
        wide = torch.zeros(rows, ranks * width + 16, dtype=dtype, device="cuda")
        wide[:, : ranks * width] = part
        assert same(quantize_shards.bind("cuda")(part.cuda(), ranks), wanted, width)
        assert same(quantize_shards.bind("cuda")(wide[:, : ranks * width], ranks), wanted, width)
    received = torch.stack([one[0] for one in sent])
    total = sum_shards.reference(received, width)
    assert same(sum_shards.bind("cuda")(received.cuda(), width), total, width)
    every = torch.cat([sum_shards.reference(torch.stack([one[rank] for one in sent]), width) for rank in range(ranks)])
    wanted, found = (
        dequantize_shards.reference(every, width, dtype),
        dequantize_shards.bind("cuda")(every.cuda(), width, dtype),
    )
    assert torch.equal(found.cpu().isnan(), wanted.isnan())
    assert torch.equal(found.cpu().nan_to_num(0.0), wanted.nan_to_num(0.0))


def test_own_kernels_run() -> None:
    x = torch.zeros(4, 512, dtype=torch.bfloat16, device="cuda")
    sent = quantize_shards(x, 2)
    for operation, arguments in (
        (quantize_shards, (x, 2)),
        (sum_shards, (sent, 256)),
        (dequantize_shards, (sent, 256, x.dtype)),
    ):
        assert operation.bind("cuda").choose(*arguments).name == "triton"
