"""Passes are chosen by name, and each that is left out is seen in the graphs of steps."""

from __future__ import annotations

import pytest
import torch

from strata.engine.engine_config import EngineConfig
from strata.graph.passes import PASSES, listing, passes_of
from strata.graph.walk import operation_counts
from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.parallel.serving_shard import RankShard
from strata.plan.meta_model import find_config, meta_model
from tests.dummies import randomize
from tests.engine.program.programs import graph_of, step_program
from tests.models.batches import packed, random_sequences
from tests.models.checkpoints import FAMILY_CONFIGS

FOLDS = {"fold_batch_norms", "fold_linears", "fold_norm_weights"}  # in test_fold.py
EVERY = {one.name for one in PASSES} - {"fold_norm_weights"}


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("all", EVERY),
        ("none", set()),
        ("exact", {"merge", "fuse_residual_norms", "fuse_query_key_writes", "fuse_gemm_all_reduce", "fuse_rounding"}),
        ("merge, fuse_rounding", {"merge", "fuse_rounding"}),
        ("-fuse_products,-merge", EVERY - {"merge", "fuse_products"}),
        ("+fold_norm_weights", EVERY | FOLDS),
        ("-merge, +fold_norm_weights", (EVERY | FOLDS) - {"merge"}),
        ("fold_norm_weights", {"fold_norm_weights"}),
        ("fuse_gemm_all_reduce", {"fuse_gemm_all_reduce"}),
    ],
)
def test_passes_are_chosen_by_name(text: str, run: set[str]) -> None:
    assert passes_of(text) == run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fuse", "there is no pass 'fuse'; accepted are all, exact, none, names that .* merge, fuse_residual_norms"),
        ("", "there is no pass ''"),
        ("merge,-fuse_products", "names with a minus or a plus, not both"),
        ("all,-merge", "there is no pass 'all'"),
        ("+fuse", "there is no pass 'fuse'"),
    ],
)
def test_others_are_refused_before_an_engine_starts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig("8B", passes=text)


# Left out, which operation is gone from which graph.
SEEN = {
    "merge": ("logits", "qk_rope_kv_write"),
    "fuse_residual_norms": ("logits", "add_rms_norm"),
    "fuse_query_key_writes": ("logits", "qk_rope_kv_write"),
    "fuse_decode_attention": ("decode_small_batch", "decode_attention"),
    "fuse_products": ("decode_small_batch", "linear_add"),
    "fuse_rounding": ("decode_large_batch", "quantized_linear"),
    "fuse_gated_products": ("logits", "linear_silu_mul"),
    "fuse_messages": ("logits", "all_reduce_add_rms_norm"),
    "fuse_gemm_all_reduce": ("decode_small_batch", "linear_all_reduce_add_rms_norm"),
}


def test_each_pass_has_a_line_and_an_effect() -> None:
    assert set(SEEN) | FOLDS == {one.name for one in PASSES}
    lines = listing().splitlines()
    assert [line.split()[0] for line in lines[1 : len(PASSES) + 1]] == [one.name for one in PASSES]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", SEEN)
def test_what_is_left_out_is_not_done(name: str) -> None:
    pytest.importorskip("triton")
    config = find_config("8B").with_layers((0, 1))
    shard = RankShard.of(config, 2, 0) if name in ("fuse_messages", "fuse_gemm_all_reduce") else None
    scheme = None if shard is not None else "fp8"
    graph, operation = SEEN[name]
    for passes, is_there in (("all", True), (f"-{name}", False), ("none", False)):
        graphs = meta_model(config, device("h200"), shard=shard, quantization=scheme, passes=passes).program
        assert (operation_counts(graph_of(graphs, graph))[operation] > 0) == is_there, passes


@torch.no_grad()
def test_logits_are_the_same_without_any() -> None:
    model = build(config_from_dict(dict(FAMILY_CONFIGS)["llama-yarn"])).requires_grad_(False)
    randomize(model, 0)
    batch, rows = packed(random_sequences(77, (9, 4))), torch.tensor([8, 12], dtype=torch.int32)
    none, every = (step_program(model, "cpu", deterministic=False, passes=text).logits for text in ("none", "all"))
    assert len(none.graph.nodes) > len(every.graph.nodes)
    torch.testing.assert_close(none(batch, rows), every(batch, rows), rtol=1e-5, atol=1e-5)
