"""Names of huggingface.co: what is in its cache is found, what is not is told with the command that gets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.engine.engine_config import EngineConfig
from strata.files.hub_cache import cache_folder, is_hub_name
from strata.models.folder import display_name, folder_or_shape, model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "some-org/a.model-1B"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of NAME in an empty cache, which the environment names."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub" / "models--some-org--a.model-1B"


def download(kept: Path, *files: str, index: dict[str, str] | None = None) -> Path:
    """As hf download leaves it: files are links to blobs."""
    snapshot = kept / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT)
    (kept / "blobs").mkdir()
    contents = dict.fromkeys(files, "{}")
    if index is not None:
        contents["model.safetensors.index.json"] = json.dumps({"weight_map": index})
    for number, (file, text) in enumerate(contents.items()):
        (kept / "blobs" / str(number)).write_text(text)
        (snapshot / file).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def test_what_is_in_the_cache_is_found_under_its_name(kept: Path) -> None:
    snapshot = download(kept, "config.json", "model.safetensors")
    assert model_folder(NAME) == snapshot
    assert folder_or_shape(NAME) == str(snapshot)
    assert EngineConfig.from_options(NAME, {}).model == str(snapshot)
    assert display_name(NAME, snapshot) == NAME, "not the commit"


def test_huggingface_hub_finds_the_same(kept: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    snapshot = download(kept, "config.json", "model.safetensors")
    found = huggingface_hub.snapshot_download(NAME, cache_dir=kept.parent, local_files_only=True)
    assert Path(found) == snapshot


def test_what_is_not_there_is_told_with_the_command_that_gets_it(kept: Path) -> None:
    for find in (model_folder, folder_or_shape):
        with pytest.raises(ValueError, match=f"not in the Hugging Face cache.*`hf download {NAME}`.*'builtin'") as told:
            find(NAME)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("files", "index", "lacks"),
    [
        (["model.safetensors"], None, "no config.json"),
        (["config.json"], None, r"no weights \(safetensors\)"),
        (["config.json", "a.safetensors"], {"x": "a.safetensors", "y": "b.safetensors"}, "no b.safetensors"),
        (["config.json"], {"x": "a.safetensors", "y": "b.safetensors"}, "no a.safetensors and 1 more files"),
    ],
)
def test_half_a_download_is_told(kept: Path, files: list[str], index: dict[str, str] | None, lacks: str) -> None:
    download(kept, *files, index=index)
    with pytest.raises(ValueError, match=f"not whole: .*{lacks}; run `hf download {NAME}`"):
        model_folder(NAME)


def test_a_link_to_nothing_counts_as_missing(kept: Path) -> None:
    snapshot = download(kept, "config.json", "model.safetensors")
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(ValueError, match="no weights"):
        model_folder(NAME)


def test_a_download_that_had_only_begun_is_told(kept: Path) -> None:
    (kept / "blobs").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"not whole: .* has no revision main"):
        model_folder(NAME)


def test_the_config_alone_is_enough_for_what_needs_no_weights(kept: Path) -> None:
    snapshot = download(kept, "config.json")
    assert folder_or_shape(NAME) == str(snapshot)


def test_a_folder_of_that_name_comes_first(kept: Path, tmp_path: Path) -> None:
    download(kept, "config.json", "model.safetensors")
    own = tmp_path / NAME
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    assert model_folder(NAME) == Path(NAME)
    assert display_name(NAME, NAME) == "a.model-1B"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HF_HOME": "~/b"}, str(Path.home() / "b" / "hub")),
        ({}, str(Path.home() / ".cache" / "huggingface" / "hub")),
    ],
)
def test_the_cache_is_where_its_own_tools_look(environment: dict[str, str], folder: str) -> None:
    assert str(cache_folder(environment)) == folder


@pytest.mark.parametrize("name", ["/org/model", "./org/model", "org", "org/model/deeper", "../model", "org/mo del", ""])
def test_paths_are_no_names(name: str) -> None:
    assert not is_hub_name(name)
