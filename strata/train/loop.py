"""A training run from its config: tokenizer, data, steps, log, checkpoints."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.layers import CausalLM
from strata.models.save import save
from strata.train.checkpoint import Position, checkpoints_of, load_checkpoint, remove_old, save_checkpoint
from strata.train.config import TrainConfig
from strata.train.device import training_device
from strata.train.estimate import choose_recompute, step_shape
from strata.train.flops import step_flops
from strata.train.fused_adamw import FusedAdamW
from strata.train.graph_step import GraphStep
from strata.train.optim import Optimizer, masters_of
from strata.train.pack import PackedBatch, Packer
from strata.train.run_log import RunLog
from strata.train.schedule import learning_rate
from strata.train.shards import Shards
from strata.train.step import train_step
from strata.train.tasks.mixture import document
from strata.train.vocabulary import BEGIN, END, PAD, make_tokenizer, write_tokenizer


@dataclass(frozen=True)
class Progress:
    """One line of the log. loss is the mean of the steps since the line before; the norm is the last step's.

    tokens: trained on since the run began. mfu: None where the device's peak is unknown.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second: float
    mfu: float | None
    seconds: float


@dataclass(frozen=True)
class Trained:
    """What a finished run leaves. model: the folder with the model in bfloat16, the dtype that it is served in."""

    model: Path
    log: Path
    position: Position
    device: torch.device


class Run:
    """The parts of one training run, ready to step. Made fresh, or as the latest checkpoint left them."""

    def __init__(self, config: TrainConfig, peak_flops: float | None = None, *, resume: bool = False) -> None:
        """peak_flops: the device's dense peak for the model's dtype, FLOP/s, for MFU."""
        self.config = config
        self.folder = Path(config.run.out)
        self.device = _device(config.run.device, config.run.precision)
        self.peak_flops = peak_flops
        existing = checkpoints_of(self.folder, resume=resume)
        self.tokenizer_folder = self.folder / "tokenizer"
        tokenizer = self._tokenizer()
        self.model_config = model_config(config, tokenizer)
        self.shards = Shards(
            self.folder / "data",
            self.tokenizer_folder / "tokenizer.json",
            config.run.seed,
            config.data.documents_per_shard,
        )
        self.model, self.optimizer, self._step = _fresh(self.model_config, config, self.device)
        self.position = Position()
        if existing:
            self.position = load_checkpoint(existing[-1], self.model, self.optimizer, self.recipe)

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the numbers of a run, by section; the length of a run may change when it is resumed."""
        config = self.config
        return {
            "run": {"seed": config.run.seed, "device": self.device.type, "precision": config.run.precision},
            "model": config.model,
            "tokenizer": asdict(config.tokenizer),
            "data": {
                "tokens_per_batch": config.data.tokens_per_batch,
                "batches_per_step": config.data.batches_per_step,
            },
            "optimizer": asdict(config.optimizer),
        }

    def _tokenizer(self) -> tokenizers.Tokenizer:
        if (self.tokenizer_folder / "tokenizer.json").exists():
            return read_tokenizer(self.tokenizer_folder)
        config = self.config
        documents = (document(config.run.seed, index) for index in range(config.tokenizer.documents))
        made = make_tokenizer(documents, config.tokenizer.vocab_size)
        write_tokenizer(made, self.tokenizer_folder, int(config.model.get("max_position_embeddings", 2048)))
        return made

    def train(self, report: Callable[[Progress], None] = lambda _: None) -> Trained:
        """All steps that are left, then the finished model. `report` receives each line of the log.

        Raises FloatingPointError when loss or gradient stop being finite; the checkpoints before stay good.
        """
        config = self.config
        self._start_workers()
        log = RunLog(self.folder / "log.jsonl", self.position.step)
        clock = _Clock(self.position.tokens)
        losses: list[Tensor] = []
        exact = _deterministic() if config.run.deterministic else contextlib.nullcontext()
        with self.shards, exact, _collected_between_steps(), _ahead(self._steps()) as steps:
            for batches in steps:
                rate = learning_rate(
                    self.position.step,
                    peak=config.optimizer.learning_rate,
                    steps=config.run.steps,
                    warmup=config.schedule.warmup,
                    decay=config.schedule.decay,
                )
                loss, norm = self._step(batches, rate)
                losses.append(loss)
                clock.flops += step_flops(self.model, self.model_config, batches)
                self.position = Position(
                    self.position.step + 1,
                    batches[-1].next_document,
                    self.position.tokens + sum(len(batch.tokens) for batch in batches),
                )
                done = self.position.step == config.run.steps
                if self.position.step % config.run.log_every == 0 or done:
                    progress = clock.measure(self.position, losses, norm, rate, self.peak_flops)
                    log.write(_line(progress))
                    report(progress)
                    losses.clear()
                if self.position.step % config.run.checkpoint_every == 0 or done:
                    self._save_checkpoint()
                    gc.collect()
                    clock.restart(self.position.tokens)
        return Trained(self._save_model(), self.folder / "log.jsonl", self.position, self.device)

    def _steps(self) -> Iterator[list[PackedBatch]]:
        """The batches of each step that is left."""
        data = self.config.data
        packer = Packer(self.shards, data.tokens_per_batch, self.model_config.max_length)
        at = self.position.document
        for _ in range(self.position.step, self.config.run.steps):
            batches = []
            for _ in range(data.batches_per_step):
                batches.append(packer.batch(at))
                at = batches[-1].next_document
            yield batches

    def _start_workers(self) -> None:
        """Let the workers write what the steps that are left will read, as far as the first shard tells."""
        config = self.config
        if not config.data.workers or self.position.step == config.run.steps:
            return
        first = self.position.document // config.data.documents_per_shard
        sample = self.shards.read(first)
        steps = config.run.steps - self.position.step
        wanted = steps * config.data.batches_per_step * config.data.tokens_per_batch
        shards = math.ceil(wanted / len(sample.tokens)) + 1
        self.shards.start_workers(config.data.workers, first + 1, first + shards)

    def _save_checkpoint(self) -> None:
        folder = self.folder / "checkpoints"
        parts = (self.model, self.model_config, self.tokenizer_folder, self.optimizer, self.position, self.recipe)
        save_checkpoint(folder, *parts)
        remove_old(folder, self.config.run.keep_checkpoints)

    def _save_model(self) -> Path:
        folder = self.folder / "model"
        with torch.device("meta"):
            rounded = build(self.model_config)
        rounded = rounded.to(torch.bfloat16).to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in rounded.named_parameters():
                parameter.copy_(self.optimizer.masters[name])
        save(rounded, self.model_config, folder, self.tokenizer_folder)
        return folder


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a run or of a model that it made."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def model_config(config: TrainConfig, tokenizer: tokenizers.Tokenizer) -> ModelConfig:
    """The model of a run: the fields that its config gives, and those that follow from the tokenizer."""
    derived = {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    if taken := sorted(config.model.keys() & derived.keys()):
        raise ValueError(f"model.{taken[0]} follows from the tokenizer; remove it from the training config")
    return config_from_dict(config.model | derived, "model")


Step = Callable[[Sequence[PackedBatch], float], tuple[Tensor, Tensor]]


def _fresh(
    config: ModelConfig, run: TrainConfig, device: torch.device
) -> tuple[CausalLM, Optimizer | FusedAdamW, Step]:
    """The initialized model, float32 on the CPU and bfloat16 on a GPU, its optimizer, and the step over batches."""
    model = build(config)
    initialize(model, run.run.seed)
    model = model.to(device)
    if device.type == "cpu":
        optimizer = Optimizer(model, run.optimizer)
        return model, optimizer, partial(train_step, model, optimizer)
    masters = masters_of(model)
    model = model.to(torch.bfloat16)
    fused = FusedAdamW(model, run.optimizer, masters)
    recompute = run.run.recompute
    if recompute == "auto":
        memory = torch.cuda.get_device_properties(device).total_memory
        recompute = "none" if config.num_experts else choose_recompute(step_shape(config, run), memory)
    return model, fused, GraphStep(model, fused, run.run.precision, recompute)


def _device(name: str, precision: str) -> torch.device:
    device = training_device(name)
    if precision != "bf16" and (device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ValueError(
            f"run.precision = {precision!r} needs a GPU that multiplies 8-bit floating point (compute capability 8.9 "
            f"or higher); use 'bf16' on this {device.type}"
        )
    return device


class _Clock:
    """Speed between two lines of the log; time spent in checkpoints does not count."""

    def __init__(self, tokens: int) -> None:
        self._begin = time.perf_counter()
        self.flops = 0
        self.restart(tokens)

    def restart(self, tokens: int) -> None:
        self._tokens, self._start = tokens, time.perf_counter()
        self.flops = 0

    def measure(
        self, position: Position, losses: list[Tensor], norm: Tensor, rate: float, peak: float | None
    ) -> Progress:
        loss, last = torch.stack(losses).double().mean().item(), norm.item()  # waits for the device
        if not (math.isfinite(loss) and math.isfinite(last)):
            raise FloatingPointError(
                f"loss {loss} and gradient norm {last} at step {position.step}: not finite; "
                f"lower optimizer.learning_rate and resume from the last checkpoint"
            )
        now = time.perf_counter()
        elapsed = now - self._start
        mfu = None if peak is None else self.flops / elapsed / peak
        speed = (position.tokens - self._tokens) / elapsed
        self.restart(position.tokens)
        return Progress(position.step, loss, last, rate, position.tokens, speed, mfu, now - self._begin)


def _line(progress: Progress) -> dict[str, float]:
    """Measurements to a sensible precision; what must repeat exactly stays whole."""
    digits = {"tokens_per_second": 0, "seconds": 2, "mfu": 4}
    given = {key: value for key, value in asdict(progress).items() if value is not None}
    return {key: round(value, digits[key]) if key in digits else value for key, value in given.items()}


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic kernels while training, so that a resumed run repeats the bits; the setting before comes back."""
    # cuBLAS is deterministic only with workspaces of a fixed size; it reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # Not warn_only: FlashAttention's backward takes its deterministic path only when determinism is demanded.
    torch.use_deterministic_algorithms(True)
    # Results are written whole before they are read; filling them first would cost a pass over memory each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextlib.contextmanager
def _collected_between_steps() -> Iterator[None]:
    """No garbage collection of its own accord, which can hold a step up for hundreds of milliseconds."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _ahead(items: Iterator[list[PackedBatch]], most: int = 4) -> Iterator[Iterator[list[PackedBatch]]]:
    """The items, made by a thread that runs up to `most` ahead. An error there is raised here."""
    made: queue.Queue[list[PackedBatch] | BaseException | None] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: list[PackedBatch] | BaseException | None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                made.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    def received() -> Iterator[list[PackedBatch]]:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        yield received()
    finally:
        stopped.set()
        thread.join()
