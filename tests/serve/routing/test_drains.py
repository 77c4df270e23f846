"""What an operator asks of replicas, as several processes of a server see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.serve.routing.drains import LastReplica, ReplicaDrains


def test_all_processes_see_it_and_one_that_starts_again_too(tmp_path: Path) -> None:
    first, second = ReplicaDrains(3, tmp_path), ReplicaDrains(3, tmp_path)
    first.drain(1, others=[0, 2])
    assert [second.drains(replica) for replica in range(3)] == [False, True, False]
    assert [ReplicaDrains(3, tmp_path).drains(replica) for replica in range(3)] == [False, True, False]
    second.resume(1)
    assert not first.drains(1)


@pytest.mark.parametrize("shared", [True, False])
def test_the_last_that_takes_requests_is_not_drained(tmp_path: Path, shared: bool) -> None:
    drains = ReplicaDrains(3, tmp_path if shared else None)
    drains.drain(0, others=[1, 2])
    drains.drain(1, others=[0, 2])
    with pytest.raises(LastReplica, match="replica 2 is the last that takes requests: resume another one first"):
        drains.drain(2, others=[0, 1])
    drains.resume(0)
    drains.drain(2, others=[0, 1])
    with pytest.raises(LastReplica, match="replica 0"):
        drains.drain(0, others=[])  # the others have ended
    assert [drains.drains(replica) for replica in range(3)] == [False, True, True]
