"""Steps of adapters beside a frozen model of random weights on one device: milliseconds, tokens a second, and the bytes
at the fullest moment beside those that `strata train --estimate` counts.

    python -m benchmarks.qlora_step --quantization int4 --recompute layers
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from strata.comm.launch import World
from strata.files.toml_tables import read_table
from strata.graph.quantize import weights_of_products
from strata.graph.trace import trace
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.quant.schemes import scheme_of
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.quantized.choice import quantized_by
from strata.models.shapes import SHAPES
from strata.models.weights import WeightStore
from strata.parallel.layout import Layout
from strata.train.adapters.lora import LoraConfig
from strata.train.config import RECOMPUTE_OF_MODULES, TrainConfig
from strata.train.data.encoding import Encoded
from strata.train.data.pack import pack
from strata.train.optimizer.config import OptimizerConfig
from strata.train.predict.adapters import AdapterStep
from strata.train.steps.make import Adapters, make_step, values_of

GIB = 2**30


def frozen_model(
    folder: Path, config: ModelConfig, scheme: str | None, device: torch.device
) -> tuple[CausalLM, dict[str, QuantizedWeight]]:
    """Random weights, and what is packed of them, packed as they are made."""
    with torch.device("meta"):
        empty = build(config)
    names = weights_of_products([trace(empty)])
    schemes = {} if scheme is None else quantized_by(scheme_of(scheme), names, empty)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    store = WeightStore.load(folder, schemes, device, dtype, "dummy")
    return store.model, {name: weight._replace(activations="") for name, weight in store.quantized.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8B", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--recompute", default="none", choices=RECOMPUTE_OF_MODULES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; --device cpu runs on the processor")
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    fields = SHAPES[asked.shape] | ({} if asked.layers is None else {"num_hidden_layers": asked.layers})
    config, lora = config_from_dict(fields, asked.shape), LoraConfig(asked.rank, quantization=asked.quantization)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(fields))
        model, packed = frozen_model(Path(name), config, asked.quantization, device)
        table = {
            "run": {"out": name, "steps": 1},
            "start": {"model": name},
            "data": {"sources": [{"folder": name}], "tokens_per_pack": asked.tokens},
            "optimizer": {"learning_rate": 1e-4},
            "schedule": {"warmup": 0, "decay": 0},
            "lora": {"rank": asked.rank} | ({"quantization": asked.quantization} if asked.quantization else {}),
        }
        expected = AdapterStep.of(read_table(TrainConfig, table), config, Layout()).memory(asked.recompute)
    step = make_step(
        config,
        Layout(),
        Layout().mesh(World(0, 0, 1, device, None)),
        OptimizerConfig(learning_rate=1e-4),
        values_of(model),
        adapters=Adapters(lora, packed=packed),
        recompute=asked.recompute,
    )
    del model, packed
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ids = np.arange(asked.tokens, dtype=np.int32) * 37 % config.vocab_size
    document = pack(Encoded(ids, np.arange(asked.tokens) > 0, np.array([0, asked.tokens])))
    seconds = []
    for _ in range(asked.steps):
        start = time.perf_counter()
        step([document], 1e-4).loss.item()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[2:] or seconds)
    row = {
        "shape": asked.shape,
        "layers": config.num_layers,
        "quantization": asked.quantization,
        "recompute": asked.recompute,
        "tokens": asked.tokens,
        "milliseconds": round(median * 1e3, 1),
        "tokens_per_second": round(asked.tokens / median),
        "estimated_gib": round(expected.total / GIB, 2),
    }
    if device.type == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        row["device"] = torch.cuda.get_device_name(device)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
