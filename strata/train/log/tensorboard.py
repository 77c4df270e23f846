"""The log as TensorBoard's event files, by its own writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """A scalar for each number of a line. A run that goes on hides what an earlier one wrote after its step."""

    def __init__(self, folder: Path, step: int) -> None:
        """step: how many steps are done."""
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if step:
            # Readers drop everything from this step on that stands in earlier files.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        scalars = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()
