"""A headless Chromium driven through chromedriver's own protocol (W3C WebDriver): what the page tests need of it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the standard gives element references
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def missing() -> str | None:
    """Why there is no browser here; None if there is one."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install chromium chromium-driver)"
    return None


class Browser:
    """One window with a new, empty profile. Leave its `with` block to end both processes.

    offline_but: the only host that names lead to; all others fail to resolve, as without a network.
    """

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 800, offline_but: str = "127.0.0.1") -> None:
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        self._base = f"http://127.0.0.1:{self._port()}"
        flags = [
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {offline_but}",
        ]
        options = {"args": flags}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            started = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end_driver()
            raise
        self._session = f"/session/{started['sessionId']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._end_driver()

    def open(self, url: str) -> None:
        self._do("POST", "/url", {"url": url})

    def reload(self) -> None:
        self._do("POST", "/refresh", {})

    def resize(self, width: int, height: int) -> None:
        self._do("POST", "/window/rect", {"width": width, "height": height})

    def find(self, selector: str) -> str:
        """The first element that a CSS selector finds."""
        found: str = self._do("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        return found

    def click(self, selector: str) -> None:
        self._do("POST", f"/element/{self.find(selector)}/click", {})

    def write(self, selector: str, text: str) -> None:
        self._do("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def clear(self, selector: str) -> None:
        self._do("POST", f"/element/{self.find(selector)}/clear", {})

    def press(self, key: str) -> None:
        """A key, wherever the focus is."""
        value = KEYS.get(key, key)
        strokes = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self._do("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def text(self, selector: str) -> str:
        """What can be read there, in one look: between two the page may have changed."""
        text: str = self.run("return document.querySelector(arguments[0]).innerText", selector)
        return text

    def sees(self, selector: str) -> bool:
        """Whether it is there and visible."""
        script = "return document.querySelector(arguments[0])?.checkVisibility({visibilityProperty: true}) ?? false"
        seen: bool = self.run(script, selector)
        return seen

    def run(self, script: str, *arguments: object) -> Any:
        """What a function body in JavaScript returns; a promise is awaited."""
        return self._do("POST", "/execute/sync", {"script": script, "args": arguments})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._do("GET", "/screenshot")))

    def console(self) -> list[str]:
        """What the browser has logged since it was last asked, violations of the security policy among it."""
        entries = self._do("POST", "/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def cdp(self, command: str, **parameters: object) -> Any:
        """A command of Chromium's own protocol."""
        return self._do("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def wait(self, condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
        """The first true value of `condition`; raises TimeoutError that says what did not come."""
        deadline = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:g} s; the console says {self.console()}")
            time.sleep(0.02)

    def _end_driver(self) -> None:
        self._driver.terminate()
        self._driver.communicate(timeout=60)

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if "successfully on port " in line:
                return int(line.split("on port ")[1].strip(" .\n"))
        raise RuntimeError(f"chromedriver ended with {self._driver.wait()}")

    def _do(self, method: str, path: str, body: object = None) -> Any:
        return self._call(method, self._session + path, body)

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {json.load(error)['value']['message']}") from None
