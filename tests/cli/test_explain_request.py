"""`strata explain --request` against a server, and what it says where there is none."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.bench.load.answer import refusal_message
from strata.cli.main import app

RUNNER = CliRunner()
TOLD: dict[str, Any] = {
    "object": "request.ledger",
    "id": "req_1",
    "generations": [
        {
            "seconds": 2.0, "parts": {"slot": 1.5, "prompt": 0.1, "decode": 0.4}, "time_to_first_token": 1.6,
            "first_token_parts": {"slot": 1.5, "prompt": 0.1}, "finish_reason": "stop", "prompt_tokens": 9,
            "cached_tokens": 0, "output_tokens": 5, "prompt_steps": 1, "decode_steps": 4, "sequences_beside": 2.0,
            "preemptions": 0, "floor": None,
        }
    ],
}  # fmt: skip


class Answers(BaseHTTPRequestHandler):
    """Knows the request `cmpl-1` and the key `sk-1`."""

    def do_GET(self) -> None:
        keyed = self.headers["authorization"] == "Bearer sk-1"
        status = 401 if not keyed else 200 if self.path == "/requests/cmpl-1" else 404
        body = json.dumps(TOLD if status == 200 else {"error": {"message": f"nothing at {self.path}"}}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_is_told_as_a_waterfall(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_API_KEY", "sk-1")
    asked = ["explain", "--url", url, "--request", "cmpl-1"]
    result = RUNNER.invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "waited for a slot" in result.output
    assert re.search(r"floor +not known", result.output)
    assert "saves 75%: more slots (--max-num-seqs)" in result.output
    found = json.loads(RUNNER.invoke(app, [*asked, "--json"]).stdout)
    assert found["waterfall"]["measured"] == 2.0
    assert found["waterfall"]["unexplained"] == pytest.approx(0.0)
    assert found["verdict"]["cause"] == "queueing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request", "cmpl-2"], "HTTP 404: nothing at /requests/cmpl-2"),
        (["--request", "../x?y"], "nothing at /requests/..%2Fx%3Fy"),
        (["--request", " "], "give the id of an answer, like chatcmpl-..., or its x-request-id"),
        (["--request", "cmpl-1", "--url", "http://127.0.0.1:99999"], "give a port from 1 to 65535"),
        (["--request", "cmpl-1", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--request", "cmpl-1", "--model", "x"], "a request of a server, of which --model says nothing"),
        ([], "--url is of the server that has a --request"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_said(
    url: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_API_KEY", "sk-1")
    result = RUNNER.invoke(app, ["explain", *([] if "--url" in arguments else ["--url", url]), *arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_a_key_that_is_missing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATA_API_KEY", raising=False)
    result = RUNNER.invoke(app, ["explain", "--url", url, "--request", "cmpl-1"])
    assert "wants an API key: set STRATA_API_KEY" in str(result.exception)


def test_a_page_of_another_server_is_one_line() -> None:
    assert refusal_message(b"<html>\n  <h1>Not here</h1>\n</html>\n") == "<html> <h1>Not here</h1> </html>"
