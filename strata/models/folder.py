"""Which model a name given by a user means: the built-in one, a folder, a download of huggingface.co, or a shape with
random weights.
"""

from __future__ import annotations

from pathlib import Path

from strata.files.hub_cache import check_weights, find_snapshot, is_hub_name, why_no_folder
from strata.models.shapes import SHAPES

BUILTIN = "builtin"
_ACCEPTED = "a model folder, org/model of the Hugging Face cache"
BUILTIN_FOLDER = Path(__file__).resolve().parent / BUILTIN


def model_folder(name: str | None) -> Path:
    """The folder of a model: of the built-in one for `BUILTIN` and None, of its download for a name such as org/model.

    Raises ValueError if there is no such folder, it has no config.json, or a download lacks weights.
    """
    if name in SHAPES and not Path(name).is_dir():
        raise ValueError(
            f"{name!r} is a shape, which has no weights and no tokenizer; give {_ACCEPTED}, or {BUILTIN!r}"
        )
    folder = existing_folder(BUILTIN if name is None else name)
    if name is not None and is_hub_name(name):
        check_weights(name, folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {name!r} has no config.json; give the folder that has one, or {BUILTIN!r}")
    return folder


def located(name: str | Path | None) -> str:
    """The folder that a name stands for, without a look into it; anything that stands for none as it is."""
    if name in (None, BUILTIN):
        return str(BUILTIN_FOLDER)
    return str(find_snapshot(name) if isinstance(name, str) and is_hub_name(name) else name)


def display_name(name: str | None, folder: str | Path) -> str:
    """What to call the model of a folder that was asked for by `name`: a download by its name, others by the folder."""
    return name if name is not None and is_hub_name(name) else Path(folder).resolve().name


def existing_folder(name: str, asked_as: str = "model folder") -> Path:
    """The folder of a model or of a tokenizer alone, as `located` finds it.

    asked_as: what the user knows the name as, for the ValueError if there is none.
    """
    folder = Path(located(name))
    if not folder.is_dir():
        raise ValueError(f"{why_no_folder(folder, asked_as)}; give {_ACCEPTED}, or {BUILTIN!r}")
    return folder


def folder_or_shape(name: str | None) -> str:
    """The folder of a model as `model_folder` finds it (of a download, the config alone is enough), or the name of a
    shape as it is.

    Raises ValueError for anything else.
    """
    if name in SHAPES:
        return name
    if name is not None and is_hub_name(name):
        return located(name)
    if name is None or name == BUILTIN or Path(name).is_dir():
        return str(model_folder(name))
    shapes = ", ".join(SHAPES)
    raise ValueError(f"{why_no_folder(Path(name))}; give {_ACCEPTED}, {BUILTIN!r}, or a shape ({shapes})")


def folder_shape_or_file(name: str) -> str:
    """As `folder_or_shape`, or the path of a file as it is, for what needs no more than a config.json."""
    return name if Path(name).is_file() else folder_or_shape(name)
