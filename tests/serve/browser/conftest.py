"""A browser and servers for the tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.serve.browser.server import talkative_server
from tests.serve.browser.webdriver import Browser, missing

REPLY = """Adding the **tens** first makes this *easy*:

1. `40 + 30 = 70`
2. `7 + 8 = 15`

```python
assert 47 + 38 == 85
```

| step | sum |
|---|---|
| tens | 70 |

See <b>not bold</b> and [a link](https://example.org).

"""


@dataclass(frozen=True)
class Server:
    """url: where it listens. reply_tokens: of one whole REPLY."""

    url: str
    reply_tokens: int


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Says REPLY, ten milliseconds a token, to whoever asks whatever."""
    with talkative_server(tmp_path_factory.mktemp("s"), REPLY) as (url, tokens):
        yield Server(url, tokens)


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser, server: Server) -> Iterator[Browser]:
    """The window as a new visitor's, on the chat page; afterwards it must have met no violation and no script error."""
    window.open(f"{server.url}/page/icon.svg")
    window.run("localStorage.clear(); sessionStorage.clear()")
    # A panel that slides is not where a click on it lands, or lies over what is clicked.
    window.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    window.resize(1280, 900)
    window.open(server.url)
    window.console()
    yield window
    told = [line for line in window.console() if line.startswith("SEVERE") and "Failed to load resource" not in line]
    assert told == []
