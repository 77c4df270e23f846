"""What the name of a model means, and what is said when it means nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata.models.folder import BUILTIN, BUILTIN_FOLDER, folder_or_shape, model_folder
from strata.models.weights import resolve
from strata.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", [None, BUILTIN])
def test_the_built_in_model_has_a_name(name: str | None) -> None:
    assert model_folder(name) == BUILTIN_FOLDER
    assert folder_or_shape(name) == str(BUILTIN_FOLDER)
    assert (BUILTIN_FOLDER / "config.json").is_file()


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path
    assert folder_or_shape(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("find", [model_folder, folder_or_shape])
def test_what_is_wrong_with_a_folder_is_told(find: Callable[[str], object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model folder '/nowhere/model' does not exist; give .*'builtin'"):
        find("/nowhere/model")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file' is a file; give a model folder"):
        find(str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find(str(tmp_path))


def test_a_shape_is_no_folder() -> None:
    assert folder_or_shape("8B") == "8B"
    with pytest.raises(ValueError, match="'8B' is a shape, which has no weights and no tokenizer"):
        model_folder("8B")


def test_the_loaders_name_the_folder_and_not_a_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for load in (resolve, Tokenizer.load):
        with pytest.raises(ValueError, match="model folder '/nowhere/model' does not exist; give"):
            load("/nowhere/model")
        with pytest.raises(ValueError, match="file' is a file; give"):
            load(tmp_path / "file")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: save"):
        Tokenizer.load(tmp_path)
