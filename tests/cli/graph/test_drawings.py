"""`strata graph --draw` shows every operation, before and after the passes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from strata.cost.drawing.correspondence import correspondence
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.plan.meta_model import meta_model
from tests.cli.graph.shown import run

SVG = "{http://www.w3.org/2000/svg}"


def test_a_drawing_has_a_box_an_operation_before_and_after_the_passes(tmp_path: Path) -> None:
    """Of 8B 516 operations become 164 in a decode step, 16 of a layer become 5; 4096 x 4096 bfloat16 are 33.6 MB."""
    drawn = tmp_path / "8b.svg"
    counts = run("8B", "--sequences", 32, "--draw", drawn, "--json")["graph"]
    root = ElementTree.parse(drawn).getroot()
    boxes = [one.get("class", "").split() for one in root.iter(f"{SVG}rect")]
    strips = [sum(count.values()) for count in (counts["captured"], counts["run"])]
    assert strips == [516, 164]
    assert sum("solid" in kinds for kinds in boxes) == sum(strips)
    assert sum(one.find(f"{SVG}title") is not None for one in root.iter(f"{SVG}rect")) == sum(strips) + 16 + 5
    texts = [one.text for one in root.iter(f"{SVG}text")]
    own = ("q_proj & k_proj & v_proj", "rope + kv_write + attention", "o_proj + post_attention_layernorm + add")
    assert [texts.count(one) for one in (*own, "q_proj", "silu_mul", "rope", "33.6 MB", "KV")] == [
        1,
        1,
        1,
        1,
        1,
        2,
        3,
        2,
    ]
    # Matrices of seven, two norms, and the KV pages; then four products and the KV pages: all of 16 bits.
    assert texts.count("bf16") == 7 + 2 + 1 + 4 + 1
    assert "prefers-color-scheme: dark" in drawn.read_text()


def test_what_a_kernel_stands_for_with_experts_and_norms_of_heads() -> None:
    """In Qwen3-30B-A3B the six operations between projections are one kernel."""
    meta = meta_model(config_from_dict(SHAPES["30B-A3B"] | {"num_hidden_layers": 3}, "30B-A3B"), device("h200"))
    workload = Workload((1,) * 4, (9,) * 4)
    captured, ran = meta.captured(workload), meta.step(workload).model
    found = correspondence(captured, ran)
    layer = {captured[at].module.rpartition(".")[2] + ":" + captured[at].operation: ran[own].module for at, own in
             enumerate(found) if captured[at].layer == 1}  # fmt: skip
    joined = "q_norm+k_norm+rope+kv_write+attention"
    for one in ("q_norm:rms_norm", "k_norm:rms_norm", "self_attn:rope", "self_attn:kv_write", "self_attn:attention"):
        assert layer[one].endswith(f"layers.1.self_attn.{joined}")
    assert layer["post_attention_layernorm:rms_norm"].endswith("layers.1.post_attention_layernorm+add")
    assert layer["gate:linear"].endswith("layers.1.mlp.gate")
    assert found == sorted(found)  # in the order of execution, so that edges lead downwards


def test_drawings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give a name that ends in \.svg"):
        run("8B", "--draw", tmp_path / "8b.png")
    with pytest.raises(ValueError, match=r"there is no folder .*; make it first"):
        run("8B", "--draw", tmp_path / "none" / "8b.svg")
    with pytest.raises(ValueError, match="of one rank; leave out the other ranks"):
        run("8B", "--draw", tmp_path / "8b.svg", "--tensor-parallel-size", 2)
