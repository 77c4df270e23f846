"""From a model to a checkpoint folder as Hugging Face lays it out, readable by transformers and by `load`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from strata.files.weight_index import INDEX, SINGLE
from strata.models.config import ModelConfig
from strata.models.joined import checkpoint_parameters, checkpoint_values

# What a checkpoint folder holds for the tokenizer, and the defaults of generation that go with it.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)

Item = TypeVar("Item")


class HasFolder(Protocol):
    """A tokenizer that knows the folder it was loaded from."""

    @property
    def folder(self) -> Path: ...


def save(
    model: nn.Module,
    config: ModelConfig,
    folder: str | Path,
    tokenizer: str | Path | HasFolder | None = None,
    *,
    values: Iterable[tuple[str, Tensor]] | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write config.json and the weights, under the checkpoint's names and in the dtype of the parameters.

    A tied head is not written. Weights of more than `max_shard_bytes` are split into shards with an index. Everything
    is first written beside `folder` and then renamed, so a new folder appears whole or not at all; in a folder that
    exists, each file is replaced at once and weights of an earlier save are removed. tokenizer: a tokenizer with the
    `folder` that it was loaded from, or such a folder; its files are copied. values: of a model on the meta device, by
    the names of its parameters and in their order, on any device: they are asked for shard by shard, so that what is
    held is a shard and a layer. Raises ValueError for a tokenizer without files, and for values that are not the next.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        written = Path(name) / folder.name
        written.mkdir()
        if tokenizer is not None:
            source = tokenizer if isinstance(tokenizer, str | Path) else tokenizer.folder
            copy_tokenizer(Path(source), written)
        parameters = checkpoint_parameters(model)
        made = parameters.items() if values is None else checkpoint_values(model, values)
        _write_weights(parameters, iter(made), written, max_shard_bytes)
        dtype = next(iter(parameters.values())).dtype
        write_json(written / "config.json", dataclasses.replace(config, dtype=dtype).to_dict())
        _publish(written, folder)


def _write_weights(
    parameters: dict[str, Tensor], values: Iterator[tuple[str, Tensor]], folder: Path, max_shard_bytes: int
) -> None:
    """parameters: what the values are to be, of which only names, sizes and dtypes are looked at."""
    shards = [dict(run) for run in runs(parameters.items(), lambda named: named[1].nbytes, max_shard_bytes)]
    if len(shards) == 1:
        write_shard(_take(shards[0], values), folder / SINGLE)
        _require_no_more(values)
        return
    homes: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(_take(shard, values), folder / file)
        homes |= dict.fromkeys(shard, file)
    _require_no_more(values)
    size = sum(parameter.nbytes for parameter in parameters.values())
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": homes})


def runs(items: Iterable[Item], size: Callable[[Item], int], most: int) -> list[list[Item]]:
    """The items in order, in runs whose sizes add up to `most` at most; a larger item stands alone."""
    found: list[list[Item]] = []
    filled = 0
    for item in items:
        if not found or filled + size(item) > most:
            found.append([])
            filled = 0
        found[-1].append(item)
        filled += size(item)
    return found


def _take(shard: dict[str, Tensor], values: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The next values, which must be those of a shard, in its dtypes."""
    taken = dict(itertools.islice(values, len(shard)))
    pairs = itertools.zip_longest(_shapes(shard), _shapes(taken), fillvalue="nothing")
    for wanted, came in pairs:
        if wanted != came:
            raise ValueError(
                f"{came} came where {wanted} is the model's next value; give all by name in the order of its parameters"
            )
    return {name: value.to(shard[name].dtype) for name, value in taken.items()}


def _shapes(values: dict[str, Tensor]) -> list[str]:
    return [f"{name} {list(value.shape)}" for name, value in values.items()]


def _require_no_more(values: Iterator[tuple[str, Tensor]]) -> None:
    if (more := next(values, None)) is not None:
        raise ValueError(f"{more[0]} came behind the model's last value; give as many as it has parameters")


def write_shard(parameters: dict[str, Tensor], file: Path) -> None:
    """Raises OSError, with the file, where it cannot be written."""
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in parameters.items()}
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from None
    file.chmod(mode)  # safetensors 0.8 makes files that their owner alone can read
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def copy_tokenizer(source: Path, folder: Path) -> None:
    """As `copy_companions`. Raises ValueError where there is no tokenizer."""
    if not (source / "tokenizer.json").is_file():
        raise ValueError(f"{source} has no tokenizer.json, so there is no tokenizer to save")
    copy_companions(source, folder)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the files of a checkpoint folder's tokenizer and of defaults of generation, as far as they are there."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _publish(written: Path, folder: Path) -> None:
    """Rename the finished folder into place, or its files into a folder that exists, config.json last."""
    if not folder.exists():
        written.rename(folder)
        return
    fresh = {file.name for file in written.iterdir()}
    for file in sorted(written.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, folder / file.name)
    for stale in (folder / SINGLE, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
        if stale.name not in fresh:
            stale.unlink(missing_ok=True)
