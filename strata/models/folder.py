"""Which model a name given by a user means: the built-in one, a folder, or a shape with random weights."""

from __future__ import annotations

from pathlib import Path

from strata.models.shapes import SHAPES

BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).resolve().parent / BUILTIN


def model_folder(name: str | None) -> Path:
    """The folder of a model; of the built-in one for `BUILTIN` and None.

    Raises ValueError if there is no such folder or it has no config.json.
    """
    if name in SHAPES and not Path(name).is_dir():
        raise ValueError(
            f"{name!r} is a shape, which has no weights and no tokenizer; give a model folder or {BUILTIN!r}"
        )
    folder = existing_folder(BUILTIN if name is None else name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {name!r} has no config.json; give the folder that has one, or {BUILTIN!r}")
    return folder


def existing_folder(name: str, asked_as: str = "model folder") -> Path:
    """The folder of a model or of a tokenizer alone; of the built-in model for `BUILTIN`.

    asked_as: what the user knows the name as, for the ValueError if there is none.
    """
    folder = BUILTIN_FOLDER if name == BUILTIN else Path(name)
    if not folder.is_dir():
        raise ValueError(f"{why_no_folder(folder, asked_as)}; give a model folder or {BUILTIN!r}")
    return folder


def folder_or_shape(name: str | None) -> str:
    """The folder of a model as `model_folder` finds it, or the name of a shape as it is.

    Raises ValueError for anything else.
    """
    if name in SHAPES:
        return name
    if name is None or name == BUILTIN or Path(name).is_dir():
        return str(model_folder(name))
    shapes = ", ".join(SHAPES)
    raise ValueError(f"{why_no_folder(Path(name))}; give a model folder, {BUILTIN!r}, or a shape ({shapes})")


def folder_shape_or_file(name: str) -> str:
    """As `folder_or_shape`, or the path of a file as it is, for what needs no more than a config.json."""
    return name if Path(name).is_file() else folder_or_shape(name)


def why_no_folder(folder: Path, asked_as: str = "model folder") -> str:
    """For a path that is no folder: whether something else stands there."""
    return f"{asked_as} {str(folder)!r} " + ("is a file" if folder.exists() else "does not exist")
