"""Loading: bad checkpoints are refused from their headers, good ones stream into place."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strata.models import memory, sources
from strata.models.checkpoint import read_header
from strata.models.config import config_from_dict
from strata.models.save import save
from strata.models.weights import load, resolve, resolve_dtype

from .checkpoints import FAMILY_CONFIGS, make_checkpoint

CONFIGS = dict(FAMILY_CONFIGS)
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied Llama checkpoint with biases, free to be damaged."""
    return make_checkpoint(tmp_path / "model", CONFIGS["llama-biases-linear-tied"])


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def write_raw(file: Path, header: Any, data_bytes: int = 0) -> None:
    """A safetensors file with this header and so many (sparse) bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with file.open("r+b") as stream:
        stream.truncate(8 + len(text) + data_bytes)


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load(folder, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("piece_bytes", [1, 100, 4096])
def test_pieces_make_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(sources, "_PIECE_BYTES", piece_bytes)
    model, _ = load(folder, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].bfloat16()), name


def test_a_missing_shard(folder: Path, tmp_path: Path) -> None:
    save(*load(folder), tmp_path / "sharded", max_shard_bytes=10_000)
    next((tmp_path / "sharded").glob("model-00002-*")).unlink()
    refused(tmp_path / "sharded", r"model-00002-of-\d+\.safetensors does not exist")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: index.pop("weight_map"), "not an index with a weight_map"),
        (lambda index: index.update(weight_map={}), "lists no tensor"),
        (lambda index: index["weight_map"].pop(NORM), f"does not list.*{NORM}"),
        (lambda index: index["weight_map"].update(more="model-00001-of-00008.safetensors"), "do not hold: more"),
        (lambda index: index["weight_map"].update({NORM: "../outside.safetensors"}), "not a file of the same folder"),
        (lambda index: index["weight_map"].update({NORM: 3}), "not a file of the same folder"),
    ],
)
def test_a_damaged_index(folder: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    save(*load(folder), tmp_path / "sharded", max_shard_bytes=20_000)
    path = tmp_path / "sharded" / "model.safetensors.index.json"
    index = json.loads(path.read_text().replace("-of-00005", "-of-00008"))
    for file in (tmp_path / "sharded").glob("model-*-of-*"):
        file.rename(file.with_name(file.name[:11] + "-of-00008.safetensors"))
    index["weight_map"] = {name: f"{home[:11]}-of-00008.safetensors" for name, home in index["weight_map"].items()}
    damage(index)
    path.write_text(json.dumps(index))
    refused(tmp_path / "sharded", message)


def rewriting(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    return lambda folder: rewrite(folder, change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"neither model\.safetensors nor model\.safetensors\.index\.json",
        ),
        (
            lambda folder: (folder / "model.safetensors").open("ab").write(b"more"),
            r"model\.safetensors is truncated or corrupt",
        ),
        (lambda folder: write_raw(folder / "model.safetensors", {}), "lacks tensors.*model.embed_tokens.weight"),
        (
            rewriting(lambda tensors: [tensors.pop(NORM), tensors.pop("model.layers.1.mlp.up_proj.bias")]),
            r"lacks tensors.*model\.layers\.1\.mlp\.up_proj\.bias, model\.norm\.weight$",
        ),
        (
            rewriting(lambda tensors: tensors.update({"model.layers.2.self_attn.q_proj.weight": torch.ones(40, 40)})),
            r"does not call for: model\.layers\.2\.self_attn\.q_proj\.weight",
        ),
        (rewriting(lambda tensors: tensors.update({NORM: torch.ones(41)})), rf"{NORM} is \[41\], expected \[40\]"),
    ],
)
def test_a_damaged_folder(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    refused(folder, message)


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1, -4])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, r"model\.safetensors is truncated or corrupt.*copy it again")


F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "truncated or corrupt"),
        (b'{"\xff": 1}', "truncated or corrupt"),
        ([], "truncated or corrupt"),
        ({"__metadata__": {"format": 1}}, "truncated or corrupt"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "truncated or corrupt"),
        ({"a": F32 | {"shape": [-2, -3]}}, "truncated or corrupt"),
        ({"a": F32 | {"shape": [2, 4]}}, "truncated or corrupt"),
        ({"a": F32 | {"dtype": "F8_E4M3", "shape": [24]}}, "a has dtype F8_E4M3; supported are F64, F32, BF16, F16"),
        ({"a": F32 | {"dtype": ["F32"]}}, "truncated or corrupt"),
        ({"a": F32, "b": F32 | {"data_offsets": [12, 36]}}, "truncated or corrupt"),
        ({"a": F32, "b": F32 | {"data_offsets": [48, 72]}}, "truncated or corrupt"),
        ({"a": F32, "b": F32 | {"data_offsets": [24, 48]}}, "truncated or corrupt"),
    ],
)
def test_a_corrupt_header(tmp_path: Path, header: Any, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, 24)
    with pytest.raises(ValueError, match=message):
        read_header(tmp_path / "model.safetensors")


def test_a_large_file_is_refused_from_its_header(tmp_path: Path) -> None:
    """64 GiB (sparse), of which the header alone may be read."""
    values = CONFIGS["llama-biases-linear-tied"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    size = 2**36
    entry = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
    write_raw(tmp_path / "model.safetensors", {"model.embed_tokens.weight": entry}, size)
    refused(tmp_path, "lacks tensors.*model.layers.0.*and 28 more")


def test_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    before, _ = load(folder)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}))
    after, _ = load(folder)
    assert torch.equal(after.model.rotary.table, before.model.rotary.table)


def test_a_tied_head_that_is_stored(folder: Path) -> None:
    embedding = "model.embed_tokens.weight"
    before, _ = load(folder)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    assert torch.equal(load(folder)[0].model.embed_tokens.weight, before.model.embed_tokens.weight)
    rewrite(folder, lambda tensors: tensors.pop(embedding))
    assert torch.equal(load(folder)[0].model.embed_tokens.weight, before.model.embed_tokens.weight)
    rewrite(folder, lambda tensors: tensors.update({embedding: tensors["lm_head.weight"] + 1}))
    refused(folder, "ties lm_head.weight to model.embed_tokens.weight, but they differ")


def test_an_untied_head_must_be_stored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["llama-llama3"])
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, "lacks tensors.*lm_head.weight")


def test_too_large_for_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = 3 * 128 * 10 * 4  # rotations of three times max_position_embeddings, as linear scaling has it
    needed = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values()) * 2 + table
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed)
    load(folder, dtype="bfloat16")
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)
    refused(folder, r"needs 0\.00 GiB as bfloat16, and cpu has 0\.00 GiB free; free memory", dtype="bfloat16")


def test_free_memory_of_the_host() -> None:
    free = memory.free_bytes(torch.device("cpu"))
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert free is not None
    assert 0 < free <= total


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-biases-window"]))
    one, config = load(tmp_path, load_format="dummy", seed=3)
    two, _ = load(tmp_path, load_format="dummy", seed=3)
    other, _ = load(tmp_path, load_format="dummy", seed=4)
    assert config == config_from_dict(CONFIGS["qwen3-biases-window"])
    for (name, first), second, third in zip(one.named_parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)
        if first.dim() == 2:
            assert first.std().item() == pytest.approx(0.02, rel=0.2), name
            assert not torch.equal(first, third)


def test_shapes_by_name() -> None:
    config, folder = resolve("0.6B", "dummy")
    assert folder is None
    assert (config.hidden_size, config.num_layers, config.tied) == (1024, 28, True)
    with pytest.raises(ValueError, match="'8B' has no weights; use load_format='dummy'"):
        resolve("8B")
    with pytest.raises(ValueError, match=r"model folder '9B' does not exist.*'8B'"):
        resolve("9B", "dummy")
    with pytest.raises(ValueError, match="load_format = 'pt' is not supported"):
        resolve("8B", "pt")


def test_dtypes(folder: Path) -> None:
    config, _ = resolve(folder)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert config.dtype == torch.float32  # config.json is silent, the weights are not
    assert resolve_dtype("auto", config, cpu) == torch.float32
    assert resolve_dtype("auto", config, cuda) == torch.bfloat16
    half = config_from_dict(CONFIGS["llama-dynamic"] | {"dtype": "float16"})
    assert resolve_dtype("auto", half, cpu) == resolve_dtype("auto", half, cuda) == torch.float16
    assert resolve_dtype("float32", half, cuda) == resolve_dtype(torch.float32, half, cuda) == torch.float32
    for wrong in ("int8", torch.int8, "torch.float32"):
        with pytest.raises(ValueError, match="is not supported; accepted are 'auto', 'float32'"):
            resolve_dtype(wrong, config, cpu)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drop", r"lacks tensors that its config.json calls for: model\.layers\.0\.self_attn\.qkv_proj\.weight$"),
        ("cut", r"qkv_proj\.weight is \[71, 56\], expected \[72, 56\]"),
        ("apart", r"does not call for: model\.layers\.0\.self_attn\.k_proj\.weight$"),
    ],
)
def test_joined_matrices_must_be_whole(tmp_path: Path, change: str, message: str) -> None:
    folder = make_checkpoint(tmp_path / "model", CONFIGS["phi3-partial-window"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    if change == "drop":
        del tensors[name]
    elif change == "cut":
        tensors[name] = tensors[name][1:].contiguous()
    else:
        tensors[name.replace("qkv", "k")] = tensors[name][:8].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(folder)
