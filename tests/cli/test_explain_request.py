"""`strata explain --request` against a server, and what it says where there is none."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.bench.load.answer import refusal_message
from strata.cli.explain_output import draw, values
from strata.cli.main import app
from strata.engine.watch.request_ledger import Part as LedgerPart
from strata.engine.watch.request_ledger import RequestLedger
from strata.plan.explain.explanation import LostTime, Waterfall
from strata.plan.explain.one_request import explain_request
from tests.plan.report.sample import sample

RUNNER = CliRunner()
TOLD: dict[str, Any] = {
    "object": "request.ledger",
    "id": "req_1",
    "model": "builtin",
    "device": "NVIDIA H200",
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


def test_a_request_is_told_as_a_waterfall(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_API_KEY", "sk-1")
    asked = ["explain", "--url", url, "--request", "cmpl-1"]
    result = RUNNER.invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "waited for a slot" in result.output
    assert re.search(r"floor +not known", result.output)
    assert "saves 75%: more slots (--max-num-seqs)" in result.output
    assert "request cmpl-1, which ended with stop; NVIDIA H200" in result.output
    trace = tmp_path / "request.json"
    found = json.loads(RUNNER.invoke(app, [*asked, "--json", "--trace", str(trace)]).stdout)
    assert found["device"] == "NVIDIA H200"
    slices = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert slices == ["queue", "prefill", "decode"]
    assert found["waterfall"]["measured"] == 2.0
    assert found["waterfall"]["unexplained"] == pytest.approx(0.0)
    assert found["verdict"]["cause"] == "queueing"


@pytest.mark.parametrize(
    ("id", "message"),
    [("cmpl-2", "HTTP 404: nothing at /requests/cmpl-2"), ("../x?y", "nothing at /requests/..%2Fx%3Fy")],
)
def test_a_request_that_the_server_does_not_know(
    url: str, id: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_API_KEY", "sk-1")
    result = RUNNER.invoke(app, ["explain", "--url", url, "--request", id])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_brackets_in_a_name_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """An x-request-id is what its client wanted it to be."""
    spent: dict[LedgerPart, float] = {"prompt": 0.1, "decode": 0.3}
    name = "[/a] :smile:[red]b"
    draw(
        explain_request(
            RequestLedger(0.4, spent, 0.1, {"prompt": 0.1}, "stop", 9, 0, 5, 1, 4, 2.0, 0, None),
            name=name,
            server="http://x",
        )
    )
    title = capsys.readouterr().out.splitlines()[0]
    assert title.strip() == f"request {name}, which ended with stop", "of a device that nobody told"


def test_an_unknown_floor_is_null_and_what_is_a_rounding_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    parts = (LostTime("a", "system", "host", 0.3), LostTime("b", "system", "host", -0.005))
    found = replace(sample(), waterfall=Waterfall(0.3 - 0.005 - 1e-17, 0.0, parts))
    assert (values(found)["waterfall"]["floor"], values(found)["waterfall"]["share_of_floor"]) == (None, None)
    assert values(sample())["waterfall"]["share_of_floor"] == sample().waterfall.floor / 1.9
    draw(found)
    shown = capsys.readouterr().out
    assert re.search(r"not explained +0 +0.0%", shown)
    assert re.search(r"b +system +host +-5 ms +-1.7%", shown)


def test_a_key_that_is_missing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATA_API_KEY", raising=False)
    result = RUNNER.invoke(app, ["explain", "--url", url, "--request", "cmpl-1"])
    assert "wants an API key: set STRATA_API_KEY" in str(result.exception)


def test_a_page_of_another_server_is_one_line() -> None:
    assert refusal_message(b"<html>\n  <h1>Not here</h1>\n</html>\n") == "<html> <h1>Not here</h1> </html>"
