"""Steps of many rows on CUDA whose norms and gates round for the products behind them: the bits of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.graph.walk import operation_counts
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.quant.packed import pack
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import config_from_dict
from strata.models.families import build
from tests.dummies import randomize
from tests.engine.program.programs import graph_of, replayed, step_program
from tests.models.batches import packed, random_sequences

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 512,
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8_block"])
def test_steps_of_many_rows_have_the_bits_of_others(scheme: str) -> None:
    model = build(config_from_dict(LLAMA)).requires_grad_(False)
    randomize(model, 0)
    model = model.bfloat16().cuda()
    names = [name for name, one in model.named_parameters() if one.dim() == 2 and "proj" in name]
    weights = {name: pack(model.get_parameter(name).data.cpu(), SCHEMES[scheme]).to("cuda") for name in names}
    limits = DeviceLimits.of(torch.device("cuda", torch.cuda.current_device()))
    graphs = step_program(model, "cuda", deterministic=False, limits=limits, target={"packed": weights})
    assert graphs.variant("rounded_logits") is not None
    assert operation_counts(graph_of(graphs, "rounded_logits"))["rounded_linear"] == 4
    batch = packed(random_sequences(512, (90, 40)))
    moved = {name: getattr(batch, name).cuda() for name in ("tokens", "positions", "offsets")}
    batch, rows = replace(batch, **moved), torch.tensor([89, 129], dtype=torch.int32, device="cuda")
    with torch.inference_mode():
        wanted, found = graphs.logits(batch, rows), replayed(graphs, 130)(batch, rows)
    assert wanted.isfinite().all()
    assert torch.equal(found, wanted)
