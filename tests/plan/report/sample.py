"""An explanation as a served run of 8B on an H200 might have it, with names that would break a page if not escaped."""

from __future__ import annotations

from strata.engine.watch.verdict import Remedy, Verdict
from strata.plan.explain.explanation import Explanation, LostTime, OperationTime, Peaks, StepTime, Waterfall

HOSTILE = "<script>alert(\"8B\")</script> & 'friends'"


def steps() -> tuple[StepTime, ...]:
    """A prompt, then decodes with a mixed step now and then, each after a gap of a tenth of a step."""
    made, begin = [], 0.0
    for number in range(400):
        kind, seconds, tokens = ("decode", 0.004, 32)
        if number % 25 == 0:
            kind, seconds, tokens = ("mixed", 0.011, 544) if number else ("prompt", 0.03, 4096)
        made.append(StepTime(begin, begin + seconds, kind, tokens, 8 + number // 16, number / 500))  # type: ignore[arg-type]
        begin += 1.1 * seconds
    return tuple(made)


def sample(title: str = "8B, 32 requests of 1,024 + 400 tokens") -> Explanation:
    operations = (
        OperationTime("linear", 0.82, 0.70, int(2.1e14), int(3.2e12), "memory"),
        OperationTime("attention", 0.41, 0.30, int(1.6e13), int(1.35e12), "memory"),
        OperationTime("linear of prompts", 0.14, 0.11, int(8.6e13), int(2.1e11), "compute"),
        OperationTime("all_reduce", 0.09, 0.05, int(1e9), int(8e10), "communication"),
        OperationTime("add_rms_norm", 0.06, 0.01, int(2e9), int(4e10), "memory"),
        OperationTime("copy", 0.02, 0.01, 0, int(4e10), "memory"),
    )
    whole = 1.9
    parts = (
        LostTime("launch gaps", "graph", "launch", 0.09),
        LostTime("linear over its floor", "kernel", "memory", 0.15),
        LostTime("attention over its floor", "kernel", "memory", 0.11),
        LostTime("other operations over their floor", "kernel", "memory", 0.06),
        LostTime("exposed messages", "system", "communication", 0.04),
        LostTime("host gaps", "system", "host", 0.21),
        LostTime("padding of captured sizes", "graph", "padding", 0.05),
    )
    waterfall = Waterfall(whole, whole - sum(part.seconds for part in parts) - 0.012, parts)
    remedies = (
        Remedy("schedule one step ahead", 0.10, "--async-scheduling"),
        Remedy("capture the step that is launched eagerly", 0.04),
    )
    evidence = (
        "the device waits 0.53 ms between two steps, 11 % of the time",
        "half the batch takes 97 % of the step's time",
    )
    verdict = Verdict("system", "the device waits for the host between steps", "host", evidence, remedies)
    sources = (
        "calls measured on another machine with this device, which come with Strata",
        "NVIDIA H200 datasheet, https://nvdam.widen.net/s/nb5zzzsjdf",
    )
    return Explanation(title, "NVIDIA H200", waterfall, verdict, operations, steps(), sources, Peaks(8.0e14, 4.28e12))
