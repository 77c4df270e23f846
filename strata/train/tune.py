"""A run on tokenized data from its config: what it starts from, steps, log, checkpoints, the finished model."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import strata
from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.layers import CausalLM
from strata.models.save import save
from strata.models.tokenizer import Tokenizer
from strata.models.weights import load
from strata.train.checkpoint import (
    check_recipe,
    checkpoints_of,
    new_checkpoint,
    read_state,
    reading,
    remove_old,
    save_state,
)
from strata.train.data.loader import Loader, Place, Step, check_data
from strata.train.data.mixture import Mixture
from strata.train.data.shards import TokenDataset
from strata.train.device import training_device
from strata.train.dpo import DpoGradients, Reference, weights_digest
from strata.train.lora import add_lora, merge_lora, save_adapter
from strata.train.optim import Optimizer, masters_of
from strata.train.run_log import RunLog
from strata.train.schedule import learning_rate
from strata.train.sft import SftGradients
from strata.train.tune_config import TuneConfig

BUILTIN = "builtin"


@dataclass(frozen=True)
class TunePosition:
    """How far a run is. step: steps done. place: in the data. tokens: trained on."""

    step: int = 0
    place: Place = Place()  # noqa: RUF009, it is frozen
    tokens: int = 0


class Tuning:
    """The parts of one run, ready to step. Made fresh, or as the latest checkpoint left them."""

    def __init__(self, config: TuneConfig, *, resume: bool = False) -> None:
        """Raises ValueError, before anything is trained, for data that does not fit the model."""
        self.config = config
        self.folder = Path(config.run.out)
        existing = checkpoints_of(self.folder, resume=resume)
        self.device = training_device(config.run.device)
        self.base = base_folder(config.start.model)
        datasets = [TokenDataset(one.folder, skip_corrupt=config.data.skip_corrupt) for one in config.data.sources]
        self.model, self.model_config = self._start(datasets)
        self.model.to(self.device)
        mixture = Mixture(datasets, [one.weight for one in config.data.sources], config.run.seed)
        data = config.data
        self.loader = Loader(mixture, data.tokens_per_pack, data.packs_per_step, data.window)
        self.optimizer: Optimizer
        self._gradients: Callable[[Step], tuple[Tensor, dict[str, Tensor]]]
        self.folder.mkdir(parents=True, exist_ok=True)
        masters = None
        if self.device.type == "cuda":
            masters = None if config.lora else masters_of(self.model)
            self.model.to(torch.bfloat16)
        reference = self._reference(mixture)
        self.trained: nn.Module = self.model
        if config.lora is not None:
            self.trained = add_lora(self.model, config.lora, config.run.seed)
        self.optimizer = Optimizer(self.trained, config.optimizer, masters)
        if reference is not None and config.dpo is not None:
            self._gradients = DpoGradients(self.model, self.optimizer, reference, config.dpo)
        else:
            self._gradients = SftGradients(self.model, self.optimizer)
        self.recipe = self._recipe(datasets)
        self.position = TunePosition()
        if existing:
            self.position = self._load_checkpoint(existing[-1])

    def train(self, report: Callable[[dict[str, Any]], None] = lambda _: None) -> Path:
        """All steps that are left; returns the folder of the finished model. `report` receives each line of the log.

        Raises FloatingPointError when the loss stops being finite; the checkpoints before stay good.
        """
        run, schedule = self.config.run, self.config.schedule
        log = RunLog(self.folder / "log.jsonl", self.position.step)
        begin = time.perf_counter()
        while self.position.step < run.steps:
            at = self.position
            rate = learning_rate(
                at.step,
                peak=self.config.optimizer.learning_rate,
                steps=run.steps,
                warmup=schedule.warmup,
                decay=schedule.decay,
            )
            step = self.loader.step(at.place)
            loss, metrics = self._gradients(step)
            norm = self.optimizer.step(rate)
            tokens = at.tokens + sum(len(batch.tokens) for batch in step.batches)
            self.position = TunePosition(at.step + 1, step.next, tokens)
            done = self.position.step == run.steps
            if self.position.step % run.log_every == 0 or done:
                values = {
                    name: value.item() for name, value in {"loss": loss, "gradient_norm": norm, **metrics}.items()
                }
                if not all(map(math.isfinite, values.values())):
                    raise FloatingPointError(f"{values} at step {self.position.step}: not finite; lower the rate")
                line = {"step": self.position.step, **values, "learning_rate": rate, "tokens": tokens}
                line |= {"utilisation": round(step.utilisation, 4), "seconds": round(time.perf_counter() - begin, 2)}
                log.write(line)
                report(line)
            if self.position.step % run.checkpoint_every == 0 or done:
                self._save_checkpoint()
        return self._save_model()

    def _start(self, datasets: list[TokenDataset]) -> tuple[CausalLM, ModelConfig]:
        """The model in float32 on the CPU; the data is checked before its weights are read."""
        kind = "preference" if self.config.dpo else "text" if self.config.model else datasets[0].index.kind
        if kind == "preference" and not self.config.dpo:
            raise ValueError("the data holds preferences: add a [dpo] table, or use chats")
        with Tokenizer.load(self.base) as tokenizer:
            if self.config.model is not None:
                eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
                derived = {"vocab_size": tokenizer.vocab_size, "bos_token_id": tokenizer.bos_id, "eos_token_id": eos}
                if taken := sorted(self.config.model.keys() & derived.keys()):
                    raise ValueError(f"model.{taken[0]} follows from the tokenizer; remove it from the config")
                config = config_from_dict(self.config.model | derived, "model")
                check_data(datasets, kind, config, tokenizer)
                model = build(config)
                initialize(model, self.config.run.seed)
                return model, config
            check_data(datasets, kind, read_config(self.base), tokenizer)
        return load(self.base, "cpu", torch.float32)

    def _reference(self, mixture: Mixture) -> Reference | None:
        if self.config.dpo is None:
            return None
        cache = self.folder / "reference.safetensors"
        capacity = self.config.data.tokens_per_pack
        return Reference.computed(self.model, mixture, capacity, cache, weights_digest(self.base))

    def _recipe(self, datasets: list[TokenDataset]) -> dict[str, Any]:
        """What decides the numbers of a run; the length of a run and its intervals may change when it is resumed."""
        config = asdict(self.config)
        recipe = {
            "run": {"seed": self.config.run.seed, "device": self.device.type},
            **{name: config[name] or {} for name in ("start", "model", "data", "optimizer", "lora", "dpo")},
            "fingerprints": dict(enumerate(one.fingerprint for one in datasets)),
        }
        read: dict[str, Any] = json.loads(json.dumps(recipe))  # as a checkpoint gives it back
        return read

    def _save_checkpoint(self) -> None:
        folder = self.folder / "checkpoints"
        state = {"position": asdict(self.position), "recipe": self.recipe}
        with new_checkpoint(folder, self.position.step, state) as part:
            weights = {name: weight.detach().cpu() for name, weight in self.trained.named_parameters()}
            save_file(weights, part / "trained.safetensors")
            save_state(self.optimizer, part)
        remove_old(folder, self.config.run.keep_checkpoints)

    def _load_checkpoint(self, path: Path) -> TunePosition:
        with reading(path):
            values, saved, tensors = read_state(path)
            position = TunePosition(**values | {"place": Place(**values["place"])})
            weights = load_file(path / "trained.safetensors")
        check_recipe(path, saved, self.recipe)
        with torch.no_grad():
            for name, weight in self.trained.named_parameters():
                weight.copy_(weights[name])
        self.optimizer.load_state(tensors, position.step)
        return position

    def _save_model(self) -> Path:
        """The model in the dtype that it started in (bfloat16 if fresh); of a LoRA run merged, the adapter beside."""
        if self.config.lora is not None:
            save_adapter(self.model, self.config.lora, self.config.start.model, self.folder / "adapter")
            merge_lora(self.model)
        folder = self.folder / "model"
        dtype = torch.bfloat16 if self.config.model is not None else self.model_config.dtype or torch.float32
        save(self.model.to("cpu", dtype), self.model_config, folder, self.base)
        return folder


def override(config: TuneConfig, **values: Any) -> TuneConfig:
    """The config with those fields of [run] replaced that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **given))


def base_folder(name: str) -> Path:
    """The folder of a model, or that of the built-in one. Raises ValueError if there is none."""
    folder = Path(strata.__file__).parent / "models" / "builtin" if name == BUILTIN else Path(name)
    if not folder.is_dir():
        raise ValueError(f"model {name!r} is no folder; give a model folder or {BUILTIN!r}")
    return folder
