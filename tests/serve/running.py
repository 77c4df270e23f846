"""A real `strata serve` in a process of its own, and what a test wants to know of it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

# Seconds, for a slow machine that has more to do: there a server may take a minute to start.
PATIENCE = 180.0
ENGINE = b"strata.engine.process.worker"
LONG = {"temperature": 0, "ignore_eos": True, "stream": True}
QUESTION = {"model": "builtin", "prompt": "Once upon a time"}
# httpcore's pool closes an idle connection over its limits, also one that another thread was just given.
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


def serve(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `strata serve`; standard output and error come together."""
    return subprocess.Popen(
        [sys.executable, "-m", "strata", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


def refusal(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, float]:
    """Exit status, output, and CPU seconds of a `strata serve` that does not come to serve.

    CPU seconds, since other tests run beside this one; alone, it takes no longer than that.
    """
    before = _cpu_seconds_of_children()
    process = serve(*arguments, environment=environment)
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, output, _cpu_seconds_of_children() - before


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Running:
    """url: where it serves. folder: its private one. pid: of the launcher.

    lines: what it has printed so far.
    """

    def __init__(self, process: subprocess.Popen[str], key: str | None) -> None:
        self.process = process
        self.pid = process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        greeting = wait_for(lambda: next((line for line in self.lines if "Strata serves" in line), None), self.output)
        self.url = re.search(r"http://\S+", greeting).group()  # type: ignore[union-attr]
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, limits=NO_LIMITS)
        self.folder = Path(self._engine_socket().split()[-1]).parent

    def output(self) -> str:
        return "".join(self.lines)

    def children(self) -> list[int]:
        """Processes that the launcher has started, and those that they have."""
        return descendants(self.pid)

    def engine(self) -> int:
        """The engine's process id."""
        found: int = wait_for(lambda: next((one for one in self.children() if ENGINE in command_line(one)), 0))
        return found

    def status(self, path: str) -> int:
        """HTTP status of a GET; 0 if nothing listens."""
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def metric(self, name: str) -> float:
        """A number of /metrics, summed over its labels."""
        text = self.http.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={**QUESTION, **fields})

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """A long completion's events as they come; the one before the last may be an error."""
        with self.http.stream("POST", "/v1/completions", json={**QUESTION, **LONG, **fields}) as response:
            if response.status_code != 200:
                raise AssertionError(response.read().decode())
            data = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            yield (json.loads(one) if one != "[DONE]" else {"done": True} for one in data)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def send(self, **fields: Any) -> socket.socket:
        """Send a completion and leave its answer unread; whoever closes the connection has left."""
        connection = socket.create_connection(self.address, timeout=PATIENCE)
        connection.sendall(http_request("/v1/completions", {**QUESTION, **fields}))
        return connection

    def load(self) -> tuple[float, float, float]:
        """Sequences that run, sequences that wait, share of the pages in use."""
        names = ("strata_num_requests_running", "strata_num_requests_waiting", "strata_kv_cache_usage_perc")
        text = self.http.get("/metrics").text
        running, waiting, usage = (float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.M)[1]) for name in names)  # type: ignore[index]
        return running, waiting, usage

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status, once it has one."""
        status = self.process.wait(seconds)
        self._reader.join(PATIENCE)
        return status

    def _engine_socket(self) -> str:
        """What the engine listens on, from the kernel's list of sockets."""
        inodes = {os.readlink(f"/proc/{self.engine()}/fd/{fd}") for fd in os.listdir(f"/proc/{self.engine()}/fd")}
        lines = Path("/proc/net/unix").read_text().splitlines()
        return next(
            line for line in lines if re.search(r"engine-\d+\.sock", line) and f"socket:[{line.split()[6]}]" in inodes
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


def http_request(path: str, body: Any) -> bytes:
    """A request as it goes over the wire."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


@contextmanager
def running(*arguments: str, key: str | None = None, environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """A server on a free port, from when it is ready; whatever is left of it in the end is killed."""
    process = serve("--port", "0", *arguments, environment=environment)
    server = None
    children: list[int] = []
    try:
        server = Running(process, key)
        children = server.children()
        yield server
        children += server.children()
    finally:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):  # the second one ends it at once
            process.send_signal(number)
            time.sleep(0.05)
        process.wait()
        for pid in children:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        if server is not None:
            shutil.rmtree(server.folder, ignore_errors=True)  # after a kill nobody else does


def wait_for(condition: Callable[[], Any], explain: Callable[[], str] = str, seconds: float = PATIENCE) -> Any:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {explain()}")


def descendants(pid: int) -> list[int]:
    """Processes below one, by /proc."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        parents.setdefault(parent, []).append(int(folder.name))
    found = list(parents.get(pid, []))
    for child in found:  # grows as it goes
        found += parents.get(child, [])
    return found


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    """Memory of a process, as Linux counts it."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
