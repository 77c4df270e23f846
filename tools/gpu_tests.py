"""Runs tests/gpu on all GPUs that are here, or those of CUDA_VISIBLE_DEVICES, with a line as each file is done.

Usage: python tools/gpu_tests.py [NAME ...]: all files, or those whose names contain a NAME. First every GPU takes files
of its own, some at the same time: those about kernels in one job of several workers, engines and trainers in one each.
Then files marked `alone`, which measure time or memory or take most of it, have a GPU each, and files with ranks run on
all GPUs together, two at a time. Tests that need more GPUs than there are get skipped, and are named with the reason.
Exit code 1 if anything failed.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from xml.etree import ElementTree

FOLDER = Path("tests/gpu")
# A file that imports nothing else of Strata tests kernels, and takes little memory.
KERNELS = ("strata.kernels", "strata.graph", "strata.cache", "strata.models", "strata.hardware")
RANKS = "tests.gpu.ranks"
ALONE = "pytest.mark.alone"
# Jobs that share a GPU: mostly they compile and trace, on a core each.
SLOTS = 4
# Workers that share a GPU: most of the time they compile, on a core each; their tensors have to fit together.
MAX_WORKERS = 10
TIMEOUT = 1800.0


@dataclass(frozen=True)
class Job:
    """Files that one pytest runs, in so many workers."""

    files: tuple[Path, ...]
    workers: int = 1

    @property
    def name(self) -> str:
        return self.files[0].stem if len(self.files) == 1 else f"{len(self.files)} files of kernels"


@dataclass
class Result:
    """What came of a job. skipped: reasons, with how many tests each. output: what to show of a failure."""

    passed: int = 0
    failed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    output: str = ""


def imports(file: Path) -> set[str]:
    """Modules that a file imports at its top, those of `from package import module` by both names."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def about_kernels(file: Path) -> bool:
    """Whether it is about kernels alone, so that one pytest runs many such files in several workers."""
    found = imports(file)
    own = {name for name in found if name.split(".")[0] == "strata" and name != "strata"}
    return (
        "transformers" not in found
        and "strata" not in found
        and any(name.startswith(("strata.kernels", "strata.cache")) for name in own)
        and all(name.startswith(KERNELS) for name in own)
    )


@dataclass(frozen=True)
class Jobs:
    """sharing: what runs beside others on a GPU. alone: what has one to itself. together: what takes all of them."""

    sharing: list[Job]
    alone: list[Job]
    together: list[Job]

    def __len__(self) -> int:
        return len(self.sharing) + len(self.alone) + len(self.together)


def jobs(files: Sequence[Path], gpus: int, workers: int) -> Jobs:
    """Each file once; those of kernels in a job a GPU, of so many workers."""
    ranks = [file for file in files if RANKS in imports(file)]
    alone = [file for file in files if file not in ranks and ALONE in file.read_text(encoding="utf-8")]
    sharing = [file for file in files if file not in ranks and file not in alone]
    kernels = [file for file in sharing if about_kernels(file)]
    parts: list[list[Path]] = [[] for _ in range(min(gpus, len(kernels)))]
    # The longest files first, each where there is the least so far: as much to test for every GPU.
    for file in sorted(kernels, key=_size, reverse=True):
        min(parts, key=lambda part: sum(map(_size, part))).append(file)
    engines = [Job((file,)) for file in sharing if file not in kernels]
    return Jobs(
        [Job(tuple(part), workers) for part in parts] + engines,
        [Job((file,)) for file in alone],
        [Job((file,)) for file in ranks],
    )


def _size(file: Path) -> int:
    return file.stat().st_size


def run(job: Job, gpus: Sequence[str]) -> Result:
    """Run a job in a process of its own that sees these GPUs alone."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Schemathesis, which asks servers, takes a second of every start.
        left_out = "-pno:cacheprovider", "-pno:schemathesis"
        command = [sys.executable, "-m", "pytest", "--color=no", *left_out, f"--junitxml={report}"]
        if job.workers > 1 and find_spec("xdist") is not None:
            command += [f"--numprocesses={job.workers}", "--dist=worksteal"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        try:
            done = subprocess.run(
                [*command, *map(str, job.files)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
                check=False,
            )
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            output, code = str(late), 1
        result = read(report)
    result.seconds = time.perf_counter() - began
    # 5: every test of the file was left out.
    if code not in (0, 5):
        result.failed, result.output = max(result.failed, 1), output
    return result


def read(report: Path) -> Result:
    """What pytest reports of its tests; nothing if it died before it could."""
    result = Result()
    if not report.is_file():
        return result
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif skipped is None:
            result.passed += 1
        else:
            reason = skipped.get("message", "")
            result.skipped[reason] = result.skipped.get(reason, 0) + 1
    return result


class Progress:
    """Tells of each job as it ends, and in the end of all."""

    def __init__(self, count: int) -> None:
        self._lock, self._count, self._done = threading.Lock(), count, 0
        self.failed: list[str] = []
        self._passed = self._skipped = 0

    def tell(self, job: Job, gpus: Sequence[str], result: Result) -> None:
        with self._lock:
            self._done += 1
            self._passed += result.passed
            self._skipped += sum(result.skipped.values())
            where = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {', '.join(gpus)}"
            counts = [f"{result.passed} passed"]
            if result.failed:
                counts.append(f"{result.failed} FAILED")
                self.failed.append(job.name)
                print(result.output.rstrip())
            came = f"{job.name:<32} {', '.join(counts):<24} {result.seconds:6.1f} s  {where}"
            print(f"[{self._done:>2}/{self._count}] {came}", flush=True)
            for reason, count in sorted(result.skipped.items()):
                print(f"        skipped {count}: {reason}", flush=True)

    def end(self, seconds: float) -> None:
        failed = f"; FAILED: {', '.join(self.failed)}" if self.failed else ""
        print(f"{self._passed} tests passed, {self._skipped} skipped, in {seconds:.0f} s{failed}")


def run_all(files: Sequence[Path], gpus: Sequence[str], workers: int) -> int:
    """Run all files on these GPUs; returns the exit code."""
    began = time.perf_counter()
    found = jobs(files, len(gpus), workers)
    progress = Progress(len(found))

    def run_on(where: Sequence[Sequence[str]], waiting: Iterable[Job]) -> None:
        """Each place takes the next job as it is done with one."""
        queue: SimpleQueue[Job] = SimpleQueue()
        for job in waiting:
            queue.put(job)

        def take(place: Sequence[str]) -> None:
            while True:
                try:
                    job = queue.get_nowait()
                except Empty:
                    return
                progress.tell(job, place, run(job, place))

        threads = [threading.Thread(target=take, args=(place,)) for place in where]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run_on([[gpu] for gpu in gpus] * SLOTS, found.sharing)
    run_on([[gpu] for gpu in gpus], found.alone)
    run_on([gpus] * 2, found.together)
    progress.end(time.perf_counter() - began)
    return 1 if progress.failed else 0


def visible_gpus() -> list[str]:
    """How the GPUs are called that this process may use."""
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return re.split(r"\s*,\s*", given.strip())[:count] if given else [str(number) for number in range(count)]


def main() -> int:
    """The whole run; see the module."""
    gpus = visible_gpus()
    if not gpus:
        print("torch sees no CUDA device: tests/gpu needs one (tests of all else: make test)", file=sys.stderr)
        return 1
    files = [file for file in sorted(FOLDER.rglob("test_*.py")) if not sys.argv[1:] or _named(file, sys.argv[1:])]
    if not files:
        print(f"no file of {FOLDER} has {' or '.join(map(repr, sys.argv[1:]))} in its name", file=sys.stderr)
        return 1
    workers = max(1, min(MAX_WORKERS, 3 * len(os.sched_getaffinity(0)) // (4 * len(gpus))))
    print(f"{len(files)} files on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, kernels in {workers} workers each")
    return run_all(files, gpus, workers)


def _named(file: Path, names: Sequence[str]) -> bool:
    return any(name in file.name for name in names)


if __name__ == "__main__":
    sys.exit(main())
