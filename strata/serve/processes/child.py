"""A process that the launcher starts, tells its job, and leaves behind in no case."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress

from strata.files.child_modules import command_of, with_package
from strata.serve.http.keys import ENVIRONMENT


class Child:
    """A Python module run as a process, in a process group of its own, so that Ctrl-C reaches its parent alone.

    Its job is the first line of its standard input, which stays open for as long as the parent lives.
    ended: its exit status (negative: the signal that killed it), once it has one.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.ended: asyncio.Task[int] = asyncio.create_task(process.wait())

    @classmethod
    async def start(
        cls,
        module: str,
        job: bytes,
        *,
        pass_fds: Sequence[int] = (),
        talks: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Run `module`. What it prints goes to standard error, unless it talks to its parent by `read_line`.

        environment: variables that it has besides or instead of its parent's.
        """
        process = await asyncio.create_subprocess_exec(
            *command_of(module),
            stdin=PIPE,
            stdout=PIPE if talks else sys.stderr.fileno(),
            pass_fds=pass_fds,
            start_new_session=True,
            env=with_package(
                {name: value for name, value in os.environ.items() if name not in ENVIRONMENT} | dict(environment or {})
            ),
        )
        assert process.stdin is not None
        process.stdin.write(job + b"\n")
        with suppress(ConnectionError):  # it has ended already; `ended` says how
            await process.stdin.drain()
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: bytes) -> None:
        """A further line of its standard input, for one that reads on. One that has ended hears nothing."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")

    async def read_line(self) -> bytes:
        """The next line that it prints; empty when it prints no more."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    def terminate(self) -> None:
        """Ask it to end."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End it at once, and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, seconds: float) -> None:
        """Ask it to end, and end it if it takes longer than this."""
        self.terminate()
        await asyncio.wait((self.ended,), timeout=seconds)
        self.kill()
        await self.ended


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}" + (" (out of memory?)" if -status == signal.SIGKILL else "")
