"""Layouts that do not fit are refused with one clear line; the automatic one follows its rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.comm.placement import Placement
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.models.shapes import SHAPES
from strata.parallel.families import Rule, placements, sharding_table, span
from strata.parallel.layout import Layout, auto_layout
from tests.models.checkpoints import FAMILY_CONFIGS
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.parallel.models import config_of

GIB = 2**30


@pytest.fixture
def llama() -> ModelConfig:
    return config_from_dict(SHAPES["8B"])


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (Layout(dp=2, tp=2), 8, r"pp 1 \* dp 2 \* shard 1 \* cp 1 \* tp 2 = 4 ranks, but 8 run; change one of them"),
        (Layout(ep=2), 2, r"= 1 ranks, but 2 run; .*; ep = 2 takes none of its own, it divides shard \* cp"),
        (Layout(tp=0), 1, "tp = 0 must be at least 1"),
        (Layout(micro_batches=0), 1, "micro_batches = 0 must be at least 1"),
        (Layout(tp=3), 3, "tp = 3 does not divide num_attention_heads = 32; for this model tp may be 1, 2, 4, 8"),
        (Layout(tp=16), 16, "tp = 16 does not divide num_key_value_heads = 8; for this model tp may be 1, 2, 4, 8"),
        (Layout(pp=33), 33, "pp = 33 with schedule '1f1b' has 33 stages, more than the model's 32 layers"),
        (Layout(pp=20, schedule="interleaved", micro_batches=20), 20, "has 40 stages, more than the model's 32 layers"),
        (Layout(pp=2, schedule="interleaved", micro_batches=3), 2, "micro_batches = 3 is no multiple of pp = 2"),
        (Layout(pp=2, schedule="gpipe"), 2, "schedule 'gpipe' is unknown; known are 1f1b, interleaved, zero-bubble"),
        (
            Layout(pp=2, shard=2, zero=3, schedule="zero-bubble", micro_batches=2),
            4,
            "schedule 'zero-bubble' splits backward passes, and zero = 3 reduces gradients when a pass",
        ),
        (Layout(cp=5, context="ulysses"), 5, "cp = 5 with ulysses shares out 32 query heads and 8 key/value heads"),
        (Layout(shard=2), 2, "zero = 0 divides nothing among shard = 2 ranks; use dp, or zero = 1, 2 or 3"),
        (Layout(dp=2, zero=2), 2, "zero = 2 has one rank to divide among; set shard above 1, or zero = 0"),
        (Layout(zero=4), 1, "zero = 4 is unknown; accepted are 0, 1, 2 and 3"),
        (Layout(sequence_parallel=True), 1, "sequence_parallel divides tokens over tp, and tp = 1"),
        (Layout(tp=2, overlap=True), 2, "overlap hides the messages of sequence_parallel; set that too"),
        (Layout(shard=2, zero=1, ep=2), 2, "ep = 2, and LlamaForCausalLM has no experts; leave ep out"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(llama: ModelConfig, layout: Layout, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.check(llama, world)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=8),
        Layout(shard=8, zero=2),
        Layout(dp=2, shard=4, zero=3),
        Layout(tp=8, sequence_parallel=True),
        Layout(pp=2, cp=2, tp=2, schedule="interleaved", micro_batches=4),
        Layout(cp=8, zero=1),
    ],
)
def test_layouts_that_fit_pass(llama: ModelConfig, layout: Layout) -> None:
    layout.check(llama, 8)


def test_a_vocabulary_smaller_than_tp_is_refused(llama: ModelConfig) -> None:
    with pytest.raises(ValueError, match="tp = 8 exceeds vocab_size = 5"):
        Layout(tp=8).check(replace(llama, vocab_size=5), 8)


@pytest.mark.parametrize(
    ("world", "gib", "wanted"),
    [
        (1, 141, Layout()),
        (8, 1000, Layout(shard=8, zero=1)),  # 8.03e9 * (6 + 12 / 8) bytes = 56 GiB
        (8, 141, Layout(shard=8, zero=2)),  # 8.03e9 * (2 + 16 / 8) bytes = 30 GiB
        (8, 80, Layout(shard=8, zero=3)),  # 8.03e9 * 16 / 8 bytes = 15 GiB
        (16, 141, Layout(dp=2, shard=8, zero=2)),
        (16, 40, Layout(shard=16, zero=3)),
        (6, 141, Layout(shard=6, zero=2)),
    ],
)
def test_the_automatic_layout_divides_no_more_than_needed(
    llama: ModelConfig, world: int, gib: int, wanted: Layout
) -> None:
    layout, reason = auto_layout(llama, world, gib * GIB)
    assert layout == wanted
    layout.check(llama, world)
    assert "\n" not in reason
    assert world == 1 or f"ZeRO-{layout.zero}" in reason


def test_latents_are_laid_out_as_other_models_with_experts() -> None:
    config = config_from_dict(SHAPES["V2-Lite"])
    for world, gib, zero in ((8, 141, 1), (16, 141, 1), (8, 80, 3)):
        layout, _ = auto_layout(config, world, gib * GIB)
        layout.check(config, world)
        assert (layout.ep, layout.zero) == (8, zero)
    for name in ("tp", "cp"):
        with pytest.raises(ValueError, match=f"{name} = 2 would divide the latent attention of Deepseek"):
            Layout(**{name: 2}).check(config, 2)
    Layout(pp=2).check(config, 2)
    with pytest.raises(ValueError, match="splits backward passes, in which DeepseekV2ForCausalLM uses a weight twice"):
        Layout(pp=2, micro_batches=2, schedule="zero-bubble").check(config, 2)


def test_the_reason_names_the_bytes(llama: ModelConfig) -> None:
    assert auto_layout(llama, 8, 141 * GIB)[1] == (
        "ZeRO-2 with shard 8: the least divided layout whose weights, gradients and optimizer state "
        "(29.9 GiB a device) fill at most a third of 141 GiB"
    )


def test_a_model_that_nothing_makes_fit_is_refused(llama: ModelConfig) -> None:
    message = r"59.8 GiB a device even when all 2 ranks divide them, more than two thirds of 80 GiB; use more ranks"
    with pytest.raises(ValueError, match=message):
        auto_layout(llama, 2, 80 * GIB)
    layout, reason = auto_layout(llama, 2, 96 * GIB)
    assert layout == Layout(shard=2, zero=3)
    assert "the most divided layout" in reason
    assert "at most two thirds of 96 GiB" in reason


def test_experts_are_shared_out() -> None:
    moe = config_of("qwen3-moe")
    assert auto_layout(moe, 4, GIB)[0] == Layout(shard=4, ep=4, zero=1)
    assert auto_layout(moe, 6, GIB)[0] == Layout(shard=6, ep=2, zero=1)
    assert auto_layout(config_of("qwen3-next"), 4, GIB)[0] == Layout(shard=4, ep=4, zero=1)


def test_experts_that_no_table_divides_stay_whole() -> None:
    granite = config_from_dict(RECURRENT_CONFIGS["granite-hybrid-experts"] | {"num_local_experts": 4})
    assert auto_layout(granite, 4, GIB)[0] == Layout(shard=4, zero=1)
    with pytest.raises(ValueError, match="ep = 2: ranks do not divide the experts of GraniteMoeHybridForCausalLM yet"):
        Layout(shard=2, zero=1, ep=2).check(granite, 2)


def test_a_tied_embedding_on_two_stages_is_no_matter_for_fsdp() -> None:
    with pytest.raises(ValueError, match="zero = 3 does not go with a tied embedding"):
        Layout(pp=2, shard=2, zero=3).check(config_of("llama-biases-tied"), 4)


@pytest.mark.parametrize("values", [values for _, values in FAMILY_CONFIGS])
def test_every_parameter_of_every_family_has_one_rule(values: dict[str, object]) -> None:
    config = config_from_dict(dict(values))
    with torch.device("meta"):
        model = build(config)
    placed = placements((name for name, _ in model.named_parameters()), sharding_table(config.architecture))
    for name, parameter in model.named_parameters():
        divided = placed[name].divided_dim
        assert divided is None or divided < parameter.dim(), name
        is_whole = placed[name] in (Placement.PER_TOKEN, Placement.PER_HEAD, Placement.DIVIDED_NORM)
        of_all_heads = name.endswith(
            ("mlp.gate.weight", "mlp.router.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
        )
        is_of_heads = name.endswith("self_attn.sinks")
        assert not is_of_heads or placed[name] is Placement.COLUMN
        assert "bias" in name or is_of_heads or is_whole == (parameter.dim() == 1 or of_all_heads), name


def test_a_parameter_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no rule of the sharding table for parameter 'model.extra.weight'"):
        placements(["model.extra.weight"], sharding_table("LlamaForCausalLM"))
    twice = [Rule(".*", Placement.ROW), Rule("lm_head.*", Placement.VOCABULARY)]
    with pytest.raises(ValueError, match=r"2 rules of the sharding table for parameter 'lm_head.weight'"):
        placements(["lm_head.weight"], twice)


def test_spans_cover_everything_once_and_differ_by_one_at_most() -> None:
    for size in (8, 9, 131, 1):
        for parts in (1, 2, 4):
            spans = [span(size, parts, index) for index in range(parts)]
            assert [row for first, end in spans for row in range(first, end)] == list(range(size))
            lengths = [end - first for first, end in spans]
            assert max(lengths) - min(lengths) <= 1
