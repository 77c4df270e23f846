"""Checkpoints of gpt-oss: experts of one tensor, in floats and in mxfp4, whole and by ranks; what does not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from strata.kernels.quant.mxfp4 import dequantize
from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.models.experts import stored_parameters
from strata.models.families import build
from strata.models.shapes import SHAPES
from strata.models.weights import load
from strata.parallel.layout import Layout
from strata.parallel.serving_shard import RankShard

from .batches import packed, random_sequences
from .checkpoints import FAMILY_CONFIGS, load_oracle, make_checkpoint
from .test_save import expected_slice

VALUES = dict(FAMILY_CONFIGS)["gpt-oss-yarn"]
DIVISIBLE = VALUES | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
# Groups of 32 values want inputs that these divide.
PACKED = DIVISIBLE | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}


def random_packed(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """blocks [..., groups, 16] and scales [..., groups] of values of about 0.1."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)


def test_dequantized_values_have_the_bits_of_transformers() -> None:
    blocks, _ = random_packed(3, 8, 32)
    scales = torch.arange(256, dtype=torch.uint8).repeat(3).view(3, 8, 32)  # every scale, the extremes too
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    found = dequantize(blocks, scales).to(torch.bfloat16)
    assert torch.equal(found.view(torch.int16), wanted.contiguous().view(torch.int16))
    # By the specification: 0x1 is 0.5, 0xF is -6; the low half comes first; 2^(126 - 127).
    first = dequantize(torch.full((1, 16), 0xF1, dtype=torch.uint8), torch.tensor([126], dtype=torch.uint8))
    assert first.tolist() == [0.25, -3.0] * 16


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("floats"), DIVISIBLE)


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with experts in mxfp4, scales in another file than blocks, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp("mxfp4")
    make_checkpoint(folder, {name: value for name, value in PACKED.items() if name != "quantization_config"})
    tensors, floats = load_file(folder / "model.safetensors"), {}
    for number, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        count, inputs, outputs = tensors.pop(name).shape
        blocks, scales = random_packed(count, outputs, inputs // 32, seed=number)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    shards = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for name, tensor in tensors.items():
        shards["model-2.safetensors" if name.endswith("_scales") else "model-1.safetensors"][name] = tensor
    for file, held in shards.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    homes = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    (folder / "config.json").write_text(json.dumps(PACKED))
    return folder, {name: one for name, one in tensors.items() if not name.endswith(("_blocks", "_scales"))} | floats


@torch.no_grad()
def test_mxfp4_is_read_as_transformers_dequantizes_it(
    packed_folder: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, floats = packed_folder
    plain = {name: value for name, value in PACKED.items() if name != "quantization_config"}
    save_file(floats, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(plain))
    model, config = load(folder)
    again, _ = load(tmp_path)
    assert config == dataclasses.replace(read_config(tmp_path), dtype=config.dtype)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    sequences = random_sequences(config.vocab_size, (1, 40))
    wanted = torch.cat([load_oracle(tmp_path)(torch.tensor([sequence])).logits[0] for sequence in sequences])
    assert (model.head(model(packed(sequences))) - wanted).abs().max() < 2e-5 * wanted.abs().max()


def test_a_rank_reads_its_slices(packed_folder: tuple[Path, dict[str, Tensor]], plain_folder: Path) -> None:
    """Of mxfp4 too, where the part of a rank ends within a group: 24 inputs of 32."""
    for folder in (plain_folder, packed_folder[0]):
        whole, config = load(folder)
        complete = stored_parameters(whole)
        for index in (0, 3):
            shard = RankShard.of(config, 4, index)
            model, _ = load(folder, part=shard)
            for name, value in stored_parameters(model).items():
                expected = expected_slice(shard, name, complete[name].detach(), tuple(value.shape))
                assert torch.equal(value, expected), name


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def cut(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name][1:].contiguous()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.layers.1.mlp.experts.down_proj"), "lacks tensors.*layers.1.mlp.experts.down_proj"),
        (cut("model.layers.0.mlp.experts.gate_up_proj"), r"gate_up_proj is \[4, 64, 64\], expected \[5, 64, 64\]"),
        (cut("model.layers.0.mlp.experts.down_proj_bias"), r"down_proj_bias is \[4, 64\], expected \[5, 64\]"),
        (lambda t: t.update({"model.layers.0.mlp.experts.9.x.weight": torch.ones(1)}), "does not call for.*experts.9"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj_blocks": torch.ones(5, 64, 1, 16).byte()}),
            "lacks tensors.*down_proj_scales",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj_blocks": torch.ones(5, 64, 1, 16)}),
            "down_proj_blocks has dtype torch.float32, expected torch.uint8",
        ),
    ],
)
def test_experts_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], None], message: str, plain_folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(plain_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(DIVISIBLE))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_the_config_of_the_published_checkpoint_is_read() -> None:
    """openai/gpt-oss-20b's, by the copy at https://github.com/EchoCog/gpt-oss-20b (52971a1); mxfp4 by its document."""
    config = config_from_dict(PUBLISHED)
    assert config.windows == (128, None) * 12
    assert (config.attention_bias, config.has_sinks, config.num_experts, config.longest) == (True, True, 32, 131072)
    assert config_from_dict(config.to_dict()) == config
    assert config_from_dict(SHAPES["gpt-oss-20b"]) == dataclasses.replace(config, dtype=torch.bfloat16)
    with torch.device("meta"):
        held = sum(parameter.numel() for parameter in build(config).parameters())
    hidden, queries, keys = 2880, 64 * 64, 8 * 64
    attention = (hidden + 1) * (queries + 2 * keys) + (queries + 1) * hidden + 64
    experts = 32 * ((hidden + 1) * 2 * hidden + (hidden + 1) * hidden + hidden + 1)  # and their rows of the router
    assert held == 24 * (attention + experts + 2 * hidden) + hidden + 2 * 201088 * hidden
    assert round(held / 1e9, 1) == 20.9


def divided(config: ModelConfig, **layout: int) -> None:
    Layout(**layout).check(config, 2)  # type: ignore[arg-type]


def test_ranks_that_are_not_there_are_refused_before_weights_are_read() -> None:
    config = config_from_dict(DIVISIBLE)
    with pytest.raises(ValueError, match="cp = 2 is not there for attention with sinks"):
        divided(config, cp=2)
    with pytest.raises(ValueError, match="ep = 2 is not there for experts with biases"):
        divided(config, shard=2, ep=2, zero=1)


# fmt: off
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn",
    "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 201088,
}
# fmt: on
