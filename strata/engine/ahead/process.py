"""Starts the process that compiles ahead of a start, in the least time that its imports allow:
`python -m strata.engine.ahead.process '{"engine": ..., "device": ...}'`."""

from __future__ import annotations

import gc
import signal
from threading import Thread

from triton.runtime.cache import triton_key

from strata.engine.lifeline import end_with_parent


def main() -> None:
    """Compile what `sys.argv` asks for."""
    end_with_parent(signal.SIGKILL)
    gc.disable()  # imports make many objects and drop few
    reading = Thread(target=triton_key)  # the sum over 400 MB of Triton that names what it caches; it is kept
    reading.start()
    from strata.engine.ahead import worker  # imports PyTorch meanwhile

    reading.join()  # those that compile are forks: no thread may run
    worker.main()


if __name__ == "__main__":
    main()
