"""All ways to divide a training step that `Layout.check` accepts and that are not plainly another one's equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from strata.parallel.layout import Layout
from strata.parallel.schedules import SCHEDULES
from strata.plan.training.task import TrainingTask
from strata.train.predict.step_shape import TrainShape

# A rank of cp with fewer tokens than these waits for messages.
_MIN_TOKENS_OF_CONTEXT = 1024
# Sequences of a pack beyond these only take memory: products are as quick as they get.
_MAX_TOKENS_OF_PACK = 65536
_MAX_SEQUENCES_OF_MICRO_BATCH = 2


def candidates(task: TrainingTask) -> Iterator[TrainShape]:
    """Steps of the task, each with its layout, pack and micro-batches."""
    for tp in _divisors(task.gpus):
        # Those that divide the heads, in one host: matrices that are divided wait for messages in every layer.
        if tp > task.per_host or task.config.num_heads % tp or task.config.num_kv_heads % tp:
            continue
        for pp in (one for one in _divisors(task.gpus // tp) if one <= task.config.num_layers // 2):
            for cp in _divisors(task.gpus // (tp * pp)):
                ways = task.gpus // (tp * pp * cp)
                if task.sequences % ways or (cp > 1 and task.sequence // cp < _MIN_TOKENS_OF_CONTEXT):
                    continue
                for layout in _layouts(task, tp, pp, cp, ways):
                    yield from _packed(task, layout, ways)


def _packed(task: TrainingTask, layout: Layout, ways: int) -> Iterator[TrainShape]:
    """The layout with each number of sequences that a pack may have."""
    share = task.sequences // ways
    for count in _divisors(share):
        tokens, batches = count * task.sequence, share // count
        if tokens > max(task.sequence, _MAX_TOKENS_OF_PACK) or (layout.cp > 1 and count > 1):
            continue
        if layout.zero == 1 and batches == 1:
            continue  # ZeRO-2 sends as much and holds less
        if layout.pp == 1:
            yield TrainShape(task.config, tokens, task.sequence, batches, task.precision, layout)
            continue
        # Larger micro-batches fill a pipeline later and keep more; two sequences spare it some messages.
        if batches < layout.pp or count > _MAX_SEQUENCES_OF_MICRO_BATCH:
            continue
        for schedule in SCHEDULES:
            divided = replace(layout, schedule=schedule, micro_batches=batches)
            shape = TrainShape(task.config, tokens, task.sequence, batches, task.precision, divided)
            if _fits(task, replace(divided, micro_batches=shape.alike_from(4))):
                yield shape


def _layouts(task: TrainingTask, tp: int, pp: int, cp: int, ways: int) -> Iterator[Layout]:
    # Without sequence parallelism messages take as long, and more is kept.
    overlaps = (False, True)
    tensors: list[dict[str, Any]] = (
        [{"sequence_parallel": True, "overlap": one} for one in overlaps] if tp > 1 else [{}]
    )
    contexts = ["ring"] if cp == 1 else ["ring", "ulysses"]
    for shard in _divisors(ways):
        if not _worth(task, shard * cp * tp):
            continue
        for ep in _divisors(shard * cp):
            if task.config.num_experts % ep or (ep > 1 and not task.config.num_experts):
                continue
            for zero in (0,) if shard * cp == 1 else (1, 2, 3) if shard > 1 else (0, 1, 2, 3):
                for tensor in tensors:
                    for context in contexts:
                        sizes = {"pp": pp, "dp": ways // shard, "shard": shard, "cp": cp, "tp": tp, "ep": ep}
                        layout = Layout(**sizes, zero=zero, context=context, **tensor)  # type: ignore[arg-type]
                        if pp > 1 or _fits(task, layout):
                            yield layout


def _worth(task: TrainingTask, ranks: int) -> bool:
    """Whether ranks that divide the model's state lie in one host, or fill several."""
    return ranks <= task.per_host or ranks % task.per_host == 0


def _fits(task: TrainingTask, layout: Layout) -> bool:
    try:
        layout.check(task.config, task.gpus)
    except ValueError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
