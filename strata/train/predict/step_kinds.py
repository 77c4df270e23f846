"""Where the time of traced steps went, by kind of work; arithmetic on the events of a Chrome trace alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# What a kernel or operator does, by the first kind of which its name, in small letters, holds a word: Strata's own
# kernels, those of cuBLAS, cuDNN and NCCL, ATen's operators and autograd's nodes.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl", "gloo", "c10d", "all_reduce", "reduce_scatter", "all_gather", "sendrecv")),
    ("attention", ("attention", "attn", "sdpa", "flash", "fmha")),
    ("optimizer", ("adamw", "muon", "newton", "multi_tensor", "lpnorm", "_foreach", "vector_norm", "strata.update")),
    ("loss", ("softmax_gradient", "crossentropy", "cross_entropy", "nll_loss", "log_softmax", "logsumexp")),
    ("products", ("gemm", "gemv", "nvjet", "cutlass", "splitk", "linear", "::mm", "::bmm", "addmm", "matmul")),
    ("norms", ("rms_norm", "rmsnorm", "layer_norm", "norm_kernel", "norm_grad", "prenorm")),
)
OTHER, COMMUNICATION, IDLE = "other", "communication", "idle"
ORDER = ("products", "attention", "norms", "loss", "optimizer", OTHER, COMMUNICATION, IDLE)

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cpu_op", "user_annotation"}


@dataclass(frozen=True)
class StepKindTable:
    """Seconds of one step, the mean of `steps`, by kind; they add up to `total`, so an instant counts once.

    communication: what no other work hides. On a GPU, idle is when nothing runs there; on a CPU, Python's own time, and
    the head's product is part of the loss. floors: the least seconds of those kinds for which it is known.
    """

    steps: int
    total: float
    seconds: Mapping[str, float]
    floors: Mapping[str, float]

    def text(self) -> str:
        """Rows for people."""
        lines = [f"{f'a step, mean of {self.steps}':<22}{'ms':>10}{'share':>9}{'floor ms':>11}{'floor/ms':>10}"]
        rows = [(kind, self.seconds.get(kind, 0.0), self.floors.get(kind)) for kind in ORDER]
        known = sum(self.floors.get(kind, 0.0) for kind in ORDER)
        rows.append(("total", self.total, known or None))
        for kind, seconds, least in rows:
            line = f"{kind:<22}{seconds * 1e3:>10.2f}{seconds / self.total:>9.1%}"
            if least is not None:
                line += f"{least * 1e3:>11.2f}" + (f"{least / seconds:>10.0%}" if seconds else "")
            lines.append(line)
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """What a kernel or operator of that name does, one of `KINDS` or `OTHER`."""
    small = name.lower()
    return next((kind for kind, words in KINDS if any(word in small for word in words)), OTHER)


def read_step_trace(events: Iterable[Mapping[str, Any]], step: str, floors: Mapping[str, float]) -> StepKindTable:
    """Add up what ran in the steps, which are the annotations named `step`.

    events: `traceEvents` of a Chrome trace by torch.profiler. Kernels count if there are any, otherwise the operators
    of the thread that ran the steps. Raises ValueError if there is no step.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    marks = [event for event in spans if event["name"] == step and event.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError(f"the trace holds no annotation named {step}")
    start = min(event["ts"] for event in marks)
    end = max(event["ts"] + event["dur"] for event in marks)
    work = [event for event in spans if event.get("cat") in _DEVICE and event["ts"] >= start]
    if work:
        end = max(end, *(event["ts"] + event["dur"] for event in work))
    else:
        threads = {(event["pid"], event["tid"]) for event in marks}
        work = [
            event
            for event in spans
            if event.get("cat") in _HOST
            and event["name"] != step
            # A phase is work where its name says of what kind; else it is what its operators do.
            and (event["cat"] == "cpu_op" or kind_of(event["name"]) != OTHER)
            and start <= event["ts"] < end
            and ((event["pid"], event["tid"]) in threads or kind_of(event["name"]) == COMMUNICATION)
        ]
    microseconds = _each_instant_once(work)
    microseconds[IDLE] = max(0.0, end - start - sum(microseconds.values()))
    per_step = 1e-6 / len(marks)
    seconds = {kind: microseconds[kind] * per_step for kind in ORDER}
    return StepKindTable(len(marks), sum(seconds.values()), seconds, floors)


def _each_instant_once(work: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Microseconds by kind. Of nested events of one thread or stream the outermost known kind is that of all it holds,
    so a product inside the optimizer is the optimizer's. Of threads side by side the one that has been at its event
    longest counts, and communication only where nothing else runs.
    """
    found: Counter[str] = Counter()
    # Ends before begins, and of what begins at once the longest first.
    timed = [(event["ts"], event["dur"], number, event) for number, event in enumerate(work) if event["dur"]]
    turns = [(ts, 1, -dur, number, event) for ts, dur, number, event in timed]
    turns += [(ts + dur, 0, 0.0, number, event) for ts, dur, number, event in timed]
    # Of each lane its events that are open, the outermost first, by their numbers; and what it does.
    lanes: dict[tuple[Any, Any], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    running: dict[tuple[Any, Any], tuple[bool, float, str]] = {}
    before = 0.0
    for at, is_begin, _, number, event in sorted(turns):
        if running and at > before:
            found[min(running.values())[2]] += at - before
        before, lane = at, (event["pid"], event["tid"])
        if is_begin:
            lanes[lane][number] = event
        else:
            del lanes[lane][number]
        running.pop(lane, None)
        if lanes[lane]:
            running[lane] = _running(lanes[lane])
    return found


def _running(open_: Mapping[int, Mapping[str, Any]]) -> tuple[bool, float, str]:
    """What a lane does: whether that is communication, since when, and of what kind."""
    event = next((one for one in open_.values() if kind_of(one["name"]) != OTHER), [*open_.values()][-1])
    kind = kind_of(event["name"])
    return kind == COMMUNICATION, event["ts"], kind
