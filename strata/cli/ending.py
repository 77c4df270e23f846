"""How a command ends: what a user did, or can mend, is a line on standard error; what is our fault is a traceback."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from strata.engine.startup.option_names import as_flags

INTERRUPTED = 130

_FREE_SPACE = "free some space and run the same command again"
# What can be done about a path.
_REMEDIES = {
    errno.ENOENT: "check the path, and that the folder it is to be in exists",
    errno.ENOTDIR: "a part of this path must be a folder and is a file; give another path",
    errno.EISDIR: "give a file",
    errno.EEXIST: "something else stands there; give another path",
    errno.EACCES: "choose a path that you may use, or change its permissions",
    errno.EPERM: "choose a path that you may use, or change its permissions",
    errno.EROFS: "choose a path that can be written to",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "choose a file system that takes files of this size",
    errno.EIO: "the disk or its connection has failed; choose another, then run the same command again",
}
# What also a call that names no path says of the machine, and not of a mistake in this program.
_WITHOUT_PATH = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EMFILE: "raise the limit of open files (ulimit -n) and run the same command again",
}


@contextmanager
def ending(options: Callable[[], Collection[str]] = tuple) -> Iterator[None]:
    """Around a whole command: bad input, a path that cannot be used and a fault of the engine are a message and exit
    code 1, an interrupt is exit code 130. Main thread only.

    options: tells which the command has, so that a message of the engine names them as they were given.
    """
    with _interrupts_end_imports():
        try:
            yield
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except Exception as error:
            said = explanation(error, options)
            if said is None:
                raise
            print(f"strata: error: {said}", file=sys.stderr)
            sys.exit(1)


def explanation(error: Exception, options: Callable[[], Collection[str]] = tuple) -> str | None:
    """What to tell a user; None for a mistake in this program, whose traceback is worth more. options: as `ending`."""
    if isinstance(error, OSError):
        return _of_path(error)
    faults = sys.modules.get("strata.engine.faults")  # where it is not loaded, none of it was raised
    if not isinstance(error, (ValueError, faults.EngineFault) if faults else ValueError):
        return None
    engine = sys.modules.get("strata.engine.engine_config")
    return str(error) if engine is None else as_flags(str(error), {*options()} & {*engine.EngineConfig.__annotations__})


def _of_path(error: OSError) -> str | None:
    remedies = _WITHOUT_PATH if error.filename is None else _REMEDIES
    if error.errno not in remedies:
        return None
    paths = " -> ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    return f"{paths}{': ' if paths else ''}{error.strerror}; {remedies[error.errno]}"


@contextmanager
def _interrupts_end_imports() -> Iterator[None]:
    """Ctrl-C ends the process at once while a module is imported. Extension modules such as torch's swallow a
    KeyboardInterrupt that is raised in the middle of their import, and the command would run on.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # such as a shell's job in the background, which ignores it
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    running = frame
    while running is not None:
        if running.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        running = running.f_back
    signal.default_int_handler(number, frame)
