"""The step over merged graphs and fused updates against the modules with PyTorch's optimizer, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strata.kernels.gemm import linear
from strata.kernels.linear_fp8 import linear_fp8, linear_silu_mul_fp8
from strata.models.batch import Batch
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.layers import CausalLM
from strata.train.compile import TrainingGraph
from strata.train.config import OptimizerConfig
from strata.train.fused_adamw import FusedAdamW
from strata.train.graph_step import GraphStep
from strata.train.optim import Optimizer, masters_of
from strata.train.pack import PackedBatch
from strata.train.step import train_step

CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, clip=0.5)
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
}


def fresh(family: str) -> CausalLM:
    model = build(config_from_dict(SHAPE | FAMILIES[family]))
    initialize(model, 0)
    return model


def packed(seed: int, *lengths: int, counted: float = 1.0) -> PackedBatch:
    """Random tokens; a share of those that have a successor in their sequence count."""
    draw = np.random.default_rng(seed)
    offsets = np.array([0, *np.cumsum(lengths)], dtype=np.int32)
    tokens = draw.integers(0, 60, offsets[-1], dtype=np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    inner = np.setdiff1d(np.arange(offsets[-1]), offsets[1:] - 1)
    rows = inner[draw.random(len(inner)) < counted]
    return PackedBatch(tokens, positions, offsets, rows, tokens[rows + 1].astype(np.int64), 0)


def step_of(model: CausalLM) -> GraphStep:
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return GraphStep(model, FusedAdamW(model, CONFIG, masters))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_graph_are_those_of_the_modules(family: str) -> None:
    lengths = (5, 1, 9)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths]).int()
    batch = Batch(torch.randint(0, 60, (15,)).int(), positions, offsets, max(lengths))
    modules, other = fresh(family).double(), fresh(family).double()
    graph = TrainingGraph(other)
    upstream = torch.randn(15, 16, dtype=torch.float64)
    for run in (modules, graph):
        run(batch).backward(upstream)
    graph.hand_out_gradients()
    for name, parameter in modules.model.named_parameters():
        found = other.model.get_parameter(name).grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
    graph.clear_gradients()
    other.zero_grad()
    graph.hand_out_gradients()
    assert all(parameter.grad is None for parameter in other.parameters())


@pytest.mark.parametrize("family", ["llama", "llama, tied"])
def test_steps_follow_the_modules_with_pytorchs_adamw(family: str) -> None:
    """One batch and several, of one length and of many, against autograd through the modules and torch.optim.AdamW."""
    plain, model = fresh(family), fresh(family)
    theirs, ours = Optimizer(plain, CONFIG), step_of(model)
    steps = [
        [packed(0, 12, 12)],
        [packed(1, 12, 12)],
        [packed(2, 3, 9, 1, 6, counted=0.5)],
        [packed(3, 5, 7, counted=0.7), packed(4, 12, 12), packed(5, 2)],
    ]
    for i, batches in enumerate(steps):
        rate = 1e-2 / (i + 1)
        wanted, norm = train_step(plain, theirs, batches, rate)
        loss, found_norm = ours(batches, rate)
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0)
        torch.testing.assert_close(found_norm, norm, rtol=1e-4, atol=0)
    for name, parameter in plain.named_parameters():
        close = torch.isclose(model.get_parameter(name), parameter, rtol=1e-3, atol=1e-4)
        assert close.double().mean() > 0.99, name


@pytest.mark.parametrize("precision", ["fp8-tensor", "fp8-row"])
def test_steps_in_eight_bits_follow_the_exact_ones(precision: str) -> None:
    exact, narrow = fresh("qwen3"), fresh("qwen3")
    masters = {name: parameter.detach().clone() for name, parameter in narrow.named_parameters()}
    wide, other = step_of(exact), GraphStep(narrow, FusedAdamW(narrow, CONFIG, masters), precision)
    for i in range(3):
        batches = [packed(i, 7, 12, 12)]
        (loss, norm), (found, found_norm) = wide(batches, 1e-3), other(batches, 1e-3)
        assert found != loss
        torch.testing.assert_close(found, loss, rtol=2e-3, atol=0)
        torch.testing.assert_close(found_norm, norm, rtol=5e-2, atol=0)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["bf16", "fp8-row"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_recomputed_gradients_are_the_same_bits_from_fewer_kept_bytes(family: str, precision: str) -> None:
    batch, _, _ = packed(0, 12, 12).to(torch.device("cpu"))
    kept, gradients, products = {}, {}, {}
    for recompute in ("none", "operations", "mlp", "layers"):
        model = fresh(family)
        graph = TrainingGraph(model, precision, recompute)
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = graph(batch)
        kept[recompute] = sum(sizes.values())
        with Products() as backward:
            hidden.backward(torch.ones_like(hidden))
        products[recompute] = backward.count
        graph.hand_out_gradients()
        gradients[recompute] = {name: one.grad for name, one in model.model.named_parameters()}
    assert kept["layers"] < kept["none"]
    if precision == "bf16":  # products in 8 bits are no operation of their own on a CPU
        assert products["none"] == products["operations"] == products["mlp"] - 2 < products["layers"] - 2
    for recompute in ("operations", "mlp", "layers"):
        for name, wanted in gradients["none"].items():
            assert torch.equal(gradients[recompute][name], wanted), (recompute, name)


def test_layers_of_sizes_that_eight_bits_do_not_fit_stay_as_they_are() -> None:
    graph = TrainingGraph(fresh("llama"), "fp8-tensor")._graph  # 24 is no multiple of 16, so `down_proj` stays
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert (called.count(linear), called.count(linear_fp8), called.count(linear_silu_mul_fp8)) == (2, 4, 2)


def test_gradients_of_several_batches_add_up_in_float32() -> None:
    model = fresh("llama").bfloat16()
    optimizer = FusedAdamW(model, CONFIG, masters_of(model))
    norm_weight = model.model.norm.weight
    for value in (1.0, 2**-9):  # whose sum bfloat16 cannot hold
        norm_weight.grad = torch.full_like(norm_weight, value)
        optimizer.accumulate()
        assert norm_weight.grad is None
    optimizer.begin(1e-3)
    assert optimizer.update().item() == pytest.approx(4 * (1 + 2**-9), rel=1e-6)  # 16 elements
    optimizer.begin(1e-3)
    norm_weight.grad = torch.ones_like(norm_weight)
    assert optimizer.update() == 4  # the sums are used once


def test_a_batch_without_counted_tokens_adds_nothing() -> None:
    loss, norm = step_of(fresh("llama"))([packed(0, 12, 12, counted=0)], 1e-2)
    assert loss == norm == 0


def test_optimizer_state_is_that_of_the_other_and_continues() -> None:
    model = fresh("llama").bfloat16()
    optimizer = FusedAdamW(model, CONFIG, masters_of(fresh("llama")))
    other = Optimizer(fresh("llama").bfloat16(), CONFIG)
    assert optimizer.state().keys() == other.state().keys()
    gradients = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}

    def apply(optimizer: FusedAdamW, model: CausalLM) -> None:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        optimizer.step(1e-2)

    apply(optimizer, model)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    apply(optimizer, model)
    resumed = fresh("llama").bfloat16()
    second = FusedAdamW(resumed, CONFIG, masters_of(resumed))
    second.load_state(saved, 1)
    assert torch.equal(resumed.model.norm.weight, saved["master.model.norm.weight"].bfloat16())
    apply(second, resumed)
    for name, tensor in optimizer.state().items():
        assert torch.equal(second.state()[name], tensor), name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name))
        assert parameter.grad is None
    with pytest.raises(ValueError, match="another model"):
        second.load_state({"master.x": torch.zeros(1)}, 1)
