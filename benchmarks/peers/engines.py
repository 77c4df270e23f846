"""What the comparisons share: the engines' set-up, whose turn it is, the model, the results file."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import string
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strata.bench.workloads import MAX_MODEL_LEN
from strata.hardware.machine import cpu_name
from strata.models.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("strata", "vllm")
NAMES = {"strata": "Strata", "vllm": "vLLM"}

# Both engines' `LLM` and both servers have these options, under these names. The prefix cache is said where it is used.
SETUP: dict[str, str | int | float] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": MAX_MODEL_LEN,
    "gpu_memory_utilization": 0.9,
}
# Nothing is downloaded, nothing reported.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison in turns."""
    for engine in ENGINES:
        parser.add_argument(
            f"--{engine}-python",
            type=interpreter,
            metavar="FILE",
            help=f"the Python that {NAMES[engine]} is installed for",
        )
    parser.add_argument("--models", type=shapes, default=["0.6B", "8B"], help="shapes between commas [0.6B,8B]")
    parser.add_argument("--turns", type=count, default=3, help="of each engine; the first one alternates [3]")
    add_ranks(parser)
    add_save(parser)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensor-parallel-size", type=count, default=1, help="GPUs that share the model [1]")


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        type=model_folder,
        metavar="FOLDER",
        help="what both engines load, written by benchmarks.peers.weights [each draws its own]",
    )


def model_folder(text: str) -> Path:
    """The absolute path of a folder with a config.json."""
    folder = Path(text).absolute()
    if not (folder / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} is no folder with a config.json: give one that benchmarks.peers.weights has written"
        )
    return folder


def refuse_other_weights(parser: argparse.ArgumentParser, folder: Path | None, models: Iterable[str]) -> None:
    """Results are of shapes, so a folder must be of the one shape that is asked for."""
    if folder is None:
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--weights {folder}: its config.json cannot be read: {error}")
    for model in models:
        if config != SHAPES[model]:
            parser.error(
                f"--weights {folder}: its config.json is not that of {model}; ask for the one model that the folder is "
                f"of, or write another: python -m benchmarks.peers.weights --model {model} --out FOLDER"
            )


def how_loaded(folder: Path | None) -> dict[str, str]:
    """What differs from `SETUP` where the engines load a folder's weights."""
    return {} if folder is None else {"load_format": "auto"}


def whose_weights(folder: Path | None) -> str:
    """What a line says of them: "random" ones of each engine, or "saved" ones, the same in both."""
    return "random" if folder is None else "saved"


def add_save(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save", type=results_file, required=True, metavar="FILE", help="append results here, one a line"
    )


def count(text: str) -> int:
    """How often something is done."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"give a whole number from 1 on, not {text}")
    return int(text)


def seconds(text: str) -> float:
    """How long to wait for something."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise argparse.ArgumentTypeError(f"give seconds over 0, not {text}")
    return found


def results_file(text: str) -> Path:
    """The absolute path of a file that lines can be appended to, which is seen before anything is measured."""
    file = Path(text).absolute()
    try:
        file.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return file


def interpreter(text: str) -> str:
    """The path of a Python, absolute but with its links, which a virtual environment is found by."""
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be run: give the path of a Python (benchmarks/peers/README.md)"
        )
    return os.path.abspath(found)


def some_of(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """What reads names of something from an option such as "0.6B,8B"."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no {what}: give some of {', '.join(known)}")
        return names

    return read


shapes = some_of(SHAPES, "shape")


def require_pythons(parser: argparse.ArgumentParser, asked: argparse.Namespace, wanted: Iterable[str]) -> None:
    """Ends the program unless the Python of each of these engines was given."""
    missing = [f"--{engine}-python" for engine in wanted if getattr(asked, f"{engine}_python") is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")


def pythons(asked: argparse.Namespace) -> dict[str, str]:
    """The Python of each engine."""
    return {engine: getattr(asked, f"{engine}_python") for engine in ENGINES}


def order(turn: int) -> tuple[str, ...]:
    """The engines in the order of a turn: each goes first in every other one."""
    return ENGINES if turn % 2 == 0 else ENGINES[::-1]


def now() -> str:
    """What tells one run from another in a results file."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Add a line of JSON, at once: a run that is cut short keeps what it has measured."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")


def device_name() -> str:
    """The first GPU as its driver names it, or the processor; asked without using the GPU."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return cpu_name()
    return done.stdout.strip().partition("\n")[0] or cpu_name()


def write_config(folder: Path, shape: str) -> None:
    """All that an engine needs of a model whose weights are random and whose prompts are ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))


def write_model(folder: Path, shape: str) -> Path:
    """The folder of a model to be served: its config, and a tokenizer as large as its vocabulary.

    The tokenizer's entries are all words of up to three letters, then numbers; longer words are cut into threes. So
    every id has a text, and as many ids stream as many pieces of text.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    write_config(folder, shape)
    letters = string.ascii_lowercase
    words = ("".join(word) for size in (1, 2, 3) for word in itertools.product(letters, repeat=size))
    entries = itertools.islice(itertools.chain(words, map(str, itertools.count())), SHAPES[shape]["vocab_size"])
    made = Tokenizer(models.WordLevel({entry: id for id, entry in enumerate(entries)}, unk_token="a"))
    threes = pre_tokenizers.Split(Regex("[^ ]{1,3}"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), threes])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
