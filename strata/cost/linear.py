"""The linear forms of a program's step times and of their floors, for whoever asks of every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from strata.cost.step_costs import StepCosts
from strata.cost.step_model import StepModel
from strata.cost.step_times import LINK, StepTimes
from strata.hardware.figures import Device
from strata.hardware.links import HIDDEN, Link
from strata.hardware.prediction import nonnegative_fit
from strata.hardware.roofline import Cost, Floor, Workload

# What the host takes to launch a layer of a step that no CUDA graph holds: 15 to 43 ms for 28 layers beside an H200.
_LAUNCH_SECONDS = 1e-3
# Of the fitted steps: tokens of their decodes with those before, and what prompts have behind them, fewer of short
# chunks: where cuDNN attends, these are padded behind many keys.
_DECODED, _BEHIND, _BEHIND_SHORT = (256, 1024, 4096), (0, 2048, 8192), (0, 1024, 4096)
_MAX_SEQUENCES, _BESIDE = 128, 32
_LEAST = 1e-12  # seconds: no coefficient is 0
_MANY = 1 << 20  # tokens that need every expert
# One token behind so many others that the attention of every layer without a window grows with them alone.
_REACH = 1 << 40
_NEAR, _FAR = Workload((1,), (_REACH,)), Workload((1,), (2 * _REACH,))


def linear(
    model: StepModel, tokens: int, sequences: int, longest: int, captured: int = 0, overlapped: int = 0
) -> StepTimes:
    """Fitted to the exact times of a few steps: of an engine with at most so many tokens and sequences in a step, and
    sequences of at most `longest`. captured, overlapped: see `StepTimes`.

    Least squares of relative errors, without the coefficients that would be negative. From how many tokens on a step
    waits for products and not for weights follows from its floor, so these two have one coefficient. Steps of six sizes
    are priced.
    """
    costs, compute = model.costs, model.predictor.rate()
    hidden = 0.0
    if overlapped and model.link is not None:
        hidden = HIDDEN * costs.token_sent / (model.link.bandwidth * LINK)
    steps = _steps(tokens, min(sequences, _MAX_SEQUENCES), longest)
    bandwidth = model.device.ceiling("bandwidth").value
    alone, experts = (sum(read(tokens) * layers for read, _, layers in costs.mixtures) for tokens in (1, _MANY))
    weights, unused = costs.weights + experts, 1 - alone / experts if experts else 0.0
    knee = weights / bandwidth * compute / costs.token_flops
    seconds = np.array([model.on_device(one) + hidden * one.tokens * (0 < overlapped <= one.tokens) for one in steps])
    knee_of_experts = knee * experts / weights
    rows = np.array([_row(one, knee - knee_of_experts * unused**one.tokens) for one in steps]) / seconds[:, None]
    *found, prompts = (max(float(one), _LEAST) for one in nonnegative_fit(rows))
    step, product, token, sequence, key, pair = found
    wait = product * knee
    launch = _LAUNCH_SECONDS * sum(layers for _, layers in costs.states)
    given = captured, launch, overlapped, hidden, None, prompts, product * knee_of_experts, unused
    return StepTimes(step, wait, product, token, sequence, key, pair, *given)


def linear_floor(
    costs: StepCosts, device: Device, dtype: str, link: Link | None = None
) -> Callable[[int, int, int, float], Floor]:
    """`strata.hardware.roofline.floor` of `StepCosts.step` from numbers that a step's plan tells, cheap enough for each
    step: its tokens; the rows that it projects; keys: tokens of its sequences once it has run, whose keys it reads,
    those that several share once; pairs of queries and keys. Layers with a window count as if every token read a whole
    window of its own. Raises ValueError if the device's peak is not known for `dtype`.
    """
    linear, bounded = Cost(), Cost()
    for attention, count in costs.states:
        near, far = attention(_NEAR), attention(_FAR)
        for _ in range(count):
            linear, bounded = linear + (far - near), bounded + (near + near - far)
    compute, bandwidth = device.ceiling("compute", dtype).value, device.ceiling("bandwidth").value
    pair_flops, key_bytes = linear.flops / _REACH, linear.cached / _REACH

    def of_step(tokens: int, rows: int, keys: int, pairs: float) -> Floor:
        cost = costs.beside_states(tokens, rows)
        flops = cost.flops + pair_flops * pairs + bounded.flops * tokens
        read = cost.weights + key_bytes * keys + bounded.cached * rows
        messages = 0.0 if link is None else link.min_seconds(cost.messages, cost.sent)
        return Floor(flops / compute, read / bandwidth, messages)

    return of_step


def _steps(tokens: int, sequences: int, longest: int) -> list[Workload]:
    """Decodes alone, prompts beside some, and prompts alone; as many prompts as it takes, each no longer than that."""

    def step(decodes: int, keys: int, size: int, behind: int) -> Workload:
        most = max(2, min(size, longest - min(behind, longest // 2)))
        prompts = tuple(min(most, size - first) for first in range(0, size, most))
        before = min(behind, longest - most)
        new = (1,) * decodes + prompts
        return Workload(new, (min(keys, longest),) * decodes + tuple(before + prompt for prompt in prompts))

    counts = (min(2, sequences), max(1, sequences // 8), sequences)
    found = [step(count, keys, 0, 0) for count in counts for keys in _DECODED]
    for size, behind in ((max(4, tokens // 8), _BEHIND_SHORT), (max(4, tokens), _BEHIND)):
        beside = min(_BESIDE, sequences, size // 2)
        found += [step(beside, 1024, size - beside, keys) for keys in behind]
    return [*found, step(0, 0, max(2, tokens // 2), 0)]


def _row(step: Workload, knee: float) -> list[float]:
    """What each coefficient is multiplied by, in the order of `StepTimes`, `prompts` last. knee: tokens from which on
    the step would wait for products and not for weights."""
    prompts = [(new, total) for new, total in zip(step.new, step.total, strict=True) if new > 1]
    pairs = sum(new * (total - (new - 1) / 2) for new, total in prompts)
    waits = max(knee, step.tokens)
    return [1.0, waits, step.tokens, len(step.new), sum(step.total), pairs, float(bool(prompts))]
