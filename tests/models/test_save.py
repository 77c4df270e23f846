"""Saving in the layout of Hugging Face, whole or not at all; and loading the part of a model that a rank has."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strata.models import save as module
from strata.models import sources, weights
from strata.models.config import ModelConfig
from strata.models.experts import stored_parameters
from strata.models.families import build
from strata.models.joined import checkpoint_parameters
from strata.models.quantized import checkpoint
from strata.models.save import save
from strata.models.state import PagedRows, RecurrentState, WindowRows, group_numbers, state_groups
from strata.models.weights import load
from strata.parallel.serving_shard import RankShard
from tests.parallel.models import random_model
from tests.parallel.shards import FAMILIES, RANKS, divisible_config

from .conftest import Checkpoint


@pytest.fixture
def tied(open_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return open_checkpoint("qwen2-tied")


def test_layout_of_one_file(tied: Checkpoint, tmp_path: Path) -> None:
    save(tied.model, tied.config, tmp_path / "a" / "b")
    assert {file.name for file in (tmp_path / "a" / "b").iterdir()} == {"config.json", "model.safetensors"}
    assert {file.name for file in (tmp_path / "a").iterdir()} == {"b"}
    with safe_open(tmp_path / "a" / "b" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
    assert names == set(load_file(tied.folder / "model.safetensors"))
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("most", [1, 5_000, 30_000])
def test_layout_of_shards(tied: Checkpoint, tmp_path: Path, most: int) -> None:
    save(tied.model, tied.config, tmp_path / "model", max_shard_bytes=most)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    sizes = {name: parameter.numel() * 4 for name, parameter in tied.model.named_parameters()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    homes = index["weight_map"]
    assert homes.keys() == sizes.keys()
    shards = {home: [name for name in homes if homes[name] == home] for home in homes.values()}
    assert {file.name for file in (tmp_path / "model").glob("*.safetensors")} == set(shards)
    for home, names in shards.items():
        assert set(load_file(tmp_path / "model" / home)) == set(names)
        assert len(names) == 1 or sum(sizes[name] for name in names) <= most


def test_parameters_that_are_views_of_one_storage(tied: Checkpoint, tmp_path: Path) -> None:
    model, config = load(tied.folder)
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    merged = torch.cat([part.weight.detach() for part in parts])
    for part, rows in zip(parts, merged.split([part.weight.shape[0] for part in parts]), strict=True):
        part.weight = nn.Parameter(rows)
    # A transposed view is not contiguous.
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(
        model.model.layers[1].mlp.up_proj.weight.detach().T.clone().T
    )
    save(model, config, tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(stored[name], parameter) for name, parameter in tied.model.named_parameters())
    assert (tmp_path / "merged" / "model.safetensors").stat().st_size < 1.1 * (
        tied.folder / "model.safetensors"
    ).stat().st_size


@pytest.mark.parametrize("name", ["qwen2-tied", "phi3-partial-window", "gpt-oss-yarn", "glm4-moe-groups"])
def test_values_are_asked_for_shard_by_shard(
    name: str, open_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of families that join and split: the same files as of the model itself, from values that come one by one."""
    opened = open_checkpoint(name)
    sizes = {name: parameter.nbytes for name, parameter in opened.model.named_parameters()}
    layer = max(
        sum(size for name, size in sizes.items() if name.startswith(f"model.layers.{number}."))
        for number in range(len(opened.model.model.layers))
    )
    most = max(one.nbytes for one in checkpoint_parameters(opened.model).values())
    asked, written, held = 0, 0, []

    def values() -> Iterator[tuple[str, Tensor]]:
        nonlocal asked
        for name, parameter in opened.model.named_parameters():
            asked += parameter.nbytes
            held.append(asked - written)
            yield name, parameter.detach().double()  # becomes what the model's parameter is

    def write(tensors: dict[str, Tensor], file: Path) -> None:
        nonlocal written
        whole(tensors, file)
        written += sum(one.nbytes for one in tensors.values())

    whole = module.write_shard
    with torch.device("meta"):
        model = build(opened.config)
    monkeypatch.setattr(module, "write_shard", write)
    save(model, opened.config, tmp_path / "streamed", values=values(), max_shard_bytes=most)
    monkeypatch.undo()
    save(opened.model, opened.config, tmp_path / "whole", max_shard_bytes=most)
    files = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert len(files) > 3
    assert {file.name: file.read_bytes() for file in (tmp_path / "streamed").iterdir()} == files
    assert max(held) <= most + layer + max(sizes.values())
    assert asked == written == sum(sizes.values())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("left out", r"nothing came where model\.norm\.weight \[\d+\]"),
        ("turned round", r"model\.norm\.weight \[\d+\] came where model\.embed_tokens\.weight"),
        ("of another shape", r"model\.embed_tokens\.weight \[\d+, \d+\] came where model\.embed_tokens\.weight"),
        ("too many", "model.more came behind the model's last value"),
    ],
)
def test_values_of_other_parameters_are_refused(tied: Checkpoint, tmp_path: Path, change: str, told: str) -> None:
    values = [(name, parameter.detach()) for name, parameter in tied.model.named_parameters()]
    if change == "left out":
        del values[-1]
    elif change == "turned round":
        values.reverse()
    elif change == "too many":
        values.append(("model.more", values[-1][1]))
    else:
        values[0] = (values[0][0], values[0][1][1:])
    with pytest.raises(ValueError, match=told):
        save(tied.model, tied.config, tmp_path / "model", values=values)
    assert list(tmp_path.iterdir()) == []


def test_config_says_the_dtype_of_the_weights(tied: Checkpoint, tmp_path: Path) -> None:
    model, config = load(tied.folder, dtype="bfloat16")
    assert config.dtype == torch.float32
    save(model, config, tmp_path / "half")
    assert load(tmp_path / "half")[1].dtype == torch.bfloat16
    assert next(load(tmp_path / "half")[0].parameters()).dtype == torch.bfloat16


def test_saving_again_leaves_no_weights_of_before(tied: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(tied.model, tied.config, folder)
    (folder / "README.md").write_text("mine")
    save(tied.model, tied.config, folder, max_shard_bytes=5_000)
    assert not (folder / "model.safetensors").exists()
    save(tied.model, tied.config, folder, max_shard_bytes=30_000)
    shards = {file.name for file in folder.glob("*.safetensors")}
    assert shards == set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    save(tied.model, tied.config, folder)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    load(folder)


def test_a_failure_leaves_what_was_there(tied: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tied.model, tied.config, tmp_path / "old")
    before = (tmp_path / "old" / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "save_file", full)
    for name in ("old", "new"):
        with pytest.raises(OSError, match="no space"):
            save(tied.model, tied.config, tmp_path / name)
    assert (tmp_path / "old" / "model.safetensors").read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"old"}


def test_weights_are_for_all_to_read_whom_the_config_is_for(tied: Checkpoint, tmp_path: Path) -> None:
    save(tied.model, tied.config, tmp_path / "model")
    modes = {(tmp_path / "model" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_a_full_disk_is_told_of_the_file(tmp_path: Path) -> None:
    """A limit of a file's size is refused by the system in the place of a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            module.write_shard({"a": torch.ones(1000)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path / "a.safetensors"))


def test_tokenizer_files_are_copied(tied: Checkpoint, tmp_path: Path) -> None:
    class Loaded:
        folder = tmp_path / "tokenizer"

    Loaded.folder.mkdir()
    with pytest.raises(ValueError, match=r"tokenizer has no tokenizer\.json"):
        save(tied.model, tied.config, tmp_path / "model", Loaded())
    assert not (tmp_path / "model").exists()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        (Loaded.folder / name).write_text(name)
    for tokenizer in (Loaded(), Loaded.folder, str(Loaded.folder)):
        save(tied.model, tied.config, tmp_path / "model", tokenizer)
        assert (tmp_path / "model" / "tokenizer.json").read_text() == "tokenizer.json"
        assert (tmp_path / "model" / "chat_template.jinja").exists()
        assert load(tmp_path / "model")


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
STATE, OTHER_STATE = RecurrentState(((4, 16),), (torch.float32,)), RecurrentState(((3,), (5, 7)), (torch.float32, None))


def test_fixed_states_come_last_and_their_layers_are_given_the_batch_itself() -> None:
    states = (STATE, WINDOW, OTHER_STATE, ROWS, STATE, WINDOW)
    groups = [(group.state, group.layers) for group in state_groups(states)]
    assert groups == [(ROWS, (3,)), (WINDOW, (1, 5)), (STATE, (0, 4)), (OTHER_STATE, (2,))]
    assert group_numbers(states) == (0, 1, 0, 0, 0, 1)
    assert group_numbers((OTHER_ROWS, ROWS)) == (0, 1)
    assert group_numbers((STATE, WINDOW)) == (0, 0)
