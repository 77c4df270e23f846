"""Training on a GPU: the same loss as on the CPU, and a resumed run that repeats every bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strata.train.config import TrainConfig, train_config_from_dict
from strata.train.loop import Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def config(out: Path, device: str, steps: int = 20, learning_rate: float = 5e-3) -> TrainConfig:
    values: dict[str, Any] = {
        "run": {"out": str(out), "steps": steps, "device": device, "log_every": 1, "checkpoint_every": 10},
        "model": {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        "tokenizer": {"vocab_size": 800, "documents": 300},
        "data": {"tokens_per_batch": 8192, "batches_per_step": 2, "documents_per_shard": 512},
        "optimizer": {"learning_rate": learning_rate},
        "schedule": {"warmup": 2, "decay": 2},
    }
    return train_config_from_dict(values, "test")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_resumed_run_repeats_every_bit(tmp_path: Path) -> None:
    Run(config(tmp_path / "through", "cuda")).train()
    cut = config(tmp_path / "cut", "cuda")
    stopped = Run(cut)

    class CutOff(Exception):
        pass

    def stop(progress: object) -> None:
        if stopped.position.step == 13:
            raise CutOff

    with pytest.raises(CutOff):
        stopped.train(stop)
    resumed = Run(cut, resume=True)
    assert resumed.position.step == 10
    resumed.train()
    assert losses(tmp_path / "cut") == losses(tmp_path / "through")
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(tmp_path / name / "checkpoints/step-00000020" / file) for name in ("through", "cut"))
        assert all(torch.equal(one[name], other[name]) for name in one), file


def test_loss_follows_the_cpu(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        # A gentle rate: at a high one, bfloat16 and float32 part ways within a few steps.
        Run(config(tmp_path / device, device, steps=10, learning_rate=1e-3)).train()
    on_cpu, on_gpu = losses(tmp_path / "cpu"), losses(tmp_path / "cuda")
    assert on_gpu == pytest.approx(on_cpu, rel=0.02)
    assert on_gpu[-1] < 0.95 * on_gpu[0]
