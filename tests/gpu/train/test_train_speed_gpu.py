"""Operations with gradients on CUDA against float64, and the step over the graph, captured and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strata.comm.launch import World
from strata.kernels.activation import silu_mul_grad  # noqa: F401  registers what is tested
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionSpec, HeadsSpec, Sequences
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.loss.loss import cross_entropy_gradients, linear_cross_entropy, summed_cross_entropy
from strata.kernels.norm import norm_grad  # noqa: F401  registers what is tested
from strata.kernels.norm.norm import add_rms_norm, rms_norm
from strata.kernels.op import Operation
from strata.kernels.optimizer.adamw import Constants, adamw
from strata.kernels.rotary import rope_grad  # noqa: F401  registers what is tested
from strata.kernels.rotary.rope import rope, rope_angles
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.models.config import config_from_dict
from strata.parallel.layout import Layout
from strata.train.data.pack import PackedBatch
from strata.train.optimizer.config import OptimizerConfig
from strata.train.settings import deterministic
from strata.train.steps.make import fresh, make_step
from strata.train.steps.parallel_step import ParallelStep
from tests.gpu.tensors import assert_within, draw
from tests.train.step_ranks import pack_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.bfloat16, torch.float32]


def check(operation: Operation, implementation: str, *args: Any, narrow: float = 8e-3) -> None:
    """Results and the gradients of what wants them, by the named implementation, against float64.

    narrow: the error that bfloat16 may have, of the norm.
    """
    leaves = [_leaf(argument) for argument in args]
    assert operation.bind("cuda", differentiable=True).choose(*leaves).name == implementation
    exact_leaves = [_leaf(argument, torch.float64) for argument in args]
    results = _tuple(operation(*leaves))
    exact = _tuple(operation.reference(*exact_leaves))
    upstream = [draw(*result.shape, dtype=result.dtype) for result in results]
    torch.autograd.backward(results, upstream)
    torch.autograd.backward(exact, [one.double() for one in upstream])
    tolerance = narrow if results[0].dtype == torch.bfloat16 else 3e-5
    for found, wanted in zip(results, exact, strict=True):
        assert_within(found, wanted, tolerance)
    for found, wanted in zip(leaves, exact_leaves, strict=True):
        if isinstance(found, Tensor) and found.requires_grad:
            assert found.grad.dtype == found.dtype
            assert_within(found.grad, wanted.grad, tolerance)


def _leaf(argument: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(argument, Tensor) or not argument.is_floating_point():
        return argument
    kept = argument.detach().clone(memory_format=torch.preserve_format)
    return kept.to(dtype or argument.dtype).requires_grad_(argument.requires_grad)


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def wanting(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 64), (2100, 80), (1030, 2048), (37, 5000), (2, 16384)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (wanting(draw(*shape, dtype=dtype)) for shape in ((rows, width), (rows, width), (width,)))
    check(rms_norm, "triton with gradients", x, weight, 1e-5)
    check(add_rms_norm, "triton with gradients", x, residual, weight, 1e-5)


def test_a_norm_whose_sum_nobody_reads() -> None:
    x, residual, weight = (wanting(draw(*shape)) for shape in ((40, 256), (40, 256), (256,)))
    _, normed = add_rms_norm(x, residual, weight, 1e-5)
    upstream = draw(40, 256)
    normed.backward(upstream)
    wide = (x.detach() + residual.detach()).double().requires_grad_()
    rms_norm.reference(wide, weight.detach().double(), 1e-5).backward(upstream.double())
    assert_within(x.grad, wide.grad, 8e-3)
    assert torch.equal(x.grad, residual.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 1024, 8192, 1500])
def test_gating(width: int, dtype: torch.dtype) -> None:
    check(
        silu_mul, "triton with gradients", wanting(draw(70, width, dtype=dtype)), wanting(draw(70, width, dtype=dtype))
    )


def test_gated_product() -> None:
    x, weight = wanting(draw(300, 64)), wanting(draw(2 * 96, 64))
    check(linear_silu_mul, "linear, silu_mul with gradients", x, weight)


def angles(tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    wide = torch.rand(tokens, head_dim // 2, device="cuda") * 6
    table = torch.cat((wide.cos(), wide.sin()), -1)
    cos, sin = rope_angles(torch.arange(tokens, dtype=torch.int32, device="cuda"), table)
    return cos, sin


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_rotation(head_dim: int) -> None:
    cos, sin = angles(50, head_dim)
    check(rope, "triton with gradients", wanting(draw(50, 6, head_dim)), cos, sin)
    product = wanting(draw(50, 10 * head_dim))
    check(qk_rope_kv_write, "triton with gradients", product, None, None, cos, sin, None, HeadsSpec(0, 6, 2))


def test_rotation_behind_norms_keeps_the_product_alone() -> None:
    cos, sin = angles(300, 128)
    weights = [wanting(draw(128)) for _ in "qk"]
    arguments = (cos, sin, None, HeadsSpec(0, 16, 8, 1e-6))
    check(qk_rope_kv_write, "parts", wanting(draw(300, 32 * 128)), *weights, *arguments)
    product, kept = wanting(draw(300, 32 * 128)), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.setdefault(one.untyped_storage().data_ptr(), one), lambda one: one
    ):
        results = qk_rope_kv_write(product, *weights, *arguments)
    assert results[2].untyped_storage().data_ptr() == product.untyped_storage().data_ptr()
    floats = sum(one.nbytes for one in kept.values() if one.dtype == torch.float32)
    assert floats <= 3 * cos.nbytes  # the angles, one of them negated for the way back
    assert sum(one.untyped_storage().nbytes() for one in kept.values()) <= product.nbytes + 4 * cos.nbytes


@pytest.mark.parametrize(("sequences", "length", "head_dim"), [(1, 1024, 128), (2, 512, 64), (3, 1024, 64)])
def test_attention_of_equal_lengths(sequences: int, length: int, head_dim: int) -> None:
    tokens = sequences * length
    offsets = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    q, k, v = (wanting(draw(tokens, heads, head_dim)) for heads in (8, 2, 2))
    batch, spec = Sequences(offsets, length), AttentionSpec(0, head_dim**-0.5)
    check(attention, "cudnn", q, k, v, batch, spec, narrow=2e-2)


def test_deterministic_runs_go_without_cudnn() -> None:
    offsets = torch.tensor([0, 512, 1024], dtype=torch.int32, device="cuda")
    q, k, v = (draw(1024, heads, 64) for heads in (8, 2, 2))
    given = q, k, v, Sequences(offsets, 512), AttentionSpec(0, 0.125)
    bound = attention.bind("cuda", differentiable=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert bound.choose(*given).name == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
    assert bound.choose(*given).name == "cudnn"


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(700, 50), (300, 16384), (70, 128256), (0, 100)])
def test_loss_with_gradients(tokens: int, vocabulary: int, index: torch.dtype) -> None:
    hidden, weight = draw(tokens, 64), draw(vocabulary, 64) / 4
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda", dtype=index)
    targets[1::5] = -100
    scale = torch.full((), 1 / max(tokens, 1), device="cuda")
    exact = cross_entropy_gradients.reference(hidden.double(), weight.double(), targets, scale.double(), 0)
    for logits_bytes in (1 << 40, 260 * vocabulary * 2):
        args = (hidden, weight, targets, scale, logits_bytes)
        assert cross_entropy_gradients.bind("cuda").choose(*args).name == "triton"
        found = cross_entropy_gradients(*args)
        torch.testing.assert_close(found[0].double(), exact[0], rtol=5e-3, atol=1e-6)
        for mine, wanted in zip(found[1:], exact[1:], strict=True):
            assert mine.dtype == torch.bfloat16
            assert_within(mine, wanted, 2e-2)
        assert not found[1][1::5].any()
        for adds in (False, True):
            memory = torch.randn(vocabulary, 64, device="cuda")
            held = memory.double() if adds else 0
            _, of_hidden, of_weight = cross_entropy_gradients(*args, (memory, adds))
            assert of_weight is memory
            assert torch.equal(of_hidden, found[1])
            assert_within(memory, exact[2] + held, 2e-2)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(700, 50), (9000, 128256), (0, 100)])
def test_summed_loss(tokens: int, vocabulary: int) -> None:
    """The largest is more than one chunk of logits."""
    hidden, weight = draw(tokens, 64).requires_grad_(), (draw(vocabulary, 64) / 4).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    targets[1::5] = -100
    scale = torch.full((), 1 / max(tokens, 1), device="cuda")
    chosen = summed_cross_entropy.bind("cuda", differentiable=True).choose(hidden, weight, targets, scale)
    assert chosen.name == "gradients at once"
    loss = summed_cross_entropy(hidden, weight, targets, scale)
    loss.backward()
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    exact = linear_cross_entropy(*wide, targets).sum() * scale
    exact.backward()
    torch.testing.assert_close(loss.detach().double(), exact.detach(), rtol=5e-3, atol=1e-6)
    for mine, other in zip((hidden, weight), wide, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert_within(mine.grad, other.grad, 2e-2)


def test_loss_of_logits_far_apart() -> None:
    """Columns of -inf's size beside large ones neither overflow nor turn into NaN."""
    hidden, weight = draw(64, 64) * 30, draw(20000, 64) * 30
    targets = torch.randint(0, 20000, (64,), device="cuda")
    scale = torch.ones((), device="cuda")
    logits = (hidden @ weight.t()).double()
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    found = cross_entropy_gradients(hidden, weight, targets, scale, 1 << 40)
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-4, atol=0)
    assert all(one.isfinite().all() for one in found)


@pytest.mark.parametrize("count", [1, 777, 100_000])
def test_adamw(count: int) -> None:
    weight = draw(count)
    state = [weight.float(), draw(count, dtype=torch.float32), draw(count, dtype=torch.float32).square()]
    gradient = draw(count)
    step = torch.tensor([0.01, 0.5, 0.3, 0.7], device="cuda")
    assert adamw.bind("cuda").choose(weight, *state, gradient, step, Constants(0.9, 0.95, 1e-8, 0.1)).name == "triton"
    exact = [one.double() for one in state]
    adamw.reference(weight.clone(), *exact, gradient, step.double(), Constants(0.9, 0.95, 1e-8, 0.1))
    adamw(weight, *state, gradient, step, Constants(0.9, 0.95, 1e-8, 0.1))
    for found, wanted in zip(state, exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(weight, state[0].bfloat16())


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}


def step_on(device: str, precision: str = "bf16", recompute: str = "none", **changes: Any) -> ParallelStep:
    """Of a small model, from the same weights on every device. changes: to the fields of its config."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    layout = Layout()
    world = World(0, 0, 1, torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"), None)
    return make_step(
        config_from_dict(values | changes),
        layout,
        layout.mesh(world),
        OptimizerConfig(learning_rate=1e-3),
        fresh(0),
        precision=precision,
        recompute=recompute,
        max_length=512,
    )


def steps(
    device: str, lengths: tuple[int, ...], precision: str = "bf16", recompute: str = "none", **changes: Any
) -> list[list[float]]:
    """Loss and gradient norm of each step, on sequences of few ids in which all tokens but each last have a target."""
    step = step_on(device, precision, recompute, **changes)
    found = []
    for seed in range(6):
        result = step([pack_of(seed, list(lengths), 50, 1.0)], 1e-3)
        found.append([result.loss.item(), result.norm.item()])
    is_captured = step._captured is not None
    assert is_captured == (device == "cuda" and len(set(lengths)) == 1)
    return found


@pytest.mark.parametrize("lengths", [(512, 512), (512, 300, 212)], ids=["captured", "packed"])
def test_steps_follow_the_cpu(lengths: tuple[int, ...]) -> None:
    """Against float32; the steps of equal lengths are captured from the second on."""
    exact, found = (torch.tensor(steps(device, lengths)) for device in ("cpu", "cuda"))
    torch.testing.assert_close(found, exact, rtol=3e-2, atol=0)
    assert found[-1, 0] < 0.95 * found[0, 0]


@pytest.mark.parametrize("recompute", ["none", "mlp"])
def test_replayed_steps_have_the_bits_of_launched_ones_where_that_is_wanted(recompute: str) -> None:
    """Or a run that resumes, whose first step is launched, would not repeat the one that went through."""
    found = []
    with deterministic(True):
        for replays in (True, False):
            step = step_on("cuda", recompute=recompute)
            numbers = []
            for seed in range(6):
                if not replays:
                    step._before = None
                result = step([pack_of(seed, [512, 512], 50, 0.7)], 1e-3)
                numbers.append([result.loss.item(), result.norm.item()])
            assert (step._captured is not None) == replays
            found.append((numbers, [piece.tensor.clone() for piece in step.state_shards()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("precision", ["fp8-tensor", "fp8-row"])
def test_steps_in_eight_bits_follow_the_cpu(precision: str) -> None:
    exact, found = (torch.tensor(steps(*given)) for given in (("cpu", (512, 512)), ("cuda", (512, 512), precision)))
    torch.testing.assert_close(found[:, 0], exact[:, 0], rtol=3e-2, atol=0)
    torch.testing.assert_close(found[:, 1], exact[:, 1], rtol=1e-1, atol=0)


@pytest.mark.parametrize("lengths", [(512, 512), (512, 300, 212)], ids=["captured", "packed"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-row"])
@pytest.mark.parametrize("recompute", ["operations", "layers"])
def test_recomputed_steps_are_the_steps(recompute: str, precision: str, lengths: tuple[int, ...]) -> None:
    """cuDNN's backward adds up in no fixed order, so bits may differ."""
    kept, found = (torch.tensor(steps("cuda", lengths, precision, how)) for how in ("none", recompute))
    torch.testing.assert_close(found, kept, rtol=1e-2, atol=0)


@pytest.mark.parametrize("lengths", [(512, 512), (512, 300, 212)], ids=["captured", "packed"])
def test_steps_of_experts_follow_the_cpu_and_are_recomputed(lengths: tuple[int, ...]) -> None:
    """A token near the border between two experts may go to the other one in bfloat16."""
    exact = torch.tensor(steps("cpu", lengths, **EXPERTS))
    for recompute in ("none", "operations", "mlp", "layers"):
        found = torch.tensor(steps("cuda", lengths, recompute=recompute, **EXPERTS))
        torch.testing.assert_close(found[:, 0], exact[:, 0], rtol=5e-2, atol=0)
        assert found[-1, 0] < 0.95 * found[0, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_rounded_masters_and_gradients_of_packs_add_up(tied: bool) -> None:
    """Two packs against one with the sequences of both; then a step without a finite norm changes nothing."""
    whole, apart = (step_on("cuda", tie_word_embeddings=tied) for _ in range(2))
    both = [pack_of(0, [512, 300], 50, 1.0), pack_of(1, [77], 50, 1.0)]
    joined = join(*both)
    found, wanted = apart(both, 1e-3), whole([joined], 1e-3)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-3, atol=0)
    torch.testing.assert_close(found.norm, wanted.norm, rtol=1e-2, atol=0)
    model = apart._passes._model  # type: ignore[attr-defined]
    masters = {piece.name: piece.tensor for piece in apart.state_shards() if piece.kind == "master"}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach().flatten(), masters[name].bfloat16()), name
    before = [piece.tensor.clone() for piece in apart.state_shards()]
    handle = model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    assert not apart([joined], 1e-3).norm.isfinite()
    handle.remove()
    assert all(torch.equal(piece.tensor, one) for piece, one in zip(apart.state_shards(), before, strict=True))


def join(one: PackedBatch, other: PackedBatch) -> PackedBatch:
    shift = len(one.tokens)
    return PackedBatch(
        np.concatenate([one.tokens, other.tokens]),
        np.concatenate([one.positions, other.positions]),
        np.concatenate([one.offsets, other.offsets[1:] + np.int32(shift)]),
        np.concatenate([one.rows, other.rows + shift]),
        np.concatenate([one.targets, other.targets]),
    )
