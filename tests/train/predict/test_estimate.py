"""Memory and time of a step on one GPU by hand count, and what is recomputed so that it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata.cli.train_estimate import estimate_text
from strata.files.toml_tables import read_table
from strata.hardware.figures import Device
from strata.hardware.specs import device
from strata.kernels.activation.silu_mul import clamped_swiglu
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences
from strata.kernels.attention.train import whole_sequences
from strata.kernels.loss.loss import linear_cross_entropy
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.parallel.layout import Layout
from strata.train.config import RECOMPUTE, TrainConfig, read_train_config
from strata.train.predict.estimate import choose_recompute, layer_bytes, memory, step_shape
from strata.train.predict.min_time import min_time
from strata.train.predict.step_shape import TrainShape
from strata.train.recompute import _KEPT
from tests.live_bytes import LiveBytes

from .saved_bytes import saved_bytes

GIB = 2**30
# T6: Llama-3.2-1B with a head of its own, two sequences of 8192 tokens.
T6 = TrainShape(config_from_dict(SHAPES["1B"], "1B"), 16384, 8192)
WEIGHTS, LAYERS, HEAD = 1_498_482_688, 16 * (2048 * (3072 + 2048 + 3 * 8192)), 128256 * 2048


def min_seconds(shape: TrainShape, recompute: str, on: Device) -> float:
    return min_time(shape, recompute, on).seconds


def test_memory_of_t6_by_hand() -> None:
    found = memory(T6, "none")
    assert found.state == 14 * WEIGHTS
    assert found.accumulated == 0
    # A layer: two residuals and two normed rows, q k v, attention's result with 32 float32, gate and up, SwiGLU's.
    assert found.activations == 16 * 16384 * (2 * (4 * 2048 + 3072 + 2048 + 3 * 8192) + 128)
    assert found.workspace == 2 * 16384 * 128256
    assert found.gradients == 2 * HEAD
    # Measured on an H200: 42.77 GiB.
    assert found.total / GIB == pytest.approx(42.77, rel=0.02)


def test_memory_with_recomputation_by_hand() -> None:
    some, more, most = memory(T6, "operations"), memory(T6, "mlp"), memory(T6, "layers")
    # What enters, q k v, attention's result with 32 float32, its product, gate and up.
    assert some.activations == 16 * 16384 * (2 * (2048 + 3072 + 2048 + 2048 + 2 * 8192) + 128)
    assert more.activations == some.activations - 16 * 16384 * 2 * 2 * 8192
    assert most.activations == 16 * 16384 * 2 * 2048
    assert most.workspace == some.workspace  # the logits are more than a layer
    # So many tokens that gradients are less than they.
    small_head = replace(T6, tokens=65536, config=replace(T6.config, vocab_size=1000))
    whole = memory(small_head, "none").activations // 16
    assert memory(small_head, "layers").workspace == whole - 65536 * 2 * 2048
    assert memory(small_head, "layers").gradients == 2 * 1000 * 2048


def test_memory_in_eight_bits_and_of_several_batches() -> None:
    narrow = memory(replace(T6, precision="fp8-row"), "none")
    inputs = 16384 * (2 * 2048 + 2048 + 8192)  # of qkv, gate and up; of o; of down
    wide = memory(T6, "none").activations - 2 * 16 * 16384 * (2 * 2048 + 8192)  # attention's result stays for attention
    assert narrow.activations == wide + 16 * inputs + LAYERS
    assert memory(replace(T6, batches=4), "none").accumulated == 4 * WEIGHTS


@pytest.mark.parametrize(("gib", "wanted"), [(141, "none"), (44, "operations"), (34, "mlp"), (29, "layers")])
def test_the_least_recomputation_that_fits_is_chosen(gib: int, wanted: str) -> None:
    assert choose_recompute(T6, gib * GIB) == wanted


def test_what_never_fits_is_refused_with_the_figures() -> None:
    with pytest.raises(ValueError, match=r"over 16384 tokens takes 24\.9 GiB \(19\.5 .*lower the tokens of a batch"):
        choose_recompute(T6, 24 * GIB)


def test_where_activations_are_few_the_gradients_are_the_fullest_moment() -> None:
    short = replace(T6, tokens=128, length=128, config=replace(T6.config, tied=False))
    layer = 128 * (2 * (4 * 2048 + 3072 + 2048 + 3 * 8192) + 128)
    assert memory(short, "none").gradients == 2 * WEIGHTS
    assert memory(short, "none").workspace == 0
    assert memory(short, "none").activations == layer


def test_a_loss_of_documents_keeps_its_logits_in_floats() -> None:
    """DPO's, against the tensors that are alive while the head's loss and its gradients are computed."""
    table = {
        "run": {"out": "runs/x", "steps": 9, "recompute": "auto"},
        "start": {"model": "builtin"},
        "data": {"sources": [{"folder": "runs/none"}], "tokens_per_pack": 512},
        "optimizer": {"learning_rate": 1e-4},
        "schedule": {"warmup": 1, "decay": 1},
    }
    plain, pairs = (read_table(TrainConfig, table | more) for more in ({}, {"dpo": {}}))
    wide = config_from_dict(
        SHAPES["1B"] | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 4096}, "wide"
    )
    shape = step_shape(pairs, wide, Layout())
    hidden = torch.randn(512, 32, dtype=torch.bfloat16).requires_grad_()
    head, targets = torch.randn(4096, 32, dtype=torch.bfloat16).requires_grad_(), torch.zeros(512, dtype=torch.int64)
    with LiveBytes() as live:
        linear_cross_entropy(hidden, head, targets).sum().backward()
    found = memory(shape, "layers")
    assert found.workspace + found.gradients == pytest.approx(live.most, rel=0.05)
    assert memory(step_shape(plain, wide, Layout()), "layers").workspace < found.workspace
    # Its products with the head are one more in each step.
    more = [min_time(step_shape(one, T6.config, Layout()), "none", device("h200")).products for one in (plain, pairs)]
    assert more[1] - more[0] == pytest.approx(2 * 512 * HEAD / 800e12)


def test_least_time_by_hand() -> None:
    h200 = device("h200")
    forward = 2 * LAYERS + 2 * 16 * 2048 * 8193
    rest = 16384 * 6 * HEAD / 800e12 + 28 * WEIGHTS / 4.28e12
    assert min_seconds(T6, "none", h200) == pytest.approx(16384 * 3 * forward / 800e12 + rest)
    assert min_seconds(T6, "operations", h200) == min_seconds(T6, "none", h200)
    last = 2 * 16 * 2048 * 8192  # the product whose result is only added to the residual
    assert min_seconds(T6, "layers", h200) == pytest.approx(16384 * (4 * forward - last) / 800e12 + rest)
    widest = 16384 * 2 * 16 * 2048 * 2 * 8192
    assert min_seconds(T6, "mlp", h200) == pytest.approx(min_seconds(T6, "none", h200) + widest / 800e12)
    saved = 16384 * 6 * LAYERS * (1 / 800e12 - 1 / 1470e12)
    found = min_seconds(replace(T6, precision="fp8-tensor"), "none", h200)
    assert found == pytest.approx(min_seconds(T6, "none", h200) - saved)
    twice = min_seconds(replace(T6, batches=2), "none", h200)
    # One update, whose gradients are sums in float32.
    assert twice == pytest.approx(2 * min_seconds(T6, "none", h200) - 26 * WEIGHTS / 4.28e12)
    # Measured: 284.0 ms.
    assert 0.6 < min_seconds(T6, "none", h200) / 0.284 < 0.75


def test_the_command_prints_all_ways_and_marks_one() -> None:
    recipe = Path(__file__).parents[3] / "examples/builtin.toml"
    # One rank of a model whose tokenizer is at hand.
    lines = estimate_text(read_train_config(recipe, [("start.tokenizer", "builtin")]), "h200", 1).splitlines()
    assert "1 x 131072 tokens a replica, bf16, NVIDIA H200" in lines[0]
    assert [line[2:].split(":")[0] for line in lines[1:]] == [f"recompute {one}" for one in RECOMPUTE]
    assert [line[0] for line in lines[1:]] == ["*", *" " * (len(RECOMPUTE) - 1)]


def test_experts_keep_the_results_of_their_products() -> None:
    """Qwen3-30B-A3B: 128 experts 768 wide, of which a token goes to 8."""
    shape, h200 = TrainShape(config_from_dict(SHAPES["30B-A3B"], "30B-A3B"), 16384, 8192), device("h200")
    # What enters, q k v, attention's result with 32 float32, its product; then logits and rows.
    attention, rows = 2 * (2048 + 5120 + 4096 + 2048) + 4 * 32, 2 * (128 + 8 * (2 * 768 + 2048))
    narrow = replace(shape, tokens=131072)  # so that activations, not gradients, are the fullest moment
    assert memory(narrow, "operations").activations == 48 * 131072 * (attention + rows)
    assert memory(narrow, "mlp").activations == 48 * 131072 * (attention + rows - 2 * 8 * 2 * 768)
    none, operations, more, most = (min_seconds(shape, one, h200) for one in RECOMPUTE)
    assert operations == none
    assert more - none == pytest.approx(48 * 16384 * 2 * 8 * 2 * 768 * 2048 / 800e12)
    assert most > more


def test_gates_of_queries_and_shared_experts_are_kept_too() -> None:
    """Qwen3-Next-80B-A3B, a layer that attends: 16 heads of 256 with gates, 2 of keys; 10 of 512 experts and one for
    all tokens, 512 wide."""
    shape = TrainShape(config_from_dict(SHAPES["80B-A3B"], "80B-A3B"), 16384, 8192)
    queries, keys = 16 * 256, 2 * 256
    rows, routing = 10 * 2 * (3 * 512 + 2 * 2048), 2 * 2048 + 6 * 512 + 10 * (4 + 8 + 16)
    # Two sums, what is normed; q with its gates, k and v, before and after norms of heads; the result, gated as well.
    attention = 2 * (3 * 2048 + 2 * queries + 2 * keys + queries + keys + 2 * queries) + 4 * 16
    assert layer_bytes(shape, 3, "none") == 16384 * (attention + rows + routing + 2 * 3 * 512)
    results = 2 * (2 * queries + 2 * keys + queries + 2 * 2048) + 4 * 16
    kept = results + 2 * (512 + 10 * (2 * 512 + 2048) + 2 * 512)
    assert layer_bytes(shape, 3, "operations") == 16384 * kept


def test_gpt_oss_keeps_all_scores_and_wide_gates() -> None:
    """By what autograd keeps of attention with sinks, and of gates within bounds. Of one layer: gradients are more."""
    config = config_from_dict(SHAPES["gpt-oss-20b"], "gpt-oss-20b")
    given = [torch.randn(192, heads, 64, dtype=torch.bfloat16).requires_grad_() for heads in (64, 8, 8)]
    batch, sinks = Sequences(torch.tensor([0, 64, 128, 192]), 64, None), torch.zeros(64).requires_grad_()
    scores = saved_bytes(lambda: whole_sequences(AttentionCall(*given, batch, AttentionSpec(0, 0.125), sinks))) // 192
    assert config.experts is not None
    clamp, width = config.experts.clamp, config.experts.intermediate_size
    both = torch.randn(192, 2 * width, dtype=torch.bfloat16).requires_grad_()
    gates = saved_bytes(lambda: clamped_swiglu(*both.add(0).chunk(2, -1), clamp)) // 192
    attention = 2 * (3 * 2880 + 64 * 64 + 2 * 8 * 64 + 64 * 64)
    routing, rows = 2 * (2880 + 32) + 4 * 32 + 4 * (4 + 8 + 16), 4 * (2 * (width + 2 * 2880) + gates)
    found = memory(TrainShape(config, 192, 64), "none").activations / 192
    assert found == pytest.approx(attention + scores + routing + rows, rel=0.01)


def test_operations_that_are_kept_exist_in_this_torch() -> None:
    for name in _KEPT - {"torch_attn::_varlen_attn"}:
        namespace, _, operation = name.partition("::")
        assert hasattr(getattr(torch.ops, namespace), operation), name
