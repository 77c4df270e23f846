"""The graph that trains against the modules, what its backward pass computes again, and steps that balance experts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strata.kernels.linear.fp8 import linear_fp8, linear_silu_mul_fp8
from strata.kernels.linear.linear import linear
from strata.kernels.moe.experts import by_library, experts
from strata.kernels.op import Implementation
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.parallel.layout import Layout
from strata.train.compile import TrainingGraph
from strata.train.config import RECOMPUTE_OF_MODULES
from strata.train.recompute import recompute_modules
from strata.train.steps.one_device import OneDeviceGradients
from tests.largest import largest
from tests.parallel.models import config_of, random_batch, random_model
from tests.parallel.ranks import run_ranks
from tests.train.balance_ranks import balanced, balanced_worst, errors_of
from tests.train.samples import ALONE
from tests.train.step_ranks import packs_of, rate_of

FAMILIES = ("llama", "llama-biases-tied", "qwen3-biases-tied", "mixtral", "qwen3-moe")
# Sizes that 8-bit products and the grouped products of a GPU take.
EVEN = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
AGAIN = ("operations", "mlp", "layers")
GROUPED = torch.ops.aten._grouped_mm.default


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Memory(TorchDispatchMode):
    """Sees what operations make: also what checkpoints hold of it, which no hook of autograd is told of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                reference = StorageWeakRef(result.untyped_storage())
                self._made[reference.cdata] = reference, result.untyped_storage().nbytes()
        return results

    @property
    def alive(self) -> int:
        """Bytes of what was made and is still held by anyone, without weights, which are only seen in another shape."""
        living = ((place, size) for place, (reference, size) in self._made.items() if not reference.expired())
        return sum(size for place, size in living if place not in self._weights)


class Trained:
    """One forward and backward pass through the graph. kept: bytes from one to the other; calls: of the latter."""

    def __init__(self, model: CausalLM, config: ModelConfig, precision: str = "bf16", recompute: str = "none") -> None:
        dtype = next(model.parameters()).dtype
        gradients = OneDeviceGradients(model, torch.device("cpu"), dtype)
        self.graph = TrainingGraph(model, precision, recompute)
        for whole, parameters in self.graph.merged:
            gradients.watch(whole, parameters)
        batch, _ = random_batch(config, [5, 1, 9])
        with Memory(model) as memory:
            self.hidden = self.graph(batch)
        self.kept = memory.alive
        with Calls() as calls:
            self.hidden.backward(upstream_of(self.hidden))
        self.calls = calls.counts
        gradients.set_is_last_backward()
        gradients.accumulate()
        gradients.reduce()
        self.gradients = {part.name: part.master.grad for part in gradients.shards}

    @property
    def products(self) -> int:
        return sum(self.calls[one] for one in DENSE)


def upstream_of(hidden: Tensor) -> Tensor:
    return torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_graph_are_those_of_the_modules(family: str) -> None:
    config = config_of(family)
    model, found = random_model(config), Trained(random_model(config), config)
    hidden = model(random_batch(config, [5, 1, 9])[0])
    torch.testing.assert_close(found.hidden, hidden, rtol=1e-9, atol=1e-12)
    hidden.backward(upstream_of(hidden))
    for name, parameter in model.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            found.gradients[f"model.{name}"], parameter.grad.flatten(), rtol=1e-9, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("precision", ["bf16", "fp8-row"])
@pytest.mark.parametrize("family", ["llama", "qwen3-biases-tied"])
def test_recomputed_gradients_are_the_same_bits_from_fewer_kept_bytes(family: str, precision: str) -> None:
    config = config_of(family, **EVEN)
    ways = {
        recompute: Trained(random_model(config, torch.float32), config, precision, recompute)
        for recompute in ("none", "operations", "mlp", "layers")
    }
    none, operations, mlp, layers = (one.kept for one in ways.values())
    assert none > operations > mlp > layers
    if precision == "bf16":  # products in 8 bits are no operation of their own on a CPU
        none, operations, mlp, layers = (one.products for one in ways.values())
        # Of two layers; the last product of one is never computed again.
        assert none == operations == mlp - 2 * 1 == layers - 2 * 3
    assert_same_gradients(ways)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "qwen3-next"])
def test_layers_that_end_in_sums_which_no_norm_takes_up_are_computed_again(family: str) -> None:
    config = config_of(family)
    ways = {way: Trained(random_model(config, torch.float32), config, recompute=way) for way in ("none", *AGAIN)}
    kept = [one.kept for one in ways.values()]
    assert kept[0] > kept[1] >= kept[2] > kept[3]
    assert_same_gradients(ways)


def test_a_product_of_the_sizes_of_a_last_one_is_kept() -> None:
    config = config_of("llama", **EVEN | {"intermediate_size": 32})
    none, operations = (
        Trained(random_model(config, torch.float32), config, recompute=recompute)
        for recompute in ("none", "operations")
    )
    assert operations.products == none.products
    assert operations.kept < none.kept


# Of a layer: the sum that enters; results of q k v, of attention with a logarithm for each head, and of its product.
ATTENTION = 32 + (32 + 2 * 16) + 32 + 4 + 32


@pytest.mark.parametrize(
    ("family", "recompute", "elements"),
    [
        ("llama", "operations", ATTENTION + 2 * 48),
        ("llama", "mlp", ATTENTION),
        ("llama", "layers", 32),
        # Logits of four experts, and the rows of the two of a token, whose results the weights' gradient needs.
        ("mixtral", "operations", ATTENTION + 4 + 2 * (2 * 48 + 32)),
        ("mixtral", "mlp", ATTENTION + 4 + 2 * 32),
        ("mixtral", "layers", 32),
    ],
)
def test_one_tensor_crosses_layers_and_no_result_is_kept_in_vain(family: str, recompute: str, elements: int) -> None:
    """Kept of a token in float32, of what the third layer adds to two."""
    kept = []
    for layers in (2, 3):
        config = config_of(family, **EVEN, num_hidden_layers=layers)
        kept.append(Trained(random_model(config, torch.float32), config, recompute=recompute).kept)
    assert kept[1] - kept[0] == 15 * 4 * elements


def assert_same_gradients(ways: dict[str, Trained]) -> None:
    for recompute, one in ways.items():
        for name, wanted in ways["none"].gradients.items():
            assert wanted is not None
            assert torch.equal(one.gradients[name], wanted), (recompute, name)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_multiply_again_only_what_is_not_kept(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Through the grouped products of a GPU, which a CPU computes as well: two a layer, with two gradients each."""
    only = Implementation("grouped", by_library, "cpu", differentiable=True)
    monkeypatch.setattr(experts, "implementations", [only])
    monkeypatch.setattr(experts, "_bound", {})
    config = config_of(family, **EVEN, **({"moe_intermediate_size": 24} if family == "qwen3-moe" else {}))
    ways = {
        recompute: Trained(random_model(config, torch.bfloat16), config, recompute=recompute)
        for recompute in ("none", "operations", "mlp", "layers")
    }
    assert config.experts is not None
    layers = sum(config.experts.layers)
    products = [one.calls[GROUPED] for one in ways.values()]
    assert products == [4 * layers, 4 * layers, 5 * layers, 6 * layers]
    assert ways["layers"].kept < ways["none"].kept
    assert_same_gradients(ways)


@pytest.mark.parametrize(
    ("family", "again"),
    [
        # Products of a layer, all and of its MLP, without the last one: nothing in a backward pass reads its result.
        ("llama", {"mlp": 2, "layers": 6}),
        # The router's, and of four experts, whose results the weights' gradient needs.
        ("mixtral", {"mlp": 1 + 4 * 2, "layers": 4 + 1 + 4 * 2}),
        # And the shared expert's three and its gate, read where it multiplies; of one layer two products of the delta
        # net and its end, of the other four, which is 3.5 for each.
        ("qwen3-next", {"mlp": 1 + 4 * 2 + 4, "layers": 3.5 + 1 + 4 * 2 + 4}),
    ],
)
def test_modules_multiply_again_up_to_the_last_result_that_is_needed(family: str, again: dict[str, float]) -> None:
    config = config_of(family, **EVEN)
    found: dict[str, tuple[int, int, dict[str, Tensor]]] = {}
    for recompute in RECOMPUTE_OF_MODULES:
        model = random_model(config, torch.float32)
        recompute_modules(model, recompute)
        with Memory(model) as memory:
            hidden = model(random_batch(config, [5, 1, 9])[0])
        kept = memory.alive
        with Calls() as calls:
            hidden.backward(upstream_of(hidden))
        products = sum(calls.counts[one] for one in DENSE)
        found[recompute] = kept, products, {name: one.grad for name, one in model.model.named_parameters()}
    kept, products, gradients = found["none"]
    assert kept > found["mlp"][0] > found["layers"][0]
    for recompute, wanted in again.items():
        assert found[recompute][1] == products + 2 * wanted
        assert all(torch.equal(one, gradients[name]) for name, one in found[recompute][2].items())


def test_layers_of_sizes_that_eight_bits_do_not_fit_stay_as_they_are() -> None:
    config = config_of("llama", **EVEN | {"intermediate_size": 24})  # no multiple of 16, so `down_proj` stays
    graph = TrainingGraph(random_model(config, torch.float32), "fp8-tensor")._graph
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert (called.count(linear), called.count(linear_fp8), called.count(linear_silu_mul_fp8)) == (2, 4, 2)


LAYOUTS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", "loss", {"dp": 2}, {}),
    ("qwen3-moe", "bias", {"dp": 2}, {}),
    ("qwen3-moe", "loss", {"shard": 2, "zero": 2}, {"recompute": "operations"}),
    ("mixtral", "loss", {"shard": 2, "zero": 3}, {"recompute": "layers"}),
    ("mixtral", "loss", {"tp": 2, "sequence_parallel": True}, {"recompute": "mlp"}),
    ("qwen3-moe", "bias", {"shard": 2, "ep": 2, "zero": 3}, {"recompute": "mlp"}),
    ("qwen3-moe", "loss", {"shard": 2, "ep": 2, "zero": 1}, {}),
    ("qwen3-moe", "bias", {"shard": 2, "ep": 2, "zero": 3}, {"recompute": "layers"}),
    ("mixtral", "loss", {"tp": 2}, {}),
    # 13 to 15 tokens: the second rank has a row of padding.
    ("qwen3-moe", "loss", {"tp": 2, "sequence_parallel": True}, {}),
    ("mixtral", "bias", {"tp": 2, "sequence_parallel": True}, {}),
    ("qwen3-moe", "loss", {"cp": 2}, {}),
    ("mixtral", "bias", {"cp": 2, "zero": 1}, {}),
    ("mixtral", "loss", {"pp": 2, "micro_batches": 2}, {"recompute": "layers"}),
    ("qwen3-moe", "bias", {"pp": 2, "micro_batches": 2}, {}),
    ("glm4-moe", "bias", {"shard": 2, "zero": 2}, {}),
    ("deepseek-v3", "bias", {"shard": 2, "ep": 2, "zero": 3}, {"recompute": "layers"}),
    ("deepseek-v3", "bias", {"pp": 2, "micro_batches": 2}, {}),
]


def test_layouts_equal_one_process(tmp_path: Path) -> None:
    ranks = run_ranks(balanced_worst, 2, tmp_path, layouts=LAYOUTS)
    for one, *found in zip(LAYOUTS, *ranks, strict=True):
        assert largest(error for _, error in found) < 1e-9, (one, found)


@pytest.mark.parametrize(
    ("family", "method", "recompute"),
    [
        *(
            (family, method, recompute)
            for family, method in (("mixtral", "loss"), ("qwen3-moe", "loss"), ("qwen3-moe", "bias"))
            for recompute in ("none", "operations", "mlp", "layers")
        ),
        ("deepseek-v3", "bias", "none"),
        ("deepseek-v3", "bias", "mlp"),
    ],
)
def test_the_graph_of_one_device_equals_plain_pytorch(family: str, method: str, recompute: str) -> None:
    errors = errors_of(ALONE, family, method, Layout(), recompute=recompute)
    assert largest(errors.values()) < 1e-9, errors


def test_balancing_acts_from_the_second_step_on() -> None:
    """And not at all by "none", which still says how busy experts are."""
    steps = {method: balanced(ALONE, "mixtral", method, Layout())[:2] for method in ("none", "loss", "bias")}
    for index in range(3):
        found = {method: step(packs_of(config, index, 0), rate_of(index)) for method, (step, config) in steps.items()}
        for method in ("loss", "bias"):
            assert found[method].norm.equal(found["none"].norm) == (index == 0), (method, index)
    assert found["none"].metrics.keys() == {"counted", "balance_loss", "busiest_expert"}


@pytest.mark.parametrize("method", ["loss", "bias"])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_is(method: str) -> None:
    step, config, _, _ = balanced(ALONE, "mixtral", method, Layout())
    step(packs_of(config, 0, 0), rate_of(0))
    before = {
        piece.kind: piece.tensor.clone() for piece in step.state_shards() if piece.name == "model.layers.0.mlp.gate"
    }
    assert len(before) == 1
    weight = step._passes._model.model.norm.weight  # type: ignore[attr-defined]
    handle = weight.register_hook(lambda gradient: gradient * float("inf"))
    assert not step(packs_of(config, 1, 0), rate_of(1)).norm.isfinite()
    handle.remove()

    def is_same() -> bool:
        now = {piece.kind: piece.tensor for piece in step.state_shards() if piece.name == "model.layers.0.mlp.gate"}
        return all(torch.equal(now[kind], tensor) for kind, tensor in before.items())

    assert is_same()
    step(packs_of(config, 2, 0), rate_of(2))
    assert not is_same()
