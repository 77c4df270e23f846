"""Saving: the layout of Hugging Face, whole or not at all."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from strata.models import save as module
from strata.models.families import build
from strata.models.joined import checkpoint_parameters
from strata.models.save import save
from strata.models.weights import load

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
