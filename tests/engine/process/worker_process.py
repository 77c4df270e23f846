"""An engine process for tests: the built-in model on a CPU, reached as an API process reaches it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import strata

BUILTIN = Path(strata.__file__).parent / "models" / "builtin"
SCRIPT = "import sys; from strata.engine.process.worker import main; sys.exit(main())"


class WorkerProcess:
    """Runs until the `with` block ends. options: fields of EngineConfig.

    script: Python that runs `main`, when something in it is to be different.
    """

    def __init__(self, folder: Path, *, script: str | None = None, **options: Any) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self.address = f"ipc://{folder}/engine.sock"
        self._errors = folder / "stderr"
        command = ["-m", "strata.engine.process.worker"] if script is None else ["-c", script]
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stderr=errors)
        assert self.process.stdin is not None
        config = {"address": self.address, "model": str(BUILTIN), "device": "cpu", "check": True, **options}
        self.process.stdin.write(json.dumps(config).encode() + b"\n")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def ended(self, timeout: float) -> int:
        """Its exit code. Raises TimeoutExpired."""
        return self.process.wait(timeout)

    @property
    def errors(self) -> list[str]:
        """Lines of its standard error."""
        return self._errors.read_text().splitlines()
