"""`strata train --estimate`: what a run's step takes on a GPU, estimated without one."""

from __future__ import annotations

from strata.hardware import specs
from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.parallel.layout import Layout, auto_layout
from strata.text.tokenizer import Tokenizer
from strata.train.config import TrainConfig, check_trainable
from strata.train.layout import with_micro_batches
from strata.train.predict.adapters import AdapterStep
from strata.train.predict.estimate import GIB, Estimate, MemoryOfRank, choose_recompute, estimate, step_shape
from strata.train.start import fresh_config


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
    shape, chosen, notes = step_shape(run, config, layout), run.run.recompute, []
    where, is_free = f"{device.product} ({room / GIB:.1f} GiB)", chosen == "auto"
    if run.lora is None:
        what, chosen = f"{run.run.precision}, {where}", choose_recompute(shape, room) if is_free else chosen
        ways = {one: _figures(estimate(shape, device, one)) for one in shape.recomputes}
    else:
        step = AdapterStep.of(run, config, layout)
        what, chosen = f"{where}; {step.beside}", step.choose_recompute(room) if is_free else chosen
        ways = {one: _of(step.memory(one)) for one in shape.recomputes}
        if not step.fits(chosen, room):
            advice = "lower data.tokens_per_pack, or pack the frozen weights (lora.quantization)"
            notes.append(f"more than is usable: {advice}")
        notes.append("by hand count, activations at most; times are not predicted for adapters")
    if run.optimizer.name != "adamw":
        notes.append(f"estimated with AdamW: {run.optimizer.name} keeps less and takes longer")
    return "\n".join(
        [
            f"{_named(layout)} ({reason}), {shape.batches} x {shape.tokens} tokens a replica, {what}",
            *(f"{'*' if one == chosen else ' '} recompute {one}: {figures}" for one, figures in ways.items()),
            *(f"  {note}" for note in notes),
        ]
    )


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


def _of(memory: MemoryOfRank) -> str:
    return f"{memory.total / GIB:.1f} GiB ({memory.in_words})"


def _figures(found: Estimate) -> str:
    time, likely = found.time, found.likely
    speed = f"{found.likely_tokens_per_second:,.0f} tokens/s, MFU {found.likely_mfu:.1%}"
    return (
        f"{_of(found.fullest)}; likely {likely.seconds * 1e3:.1f} ms ({likely.origin}; messages "
        f"{likely.communication * 1e3:.1f} ms), {speed}; at least "
        f"{time.seconds * 1e3:.1f} ms (messages that nothing hides {time.communication * 1e3:.1f} ms)"
    )
