"""`strata graph` run in this process, and the published sizes of Llama-3.1-405B to count by."""

from __future__ import annotations

import json
from typing import Any

import typer
from typer.testing import CliRunner

from strata.cli.graph import graph

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 16384, 126, 128, 8, 128, 53248, 128256
# fmt: off
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}
# fmt: on
LAYER_WEIGHTS = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INNER

app = typer.Typer()
app.command()(graph)


def run(*arguments: object) -> Any:
    given = [str(argument) for argument in arguments]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if "--json" in arguments else done.stdout
