"""Families with experts: what the engine serves, the balancing loss against transformers, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from strata import LLM, SamplingParams
from strata.models.balance import Balance, balancing_loss, balancing_slopes, fractions, routers
from strata.models.experts import SparseMLP
from strata.models.layers import MLP, CausalLM
from strata.models.weights import load

from .batches import packed, random_sequences
from .checkpoints import FAMILY_CONFIGS, load_oracle, make_checkpoint
from .sparse_models import SPARSE_CONFIGS, pair


def test_layers_with_experts_are_those_that_config_json_names() -> None:
    model, _ = pair("qwen3-moe-dense-layers-biases")
    assert [type(layer.mlp) for layer in model.model.layers] == [MLP, MLP, MLP, SparseMLP]


def oracle_logits(folder: Path, sequence: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = load_oracle(folder)(torch.tensor([sequence])).logits[0]
    return logits


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SPARSE_CONFIGS)
def test_the_engine_serves_what_transformers_would(name: str, deterministic: bool, tmp_path: Path) -> None:
    """Greedy tokens through chunked prefill and pages."""
    folder = make_checkpoint(tmp_path / "model", SPARSE_CONFIGS[name])
    llm = LLM(
        folder,
        device="cpu",
        dtype="float32",
        num_pages=40,
        max_num_batched_tokens=16,
        skip_tokenizer_init=True,
        deterministic=deterministic,
    )
    prompts = random_sequences(83, (30, 3, 11))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.outputs[0].token_ids
        assert oracle_logits(folder, prompt + ids)[len(prompt) - 1 : -1].argmax(-1).tolist() == ids


def test_the_bias_of_a_router_stays_float32_and_further_layers_are_left_alone(tmp_path: Path) -> None:
    """In bfloat16 sigmoid scores are chosen in float32; a checkpoint may hold layers after the last."""
    folder = make_checkpoint(tmp_path / "model", dict(FAMILY_CONFIGS)["glm4-moe-groups"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors["model.layers.3.mlp.gate.weight"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    model, _ = load(folder, dtype="bfloat16")
    bias = model.get_parameter(name)
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tensors[name])
    assert model.to(torch.float16).get_parameter(name).dtype == torch.float32
    weights, _ = model.model.layers[1].mlp.gate(torch.randn(3, 56, dtype=torch.float16))
    assert weights.dtype == torch.float32
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks tensors .* {name}"):
        load(folder)


WEIGHT = 0.3


def balanced(model: CausalLM, sequences: list[list[int]], slopes: Tensor | None) -> Tensor:
    """[layers, 2, experts], what the routers add up in a backward pass whose own gradient is zero."""
    found = routers(model).values()
    totals = torch.zeros(len(found), 2, next(iter(found)).weight.shape[0], dtype=torch.float64)
    for place, router in enumerate(found):
        router.balance = Balance(totals[place], None if slopes is None else slopes[place])
    (model(packed(sequences)).sum() * 0).backward()
    return totals


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-dense-layers-biases"])
def test_loss_and_gradient_equal_transformers_layer_by_layer(name: str) -> None:
    model, oracle = pair(name)
    (sequence,) = random_sequences(83, (37,))
    config = SPARSE_CONFIGS[name]
    count, per_token = config.get("num_experts", config.get("num_local_experts")), config["num_experts_per_tok"]
    logits = oracle(torch.tensor([sequence]), output_router_logits=True).router_logits
    wanted = sum(load_balancing_loss_func((one,), count, per_token) for one in logits) / len(logits)
    totals = balanced(model, [sequence], None)
    assert totals[:, 0].sum(1).tolist() == [37 * per_token] * len(logits)
    shares = fractions(totals[:, 0], per_token)
    torch.testing.assert_close(balancing_loss(shares, totals[:, 1] / 37).float(), wanted)
    model.zero_grad()
    balanced(model, [sequence], balancing_slopes(shares, torch.tensor(37), WEIGHT))
    (WEIGHT * wanted).backward()
    for key, parameter in oracle.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_totals_of_batches_add_up() -> None:
    model, _ = pair("mixtral")
    first, second = random_sequences(83, (20, 11))
    whole, *parts = (balanced(model, sequences, None) for sequences in ([first, second], [first], [second]))
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_fractions_without_tokens_are_zero() -> None:
    assert fractions(torch.zeros(2, 3), 2).tolist() == [[0.0] * 3] * 2
