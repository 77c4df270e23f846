"""Where the time of a training step goes on the device: by kernel, and messages that nothing hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from strata.bench.trace import Interval, exposed_messages, kind_of

_MOST = 45


def traced(run: Callable[[], object]) -> dict[str, Any]:
    """What `run` does on the device. kernels: milliseconds and number of launches of each, the longest first;
    exposed_ms: how long messages, and nothing else, were under way.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    work = []
    for event in profiled.profiler.kineto_results.events():
        if event.device_type().name != "CUDA":
            continue
        name = f"{kind_of(event.name())}: {event.name()[:90]}"
        seconds[name] += event.duration_ns()
        launches[name] += 1
        work.append(Interval(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
    return {
        "exposed_ms": round(exposed_messages(work) / 1e6, 3),
        "kernels": {name: [round(time / 1e6, 3), launches[name]] for name, time in seconds.most_common(_MOST)},
    }
