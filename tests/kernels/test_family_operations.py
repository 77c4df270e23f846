"""Operations that some families alone have: rounded as transformers rounds, alike in any company, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, GptOssConfig, Qwen3NextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.clamped_swiglu import Clamp, clamped_swiglu
from strata.kernels.activation.gelu_mul import gelu_mul
from strata.kernels.activation.scale import scale, softcap
from strata.kernels.activation.sigmoid_gate import sigmoid_gate
from strata.kernels.moe.experts import biased_experts, by_library
from strata.kernels.norm.divided_norm import divided_rms_norm, mean_square
from strata.kernels.norm.wide_norm import wide_rms_norm
from strata.kernels.op import Operation
from strata.kernels.recurrent.deinterleave import deinterleave
from strata.kernels.recurrent.divided_gated_norm import divided_gated_rms_norm, gated_mean_square
from strata.kernels.rotary.rope import partial_rope, rope_angles

from .test_invariance import ROWS, assert_rows_stand_alone

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("theirs", "offset"), [(Olmo2RMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
def test_wide_norms_have_the_bits_of_transformers(theirs: type, offset: float, dtype: torch.dtype) -> None:
    norm = theirs(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(17, 96).to(dtype)
    assert torch.equal(wide_rms_norm(x, norm.weight, 1e-5, offset), norm(x))


def test_a_divided_norm_is_the_norm_of_the_whole_row() -> None:
    """Four ranks, of which two and two hold the same columns."""
    x, weight = torch.randn(5, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    wanted = wide_rms_norm(x, weight, 1e-5, 1.0).chunk(2, -1)
    parts = [part for part in x.chunk(2, -1) for _ in range(2)]
    total = torch.stack([mean_square(part) for part in parts]).sum(0)
    for rank, part in enumerate(parts):
        own = weight.chunk(2)[rank // 2]
        assert torch.allclose(divided_rms_norm(part, total, 4, own, 1e-5, 1.0), wanted[rank // 2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul_rounds_like_transformers(dtype: torch.dtype) -> None:
    mlp = Gemma3MLP(Gemma3TextConfig(hidden_size=8, intermediate_size=8))
    gate, up = (torch.randn(9, 65).to(dtype) for _ in range(2))
    assert torch.equal(gelu_mul(gate, up), mlp.act_fn(gate) * up)


CLAMP = Clamp(1.702, 0.7)


def test_experts_within_bounds_are_those_of_transformers() -> None:
    """On every path, and each rank's part of their width: together they make the whole, the last biases added once."""
    theirs = GptOssExperts(GptOssConfig(hidden_size=24, intermediate_size=12, num_local_experts=5, swiglu_limit=0.7))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    x, weights, chosen = torch.randn(9, 24), torch.rand(9, 2), torch.rand(9, 5).topk(2).indices
    chosen[:, 0].masked_fill_(chosen[:, 0] == 3, 4)  # an expert without rows, perhaps
    with torch.no_grad():
        wanted = GptOssExperts.forward.__wrapped__(theirs, x, chosen, weights)
        # Gate rows before those of up, outputs before inputs.
        gate_up = torch.cat((theirs.gate_up_proj[..., ::2], theirs.gate_up_proj[..., 1::2]), -1).transpose(1, 2)
        bias = torch.cat((theirs.gate_up_proj_bias[:, ::2], theirs.gate_up_proj_bias[:, 1::2]), 1)
        down, last = theirs.down_proj.transpose(1, 2).contiguous(), theirs.down_proj_bias
        given = x, weights, chosen, gate_up.contiguous(), down, bias, last, CLAMP
        for name in ("cpu", "fixed", "library"):
            if name == "library":
                found = biased_experts.of_arguments(by_library)(*given)
            else:
                found = biased_experts.bind("cpu", deterministic=name == "fixed")(*given)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=name)
        halves = []
        for rank in range(2):
            own = slice(6 * rank, 6 * rank + 6)
            rows = torch.cat((torch.arange(12)[own], 12 + torch.arange(12)[own]))
            part = gate_up[:, rows], down[..., own], bias[:, rows], last
            halves.append(biased_experts(x, weights, chosen, *part, CLAMP, rank == 0))
        torch.testing.assert_close(halves[0] + halves[1], wanted, rtol=1e-5, atol=1e-5)


def test_the_scale_of_embeddings_is_rounded_first() -> None:
    embedding = Gemma3TextScaledWordEmbedding(11, 3072, 0, embed_scale=3072**0.5).to(torch.bfloat16)
    tokens = torch.arange(11)
    assert torch.equal(scale(embedding.weight[tokens], 3072**0.5), embedding(tokens))
    assert scale(torch.ones(1, dtype=torch.bfloat16), 3072**0.5).item() == 55.5


def test_partial_rope_rotates_like_transformers() -> None:
    q, k, table = torch.randn(7, 3, 10), torch.randn(7, 1, 10), torch.randn(20, 6)
    positions = torch.tensor([3, 0, 19, 1, 2, 5, 4], dtype=torch.int32)
    cos, sin = (torch.cat((half, half), -1) for half in table[positions.long()].chunk(2, -1))
    wanted = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    for x, turned in zip((q, k), wanted, strict=True):
        found = partial_rope(x, *rope_angles(positions, table))
        assert torch.allclose(found, turned[0].transpose(0, 1), rtol=0, atol=1e-6)
        assert torch.equal(found[..., 6:], x[..., 6:])


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("width", [1, 65])
def test_sigmoid_gates_let_through_what_a_wide_sigmoid_does(width: int, dtype: torch.dtype) -> None:
    """A gate of each column, as a part of a wider product has it, or one for all; within a rounding of either step."""
    x, gate = torch.randn(9, 65).to(dtype), torch.randn(9, 3 * width).to(dtype)[:, width : 2 * width]
    wanted = x.double() / (1 + (-gate.double()).exp())
    for found in (sigmoid_gate(x, gate), sigmoid_gate.bind("cpu", deterministic=True)(x, gate)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=3 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("heads", [3, 6])
def test_columns_are_brought_together_as_transformers_does(heads: int) -> None:
    sizes = {"linear_num_key_heads": 3, "linear_num_value_heads": heads, "linear_key_head_dim": 5}
    theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=8, linear_value_head_dim=7, **sizes), 0)
    products, gates = torch.randn(2, 4, 2 * 15 + 2 * 7 * heads), torch.randn(2, 4, 2 * heads)
    q, k, v, z, b, a = theirs.fix_query_key_value_ordering(products, gates)
    served = heads // 3
    parts = deinterleave(products.flatten(0, 1).unflatten(-1, (3, -1)), (5, 5, 7 * served, 7 * served))
    assert torch.equal(parts, torch.cat([one.flatten(2) for one in (q, k, v, z)], -1).flatten(0, 1))
    parts = deinterleave(gates.flatten(0, 1).unflatten(-1, (3, -1)), (served, served))
    assert torch.equal(parts, torch.cat((b, a), -1).flatten(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 255, 1003])
def test_rows_have_the_same_bits_in_any_company(width: int, dtype: torch.dtype) -> None:
    x, up, weight = torch.randn(ROWS, width).to(dtype), torch.randn(ROWS, width).to(dtype), torch.randn(width).to(dtype)
    norm, squares, gated, capped = (
        one.bind("cpu", deterministic=True) for one in (wide_rms_norm, mean_square, gelu_mul, softcap)
    )
    assert_rows_stand_alone(lambda rows: norm(x[rows], weight, 1e-5, 1.0))
    assert_rows_stand_alone(lambda rows: squares(x[rows]))
    assert_rows_stand_alone(lambda rows: gated(x[rows], up[rows]))
    assert_rows_stand_alone(lambda rows: capped(x[rows], 3.0))
    divided, total = divided_gated_rms_norm.bind("cpu", deterministic=True), torch.rand(ROWS, 4)
    opened_squares = gated_mean_square.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: opened_squares(x[rows], up[rows]))
    assert_rows_stand_alone(lambda rows: divided(x[rows], up[rows], total[rows], 2, weight, 1e-5))
    bounded = clamped_swiglu.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: bounded(x[rows], up[rows], CLAMP))
    opened = sigmoid_gate.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: opened(x[rows], up[rows]))
    assert_rows_stand_alone(lambda rows: opened(x[rows], up[rows, :1]))


def test_gradients_are_those_of_finite_differences() -> None:
    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    angles = rope_angles(torch.tensor([2, 0, 1], dtype=torch.int32), torch.randn(4, 4, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x, w: wide_rms_norm(x, w, 1e-5, 1.0), (some(3, 5), some(5)))
    assert torch.autograd.gradcheck(
        lambda x, w: divided_rms_norm(x, mean_square(x), 1, w, 1e-5, 1.0), (some(3, 5), some(5))
    )
    assert torch.autograd.gradcheck(gelu_mul, (some(3, 5), some(3, 5)))
    assert torch.autograd.gradcheck(lambda gate, up: clamped_swiglu(gate, up, CLAMP), (some(3, 5), some(3, 5)))
    assert torch.autograd.gradcheck(sigmoid_gate, (some(3, 5), some(3, 5)))
    assert torch.autograd.gradcheck(sigmoid_gate, (some(3, 5), some(3, 1)))
    assert torch.autograd.gradcheck(lambda x: deinterleave(x, (1, 3)), (some(3, 2, 4),))
    assert torch.autograd.gradcheck(lambda x: softcap(scale(x, 3.0), 2.0), (some(3, 5),))
    assert torch.autograd.gradcheck(lambda x: partial_rope(x, *angles), (some(3, 2, 6),))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("operation", "arguments", "expected"),
    [
        (wide_rms_norm, (meta(7, 64), meta(64), 1e-5, 1.0), Cost(7 * 64 * 4, 7 * 128 + 128, 7 * 128, 128)),
        (gated_mean_square, (meta(7, 64), meta(7, 64)), Cost(7 * 7 * 64, 2 * 896, 7 * 16)),
        (
            divided_gated_rms_norm,
            (meta(7, 64), meta(7, 64), meta(7, 4, dtype=torch.float32), 2, meta(64), 1e-5),
            Cost(7 * 64 * 7, 2 * 896 + 7 * 16 + 128, 896, 128),
        ),
        (mean_square, (meta(7, 64),), Cost(2 * 7 * 64, 7 * 128, 7 * 16)),
        (gelu_mul, (meta(7, 64), meta(7, 64)), Cost(7 * 64 * 9, 2 * 896, 896)),
        (clamped_swiglu, (meta(7, 64), meta(7, 64), CLAMP), Cost(7 * 64 * 11, 2 * 896, 896)),
        (
            biased_experts,
            # Seven tokens with one expert of one: three products of 14 rows, biases, activation, weighted sum.
            (
                meta(7, 64),
                meta(7, 1, dtype=torch.float32),
                meta(7, 1, dtype=torch.int64),
                meta(1, 32, 64),
                meta(1, 64, 16),
                meta(1, 32),
                meta(1, 64),
                CLAMP,
            ),
            Cost(
                7 * (3 * 2 * 64 * 16 + 32 + 64 + 11 * 16 + 2 * 64),
                7 * 128 + 7 * 4 + 7 * 8 + 2 * (32 * 64 + 64 * 16 + 32 + 64),
                7 * 128,
                2 * (32 * 64 + 64 * 16 + 32 + 64),
            ),
        ),
        (scale, (meta(7, 64), 8.0), Cost(7 * 64, 896, 896)),
        (sigmoid_gate, (meta(7, 4, 16), meta(7, 4, 16)), Cost(7 * 64 * 5, 2 * 896, 896)),
        (sigmoid_gate, (meta(7, 64), meta(7, 1)), Cost(7 * 64 + 7 * 4, 896 + 14, 896)),
        (deinterleave, (meta(7, 4, 16), (5, 11)), Cost(0, 896, 896)),
        # Eight of 16 dimensions are rotated, by eight angles a token.
        (
            partial_rope,
            (meta(7, 4, 16), *(meta(7, 1, 8, dtype=torch.float32),) * 2),
            Cost(3 * 7 * 4 * 8, 896 + 224, 896),
        ),
    ],
)
def test_costs_are_the_hand_counts(operation: Operation, arguments: tuple, expected: Cost) -> None:
    assert operation.cost(*arguments, workload=Workload((7,), (7,))) == expected
    result = operation(*arguments)
    real = [torch.zeros_like(a, device="cpu") if isinstance(a, Tensor) else a for a in arguments]
    assert (result.shape, result.dtype) == (operation(*real).shape, operation(*real).dtype)
