"""Steps prepared by a thread while the device works on the ones before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from strata.train.data.loader import DataPosition, Loader, Step


@contextmanager
def prefetch(loader: Loader, place: DataPosition, steps: int, most: int = 4) -> Iterator[Iterator[Step]]:
    """The `steps` steps from `place` on, up to `most` of them prepared before they are asked for.

    An error of the loader is raised where its step is asked for. On leaving, whether all steps were taken or not, the
    thread has ended.
    """
    made: queue.SimpleQueue[Step | BaseException] = queue.SimpleQueue()
    room = threading.Semaphore(most)
    left = threading.Event()

    def prepare() -> None:
        at = place
        try:
            for _ in range(steps):
                room.acquire()
                if left.is_set():
                    return
                step = loader.step(at)
                made.put(step)
                at = step.next
        except BaseException as error:
            made.put(error)

    def taken() -> Iterator[Step]:
        for _ in range(steps):
            item = made.get()
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item

    thread = threading.Thread(target=prepare, name="data", daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        left.set()
        room.release()
        thread.join()
