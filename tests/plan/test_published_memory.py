"""Memory of training by published formulas, within 3 %: what the trainer's estimate counts, asked of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.parallel.layout import Layout
from strata.plan.meta_model import find_config
from strata.train.predict.estimate import StepMemory, memory
from strata.train.predict.step_shape import TrainShape

CLOSE = 0.03
CONFIG = find_config("8B")
SEQUENCE, BATCH = 8192, 16  # so many that activations, not gradients, are the fullest moment
RANKS = 8
PARAMETERS = TrainShape(CONFIG, SEQUENCE, SEQUENCE).local_parameters[0].total


def found(recompute: str = "none", batches: int = 1, **layout: int | bool) -> StepMemory:
    layout_of = Layout(**layout)  # type: ignore[arg-type]
    return memory(TrainShape(CONFIG, BATCH * SEQUENCE, SEQUENCE, batches, layout=layout_of), recompute)


@pytest.mark.parametrize(("zero", "published"), [(0, 16.0), (1, 4 + 12 / RANKS), (2, 2 + 14 / RANKS), (3, 16 / RANKS)])
def test_zero_bytes_of_a_parameter(zero: int, published: float) -> None:
    """Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: weights and gradients of 2 bytes, 12 of Adam with masters.

    Strata's gradients, where they are kept, have 4 bytes; so they are left out of both. FSDP has no weights in 16 bits
    beside its masters, so with stage 3 these are left out, too.
    """
    kept = {"dp": RANKS} if zero == 0 else {"shard": RANKS, "zero": zero}
    gradients = 2 / (RANKS if zero >= 2 else 1)
    weights = 2 / RANKS if zero == 3 else 0
    assert found(**kept).state / PARAMETERS == pytest.approx(published - gradients - weights, rel=CLOSE)


@pytest.mark.parametrize(("layout", "published"), [({"dp": 8}, 18.0), ({"shard": 8, "zero": 1}, 6 + 12 / 8)])
def test_megatron_bytes_of_a_parameter(layout: dict[str, int], published: float) -> None:
    """Megatron-LM, megatron/training/theoretical_memory_usage.py: 18 bytes, or 6 + 12 / dp with its distributed
    optimizer, with float32 gradients of several micro-batches.
    """
    whole = found("layers", batches=4, **layout)
    assert (whole.state + whole.accumulated) / PARAMETERS == pytest.approx(published, rel=CLOSE)


def test_megatron_parameters_of_70b() -> None:
    """The same file's count: 2 * vocabulary * h + layers * (2 h^2 (1 + kv / heads) + 3 h F), norms beside; 70.6e9."""
    config = find_config("70B")
    hidden, shared = config.hidden_size, config.num_kv_heads / config.num_heads
    each = 2 * hidden**2 * (1 + shared) + 3 * hidden * config.intermediate_size
    counted = 2 * config.vocab_size * hidden + config.num_layers * each
    assert TrainShape(config, SEQUENCE, SEQUENCE).local_parameters[0].total == pytest.approx(counted, rel=CLOSE)
    assert counted == pytest.approx(70.6e9, rel=CLOSE)


def test_korthikanti_activations_when_layers_are_computed_again() -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 2: full recomputation keeps 2 s b h bytes a layer; where
    sequence parallelism divides what enters, a t-th part.
    """
    published = 2 * SEQUENCE * BATCH * CONFIG.hidden_size * CONFIG.num_layers
    assert found("layers", shard=8, zero=3).activations == pytest.approx(published, rel=CLOSE)
    divided = found("layers", tp=4, sequence_parallel=True).activations
    assert divided == pytest.approx(published / 4, rel=CLOSE)


def test_korthikanti_activations_fall_by_as_much_as_tensor_and_sequence_parallelism_divide() -> None:
    """Table 2 again: with both, all that a layer keeps is divided by t; so it is where gathers overlap products."""
    one = found("none", shard=8, zero=3).activations
    both = found("none", tp=4, sequence_parallel=True, overlap=True).activations
    assert both == pytest.approx(one / 4, rel=CLOSE)


def test_korthikanti_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    """Section 4.2.3: with 1F1B the first of p stages of L / p layers keeps those of L layers, whatever their number."""
    even = replace(CONFIG, vocab_size=32)  # so that stages have equally many layers
    alone = TrainShape(even, SEQUENCE, SEQUENCE, layout=Layout(shard=2, zero=3))
    staged = TrainShape(even, SEQUENCE, SEQUENCE, 16, layout=Layout(pp=4, micro_batches=16))
    assert memory(staged, "none").activations == pytest.approx(memory(alone, "none").activations, rel=CLOSE)
