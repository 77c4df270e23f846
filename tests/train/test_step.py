"""A step against plain PyTorch: gradients, clipping, AdamW, float32 masters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.layers import CausalLM
from strata.train.config import OptimizerConfig, TrainConfig
from strata.train.encode import Encoder
from strata.train.flops import step_flops
from strata.train.loop import model_config
from strata.train.optim import Optimizer, masters_of
from strata.train.pack import PackedBatch, pack
from strata.train.step import accumulate_gradients, train_step
from strata.train.tasks.mixture import document

CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, clip=0.5)


@pytest.fixture
def model(small: Callable[..., TrainConfig], tokenizer: tokenizers.Tokenizer) -> CausalLM:
    made = build(model_config(small(), tokenizer))
    initialize(made, 0)
    return made


def batches(tokenizer: tokenizers.Tokenizer, *splits: tuple[int, int]) -> list[PackedBatch]:
    encoder = Encoder(tokenizer)
    return [pack([encoder.encode([document(9, i) for i in range(*split)])], split[1]) for split in splits]


def gradients(model: CausalLM) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_loss_and_gradient_do_not_depend_on_the_split(model: CausalLM, tokenizer: tokenizers.Tokenizer) -> None:
    seen = []
    for splits in ([(0, 9)], [(0, 1), (1, 6), (6, 9)]):
        model.zero_grad()
        loss = accumulate_gradients(model, Optimizer(model, CONFIG), batches(tokenizer, *splits))
        seen.append((loss, gradients(model)))
    assert torch.allclose(seen[0][0], seen[1][0], rtol=1e-6)
    for name, gradient in seen[0][1].items():
        assert torch.allclose(gradient, seen[1][1][name], rtol=1e-4, atol=1e-7), name


def test_gradient_equals_one_document_at_a_time_with_full_logits(
    model: CausalLM, tokenizer: tokenizers.Tokenizer
) -> None:
    """A twin without packing, row selection or chunked loss."""
    accumulate_gradients(model, Optimizer(model, CONFIG), batches(tokenizer, (0, 4), (4, 7)))
    ours = gradients(model)
    model.zero_grad()
    losses = []
    for i in range(7):
        one = Encoder(tokenizer).encode([document(9, i)])
        batch, _, _ = pack([one], 0).to(torch.device("cpu"))
        logits = model.head(model(batch))[:-1]
        each = F.cross_entropy(logits, torch.from_numpy(one.tokens[1:].astype(np.int64)), reduction="none")
        losses.append(each[torch.from_numpy(one.wanted[1:])])
    torch.cat(losses).mean().backward()
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, ours[name], rtol=1e-4, atol=1e-7), name


def test_adamw_and_clipping_equal_the_formulas(model: CausalLM, tokenizer: tokenizers.Tokenizer) -> None:
    """Loshchilov and Hutter 2019, algorithm 2, in float64 from the gradients of each step."""
    optimizer = Optimizer(model, CONFIG)
    state = {name: [p.detach().double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()]
             for name, p in model.named_parameters()}  # fmt: skip
    for step, split in enumerate([(0, 5), (5, 9), (9, 14)], 1):
        work = batches(tokenizer, split)
        accumulate_gradients(model, optimizer, work)
        found = {name: gradient.double() for name, gradient in gradients(model).items()}
        norm = torch.cat([gradient.flatten() for gradient in found.values()]).norm()
        assert norm > CONFIG.clip, "the test must clip"
        rate = CONFIG.learning_rate / step
        assert torch.allclose(optimizer.step(rate).double(), norm, rtol=1e-5)
        for name, (weight, first, second) in state.items():
            gradient = found[name] * CONFIG.clip / norm
            decay = 0.0 if weight.dim() == 1 or "embed" in name else CONFIG.weight_decay
            weight *= 1 - rate * decay
            first += (1 - CONFIG.beta1) * (gradient - first)
            second += (1 - CONFIG.beta2) * (gradient**2 - second)
            scale = (second / (1 - CONFIG.beta2**step)).sqrt() + CONFIG.eps
            weight -= rate * first / (1 - CONFIG.beta1**step) / scale
            ours = model.get_parameter(name).detach()
            # Where a gradient is near zero its sign is rounding, and Adam moves by the full rate.
            close = torch.isclose(ours.double(), weight, rtol=1e-4, atol=2e-5)
            assert close.double().mean() > 0.999, name


def test_bfloat16_model_is_the_rounding_of_float32_masters(model: CausalLM, tokenizer: tokenizers.Tokenizer) -> None:
    masters = masters_of(model)
    rounded = model.to(torch.bfloat16)
    optimizer = Optimizer(rounded, CONFIG, masters)
    # Masters are the weights before rounding, not after.
    assert not torch.equal(optimizer.masters["model.embed_tokens.weight"], rounded.model.embed_tokens.weight.float())
    work = batches(tokenizer, (0, 4), (4, 8))
    accumulate_gradients(rounded, optimizer, work)
    total = {name: master.grad.clone() for name, master in optimizer.masters.items()}
    counted = sum(len(one.targets) for one in work)
    parts = dict.fromkeys(total, 0.0)
    for one in work:
        apart = Optimizer(rounded, CONFIG)
        accumulate_gradients(rounded, apart, [one])
        for name, master in apart.masters.items():
            parts[name] = parts[name] + master.grad * (len(one.targets) / counted)
    for name, gradient in total.items():
        assert gradient.dtype == torch.float32
        assert (gradient - parts[name]).norm() < 0.02 * gradient.norm(), name
    optimizer.step(1e-3)
    for name, parameter in rounded.named_parameters():
        assert torch.equal(parameter, optimizer.masters[name].to(torch.bfloat16))
        assert parameter.grad is None


def test_small_updates_survive_in_the_masters(model: CausalLM, tokenizer: tokenizers.Tokenizer) -> None:
    """At a rate of 1e-6 a bfloat16 weight near 1 would never move."""
    masters = masters_of(model)
    optimizer = Optimizer(model.to(torch.bfloat16), OptimizerConfig(learning_rate=1e-6), masters)
    before = optimizer.masters["model.norm.weight"].detach().clone()
    train_step(model, optimizer, batches(tokenizer, (0, 4)), 1e-6)
    moved = (optimizer.masters["model.norm.weight"] - before).abs()
    assert (moved > 5e-7).any()
    assert torch.equal(model.model.norm.weight, torch.ones_like(model.model.norm.weight))


def test_loss_falls_in_thirty_steps(model: CausalLM, tokenizer: tokenizers.Tokenizer) -> None:
    optimizer = Optimizer(model, OptimizerConfig(learning_rate=1e-2))
    losses = [train_step(model, optimizer, batches(tokenizer, (i, i + 12)), 1e-2)[0].item() for i in range(0, 360, 12)]
    assert losses[0] == pytest.approx(np.log(600), rel=0.05)
    assert np.mean(losses[-3:]) < 0.65 * losses[0]


def test_flops_by_hand(small: Callable[..., TrainConfig], model: CausalLM, tokenizer: tokenizers.Tokenizer) -> None:
    work = batches(tokenizer, (0, 3))
    n = len(work[0].tokens)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48  # q and o, k and v, gate up down
    pairs = sum(length * (length + 1) // 2 for length in work[0].lengths.tolist())
    scores = 2 * 4 * 8 * 2 * pairs  # heads, head_dim; scores and mix; a multiply-add is two
    forward = 2 * 2 * layer * n + 2 * scores + 2 * 600 * 32 * len(work[0].targets)
    config = model_config(small(), tokenizer)
    assert step_flops(model, config, work) == 3 * forward
