"""When the last kernel of a cold start is compiled, counted by hand; and that the benchmark counts every variant."""

from __future__ import annotations

import pytest

from benchmarks.kernels_ahead import Job, makespan, report


def job(noted: float, seconds: float, soon: bool = False) -> Job:
    return Job("k", noted, seconds, soon)


@pytest.mark.parametrize(
    ("jobs", "processes", "end"),
    [
        ([job(0, 1), job(0, 2), job(0, 3)], 1, 6),
        ([job(0, 1), job(0, 2), job(0, 3)], 3, 3),
        ([job(0, 1), job(0, 2), job(0, 3)], 2, 4),  # 1 then 3 beside 2
        ([job(5, 1), job(0, 1)], 2, 6),  # one is known late
        ([job(0, 2), job(0.5, 1), job(1, 4)], 1, 7),
        ([job(0, 1), job(0.1, 1), job(0.2, 1), job(0.3, 3)], 2, 4.1),  # the longest begins at 1.1
        ([job(0, 1), job(0.1, 1), job(0.2, 1), job(0.3, 3, True)], 2, 4),  # and now at 1
    ],
)
def test_who_is_done_takes_the_next(jobs: list[Job], processes: int, end: float) -> None:
    assert makespan(jobs, processes) == pytest.approx(end)


def test_all_variants_are_counted() -> None:
    jobs = [Job("a", 0, 1, False), Job("b", 1, 5, False), Job("a", 2, 2, False)]
    *kernels, whole = report("0.6B", jobs, 2)
    assert [(row["kernel"], row["variants"], row["cpu_s"]) for row in kernels] == [("b", 1, 5), ("a", 2, 3)]
    assert (whole["variants"], whole["cpu_s"], whole["longest_s"], whole["done_s"]) == (3, 8, 5, 6)
