"""The encoded mixture on disk: shard k holds a fixed range of documents, so any process can write or read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from strata.train.data.encoding import Encoded
from strata.train.encode import Encoder
from strata.train.tasks.mixture import document


class Shards:
    """The shards of one seed and tokenizer in a folder.

    A shard that is missing is written when it is asked for, unless a worker is about to write it. Use as a context
    manager: leaving it ends the workers.
    """

    def __init__(self, folder: Path, tokenizer: Path, seed: int, documents: int) -> None:
        """tokenizer: the tokenizer.json. documents: per shard."""
        self.folder, self.tokenizer, self.seed, self.documents = folder, tokenizer, seed, documents
        self._encoder = Encoder(tokenizers.Tokenizer.from_file(str(tokenizer)))
        self._workers: list[subprocess.Popen[bytes]] = []
        self._promised = 0
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, index: int) -> Path:
        return self.folder / f"shard-{index:05}.safetensors"

    def start_workers(self, workers: int, first: int, last: int) -> None:
        """Write shards `first` to `last` - 1 in `workers` processes, each every workers-th one, in order."""
        for worker in range(min(workers, last - first)):
            job = {
                "folder": str(self.folder),
                "tokenizer": str(self.tokenizer),
                "seed": self.seed,
                "documents": self.documents,
                "shards": list(range(first + worker, last, workers)),
            }
            # One thread a process, and no GPU: the workers share the host with the training loop.
            environment = os.environ | {
                "TOKENIZERS_PARALLELISM": "false",
                "RAYON_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            command = [sys.executable, "-m", "strata.train.shards", json.dumps(job)]
            self._workers.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        self._promised = last if self._workers else 0

    def write(self, index: int) -> None:
        """Encode the documents of a shard and put its file in place at once."""
        first = index * self.documents
        encoded = self._encoder.encode([document(self.seed, i) for i in range(first, first + self.documents)])
        part = self.folder / f".shard-{index:05}.{os.getpid()}.part"
        arrays: dict[str, NDArray[Any]] = {
            "tokens": encoded.tokens,
            "wanted": encoded.wanted.view(np.uint8),
            "offsets": encoded.offsets,
        }
        save_file(arrays, part)
        os.replace(part, self.path(index))

    def read(self, index: int) -> Encoded:
        """The documents of a shard. Raises RuntimeError if a worker failed."""
        while not self.path(index).exists():
            if index >= self._promised:
                self.write(index)
            elif any(worker.poll() not in (None, 0) for worker in self._workers):
                raise RuntimeError("a process that writes training data failed; its error stands above")
            elif all(worker.poll() == 0 for worker in self._workers) and not self.path(index).exists():
                self.write(index)
            else:
                time.sleep(0.02)
        with safe_open(self.path(index), framework="np") as file:
            wanted = file.get_tensor("wanted").view(np.bool_)
            return Encoded(file.get_tensor("tokens"), wanted, file.get_tensor("offsets"))

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait()
        self._workers.clear()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_job(job: str) -> None:
    """What a worker process does: write the missing ones of a list of shards (JSON, see `Shards.start_workers`)."""
    values = json.loads(job)
    shards = Shards(Path(values["folder"]), Path(values["tokenizer"]), values["seed"], values["documents"])
    for index in values["shards"]:
        if not shards.path(index).exists():
            shards.write(index)


if __name__ == "__main__":
    write_job(sys.argv[1])
