"""A part of a model is loaded by reading its slices alone, and dummy weights are slices of the whole model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strata.models import sources, weights
from strata.models.config import ModelConfig
from strata.models.experts import stored_parameters
from strata.models.families import build
from strata.models.quantized import checkpoint
from strata.models.save import save
from strata.models.state import FixedState, PagedRows, WindowRows, group_numbers, state_groups
from strata.models.weights import load
from strata.parallel.serving_shard import RankShard
from tests.parallel.models import random_model
from tests.parallel.shards import FAMILIES, RANKS, divisible_config

# gpt-oss's checkpoints have all experts in one tensor: `test_joined_experts`.
APART = [name for name in FAMILIES if name != "gpt-oss"]


class CountedReader:
    """A safetensors file that counts the bytes that are asked of it."""

    def __init__(self, reader: Any, counts: dict[str, int]) -> None:
        self._reader, self._counts = reader, counts

    def __enter__(self) -> CountedReader:
        return CountedReader(self._reader.__enter__(), self._counts)

    def __exit__(self, *error: object) -> Any:
        return self._reader.__exit__(*error)

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self._reader.get_slice(name), name, self._counts)


class CountedSlice:
    def __init__(self, stored: Any, name: str, counts: dict[str, int]) -> None:
        self._stored, self._name, self._counts = stored, name, counts

    def __getitem__(self, index: Any) -> Tensor:
        value: Tensor = self._stored[index]
        self._counts[self._name] = self._counts.get(self._name, 0) + value.nbytes
        return value


def expected_slice(shard: RankShard, stored: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """By the names in the checkpoint and what they mean, not by the boxes; zeros where the vocabulary ends."""
    size, index = shard.size, shard.index
    kv_heads = shard.whole.num_kv_heads
    rows_divided = ("q_proj", "sinks", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", ".w1.", ".w3.")
    columns_divided = ("o_proj.weight", "down_proj.weight", ".w2.")
    divided_norms = ("q_norm", "k_norm") if shard.whole.architecture.startswith("Olmo") else ()
    if any(part in stored for part in (*rows_divided, *divided_norms[:1])):
        return value.chunk(size)[index]
    if any(part in stored for part in ("k_proj", "v_proj", *divided_norms[1:])):
        heads = value.unflatten(0, (kv_heads, -1))
        own = [head for head in range(kv_heads) if head * size // kv_heads == index or index * kv_heads // size == head]
        return heads[own].flatten(0, 1)
    if any(part in stored for part in columns_divided):
        return value.chunk(size, 1)[index]
    if "embed_tokens" in stored or "lm_head" in stored:
        padded = torch.zeros(shape[0] * size, shape[1], dtype=value.dtype)
        padded[: len(value)] = value
        return padded.chunk(size)[index]
    return value


def apart(stored: dict[str, Tensor], config: ModelConfig) -> dict[str, tuple[str, Tensor]]:
    """Of each matrix its name in the file, and its value: q, k, v and gate, up may lie there in one."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = {}
    for name, value in stored.items():
        parts = {name: value}
        if "qkv_proj" in name:
            pieces = value.split((queries, keys, keys))
            parts = {name.replace("qkv", kind): piece for kind, piece in zip("qkv", pieces, strict=True)}
        elif "gate_up_proj" in name:
            pieces = value.chunk(2)
            parts = {name.replace("gate_up", kind): one for kind, one in zip(("gate", "up"), pieces, strict=True)}
        found |= {part: (name, one) for part, one in parts.items()}
    return found


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", APART)
def test_a_part_is_its_slices_of_the_checkpoint(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = divisible_config(name)
    save(random_model(config, torch.float32), config, tmp_path)
    stored = apart(load_file(tmp_path / "model.safetensors"), config)
    counts: dict[str, int] = {}
    safe_open = checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", lambda *a, **k: CountedReader(safe_open(*a, **k), counts))
    monkeypatch.setattr(sources, "_PIECE_BYTES", 100)
    for index in (0, size - 1):
        counts.clear()
        shard = RankShard.of(weights.resolve(tmp_path)[0], size, index)
        model, given = load(tmp_path, part=shard)
        assert given is shard.config
        own = stored_parameters(model)
        assert own.keys() == stored.keys()
        read: dict[str, int] = {}
        for tensor, value in own.items():
            home, whole = stored[tensor]
            expected = expected_slice(shard, tensor, whole, tuple(value.shape))
            assert torch.equal(value, expected), tensor
            zeros = "embed_tokens" in tensor or "lm_head" in tensor
            held = expected[: max(0, 61 - index * len(expected))] if zeros else expected
            read[home] = read.get(home, 0) + held.nbytes
        assert counts == {home: count for home, count in read.items() if count}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-biases-tied", "mixtral"])
def test_dummy_weights_are_slices_of_the_whole_models(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = divisible_config(name)
    save(random_model(config, torch.float32), config, tmp_path)
    whole, read = load(tmp_path, dtype=dtype, load_format="dummy", seed=3)
    complete = stored_parameters(whole)
    for index in range(4):
        shard = RankShard.of(read, 4, index)
        model, _ = load(tmp_path, dtype=dtype, load_format="dummy", seed=3, part=shard)
        for tensor, value in stored_parameters(model).items():
            expected = expected_slice(shard, tensor, complete[tensor].detach(), tuple(value.shape))
            assert torch.equal(value, expected), tensor


def test_a_part_of_a_checkpoint_of_other_shapes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Also where a rank's box would lie inside the wrong tensor."""
    config = divisible_config("llama")
    save(random_model(config, torch.float32), config, tmp_path)
    shard = RankShard.of(config, 2, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    down = "model.layers.1.mlp.down_proj.weight"
    tensors[down] = torch.zeros(24, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj\.weight is \[24, 48\], expected \[24, 40\]"):
        load(tmp_path, part=shard)


def test_a_part_needs_memory_for_itself_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = divisible_config("llama")
    save(random_model(config, torch.float32), config, tmp_path)
    asked = []
    monkeypatch.setattr(weights, "require_memory", lambda size, device, dtype: asked.append(size))
    shard = RankShard.of(config, 4, 0)
    model, _ = load(tmp_path, part=shard)
    assert asked == [weights.weight_bytes(model, torch.float32)]
    with torch.device("meta"):
        complete = build(config)
    assert asked[0] < 0.4 * weights.weight_bytes(complete, torch.float32)


ROWS, OTHER_ROWS = PagedRows((2, 16)), PagedRows((24,), tensors=1)
WINDOW = WindowRows(ROWS, 8)
STATE, OTHER_STATE = FixedState(((4, 16),), (torch.float32,)), FixedState(((3,), (5, 7)), (torch.float32, None))


def test_fixed_states_come_last_and_their_layers_are_given_the_batch_itself() -> None:
    states = (STATE, WINDOW, OTHER_STATE, ROWS, STATE, WINDOW)
    groups = [(group.state, group.layers) for group in state_groups(states)]
    assert groups == [(ROWS, (3,)), (WINDOW, (1, 5)), (STATE, (0, 4)), (OTHER_STATE, (2,))]
    assert group_numbers(states) == (0, 1, 0, 0, 0, 1)
    assert group_numbers((OTHER_ROWS, ROWS)) == (0, 1)
    assert group_numbers((STATE, WINDOW)) == (0, 0)
