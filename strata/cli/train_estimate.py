"""`strata train --estimate`: what a run's step takes on a GPU, estimated without one."""

from __future__ import annotations

from collections.abc import Iterator

from strata.hardware import specs
from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.parallel.layout import Layout, auto_layout
from strata.text.tokenizer import Tokenizer
from strata.train.adapters.lora import LoraConfig
from strata.train.config import TrainConfig
from strata.train.layout import with_micro_batches
from strata.train.predict.adapters import AdapterStep
from strata.train.predict.estimate import Estimate, choose_recompute, estimate, step_shape
from strata.train.recompute import RECOMPUTE_OF_MODULES
from strata.train.start import fresh_config
from strata.train.trainable import check_trainable

GIB = 2**30


def estimate_text(run: TrainConfig, device_name: str, ranks: int) -> str:
    """Memory of the fullest rank, likely and least time of the run's largest step, for each way to recompute; the one
    that a run takes is marked. ranks: as many as `parallel` has if that says more.
    """
    device = specs.device_to_plan(device_name)
    config, room = model_config(run), int(device.ceiling("memory").value)
    check_trainable(config)
    layout, reason = run.parallel, "as the config says"
    if layout is None and run.lora is not None:
        layout, reason = Layout(dp=ranks), "documents are divided"
    elif layout is None:
        layout, reason = auto_layout(config, ranks, room)
    layout = with_micro_batches(layout, run.data.packs_per_step)
    layout.check(config, layout.ranks if run.parallel is not None else ranks)
    if run.lora is not None:
        return "\n".join(_of_adapters(run, run.lora, config, layout, device.product, reason, room))
    shape = step_shape(run, config, layout)
    chosen = choose_recompute(shape, room) if run.run.recompute == "auto" else run.run.recompute
    lines = [
        f"{_named(layout)} ({reason}), {shape.batches} x {shape.tokens} tokens a replica, {run.run.precision}, "
        f"{device.product} ({room / GIB:.1f} GiB)"
    ]
    for recompute in shape.recomputes:
        mark = "*" if recompute == chosen else " "
        lines.append(f"{mark} recompute {recompute}: {_figures(estimate(shape, device, recompute))}")
    return "\n".join([*lines, *_unlike(run)])


def _of_adapters(
    run: TrainConfig, lora: LoraConfig, config: ModelConfig, layout: Layout, product: str, reason: str, room: int
) -> Iterator[str]:
    step = AdapterStep.of(run, config, layout)
    shape = step.shape
    chosen = step.choose_recompute(room) if run.run.recompute == "auto" else run.run.recompute
    packed = sum(weight.nbytes for weight in step.planned.values())
    beside = "weights in bfloat16"
    if step.planned:
        beside = f"{len(step.planned)} packed weights of {packed / GIB:.2f} GiB"
    yield (
        f"{_named(layout)} ({reason}), {shape.batches} x {shape.tokens} tokens a replica, {product} "
        f"({room / GIB:.1f} GiB); adapters of rank {lora.rank} beside {beside}"
    )
    for recompute in RECOMPUTE_OF_MODULES:
        memory = step.memory(recompute)
        yield (
            f"{'*' if recompute == chosen else ' '} recompute {recompute}: {memory.total / GIB:.1f} GiB (frozen "
            f"{memory.frozen / GIB:.1f}, adapters {memory.adapters / GIB:.2f}, activations at most "
            f"{memory.activations / GIB:.1f}, workspace {memory.workspace / GIB:.1f})"
        )
    if not step.fits(chosen, room):
        yield "  more than is usable: lower data.tokens_per_pack, or pack the frozen weights (lora.quantization)"
    yield "  by hand count; times are not predicted for adapters"
    yield from _unlike(run)


def _unlike(run: TrainConfig) -> Iterator[str]:
    """What the run does otherwise than what is estimated."""
    if run.optimizer.name != "adamw":
        yield f"  estimated with AdamW: {run.optimizer.name} keeps less and takes longer"


def model_config(run: TrainConfig) -> ModelConfig:
    """Of the model that a run trains. Of a tokenizer only the size matters: with model.vocab_size none is read.

    Raises ValueError if a folder is needed and not there.
    """
    if run.model is not None and "vocab_size" in run.model:
        return config_from_dict(run.model, "model")
    folder = run.start.folder
    if run.model is None:
        return read_config(folder)
    with Tokenizer.load(folder) as tokenizer:
        return fresh_config(run.model, tokenizer)


def _named(layout: Layout) -> str:
    axes = [f"{name} {getattr(layout, name)}" for name in ("pp", "dp", "shard", "cp", "tp", "ep")]
    return ", ".join(axis for axis in axes if not axis.endswith(" 1")) or "one rank"


def _figures(found: Estimate) -> str:
    memory, time, likely = found.fullest, found.time, found.likely
    return (
        f"{memory.total / GIB:.1f} GiB ({memory.parts}); "
        f"likely {likely.seconds * 1e3:.1f} ms ({likely.origin}; messages {likely.communication * 1e3:.1f} ms), "
        f"{found.likely_tokens_per_second:,.0f} tokens/s, MFU {found.likely_mfu:.1%}; at least "
        f"{time.seconds * 1e3:.1f} ms (messages that nothing hides {time.communication * 1e3:.1f} ms)"
    )
