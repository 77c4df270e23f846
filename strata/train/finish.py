"""The end of a run: its model as a folder that serves at once."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from strata.models.checkpoint import read_checkpoint
from strata.models.config import DTYPES, ModelConfig
from strata.models.experts import CORRECTION
from strata.models.families import build
from strata.models.quantized.checkpoint import quantized_format
from strata.models.save import save
from strata.models.weights import load
from strata.train.adapters.lora import LoraConfig, load_adapter, merge_lora, save_adapter
from strata.train.checkpoints.folder import newest, step_of, whole_checkpoints
from strata.train.checkpoints.reader import Reader
from strata.train.checkpoints.state import MASTER, state_of
from strata.train.trainer import Trainer


def save_model(run: Trainer) -> Path:
    """Write the model of a finished run as Hugging Face lays it out, and return its folder. One rank calls this.

    It is that of the step at which the run stands: the last, or the best of its validation.
    It has the dtype that the run started from, bfloat16 if fresh. A LoRA run leaves its adapter in `adapter`, and the
    weights that it started from, as they are stored, with that merged into them; of packed ones the floats that they
    stand for. Raises ValueError if that step has no checkpoint, and if the model cannot be written.
    """
    folder = run.folder / "model"
    try:
        _write_model(run, folder)
    except (OSError, SafetensorError) as error:
        last = newest(run.folder / "checkpoints", run.warn)
        raise ValueError(
            f"the model could not be written to {folder}: {error}; the steps up to {step_of(last) if last else 0} are "
            f"in a checkpoint: make room, and --resume goes on from there and writes the model"
        ) from None
    return folder


def _write_model(run: Trainer, folder: Path) -> None:
    config = run.config
    whole = whole_checkpoints(run.folder / "checkpoints", run.warn)
    checkpoint = next((one for one in whole if step_of(one) == run.position.step), None)
    if checkpoint is None:
        raise ValueError(
            f"the checkpoint of step {run.position.step} was not written, and the model is made of it; make room and "
            f"resume the run"
        )
    if config.lora is not None:
        _write_merged(run, config.lora, checkpoint, folder)
        return
    if config.balance is not None and (about_bias := config.balance.warning(run.start.config)):
        run.warn(about_bias)
    weights = run.start.weights
    dtype = torch.bfloat16 if weights is None else _stored_dtype(weights)
    export(checkpoint, run.start.config, run.start.tokenizer, folder, dtype)


def _write_merged(run: Trainer, lora: LoraConfig, checkpoint: Path, folder: Path) -> None:
    """Adapter and merged model. The base is read again: what the run computes with may be rounded or packed."""
    assert run.start.weights is not None
    adapter = run.folder / "adapter"
    save_adapter(trained_values(checkpoint), lora, str(run.config.start.model), adapter)
    model, _ = load(run.start.weights, "cpu", _stored_dtype(run.start.weights))
    load_adapter(model, adapter)
    merge_lora(model)
    save(model, run.start.config, folder, run.start.tokenizer)


def _stored_dtype(weights: Path) -> torch.dtype:
    """The one dtype that holds every tensor of a checkpoint that is not packed, of those that a model may have; biases
    of routers are float32 in any."""
    format = quantized_format(weights)
    left_out = frozenset() if format is None else format.claimed
    tensors = read_checkpoint(weights, packed=format is not None).items()
    dtypes = (one.dtype for name, one in tensors if name not in left_out and not name.endswith(CORRECTION))
    widest = functools.reduce(torch.promote_types, dtypes)
    return widest if widest in DTYPES.values() else torch.float32


@torch.no_grad()
def export(path: Path, config: ModelConfig, tokenizer: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the masters of the checkpoint `path`, rounded to `dtype`, to the folder `out`; see `save`.

    tokenizer: a folder with its files. Holds a shard of the new files in host memory, and of the masters what is being
    read. Raises ValueError if the checkpoint is corrupt or of another model than `config`.
    """
    with torch.device("meta"):
        model = build(config)
    with Reader(path) as reader:
        wanted = dict(model.to(dtype).named_parameters())
        for name, parameter in wanted.items():
            reader.check(*state_of(name), tuple(parameter.shape))
        stored_names = {shard.name for shard in reader.index.shards if shard.kind == MASTER}
        if unknown := sorted(stored_names - wanted.keys()):
            raise ValueError(f"checkpoint {path} has {unknown[0]}, which this model has not; it is of another model")
        values = ((name, reader.whole(*state_of(name), one.dtype)) for name, one in wanted.items())
        save(model, config, out, tokenizer, values=values)


def trained_values(path: Path) -> dict[str, Tensor]:
    """Everything that the checkpoint `path` has masters of, by name, whole, in float32 on the CPU. Raises ValueError if
    it is corrupt.
    """
    with Reader(path) as reader:
        names = dict.fromkeys(shard.name for shard in reader.index.shards if shard.kind == MASTER)
        return {name: reader.whole(MASTER, name) for name in names}
