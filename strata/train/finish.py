"""The end of a run: its model as a folder that serves at once."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError

from strata.models.save import save
from strata.train.checkpoints.export import export
from strata.train.checkpoints.folder import newest, step_of
from strata.train.lora import merge_lora, save_adapter
from strata.train.steps.tune_step import TuneStep
from strata.train.trainer import Trainer


def save_model(run: Trainer) -> Path:
    """Write the model of a finished run as Hugging Face lays it out, and return its folder. One rank calls this.

    It has the dtype that the run started from, bfloat16 if fresh. A LoRA run leaves the merged model, and its adapter
    beside it in `adapter`. Raises ValueError if the last step has no checkpoint, of which the model is made otherwise,
    and if the model cannot be written.
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
    dtype = run.start.config.dtype or torch.float32
    if config.model is not None:
        dtype = torch.bfloat16
    if config.lora is not None:
        assert isinstance(run.stepper, TuneStep)
        model = run.stepper.model
        save_adapter(model, config.lora, str(config.start.model), run.folder / "adapter")
        merge_lora(model)
        save(model.to("cpu", dtype), run.start.config, folder, run.start.tokenizer)
        return
    newest_checkpoint = newest(run.folder / "checkpoints", run.warn)
    if newest_checkpoint is None or step_of(newest_checkpoint) != run.position.step:
        raise ValueError(
            f"the checkpoint of step {run.position.step} was not written, and the model is made of it; make room and "
            f"resume the run"
        )
    if config.balance is not None and config.balance.warning:
        run.warn(config.balance.warning)
    export(newest_checkpoint, run.start.config, run.start.tokenizer, folder, dtype)
