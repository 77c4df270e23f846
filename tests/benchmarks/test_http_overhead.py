"""What HTTP costs, measured small: the API process starts before the stub, and nothing of the load is lost."""

from __future__ import annotations

import pytest

from benchmarks import http_overhead
from benchmarks.http_overhead import ENDPOINTS, STREAM_PROMPT_TOKENS, measure_first_token, measure_streaming


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_streams_get_all_their_tokens(endpoint: str) -> None:
    found = measure_streaming(endpoint, streams=4, pace=400.0, seconds=0.2)
    assert found.faults == {}
    assert found.itl_ms is not None
    assert 0 < found.tokens_per_second <= 2 * 400.0


def test_the_first_token_is_measured_with_http_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_overhead, "FIRST_TOKENS", 10)
    found = measure_first_token("completions", STREAM_PROMPT_TOKENS, rate=None)
    assert found.added_ms > 0
    assert found.engine_ttft_ms.p50 > 0


def test_an_api_process_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_overhead, "API", "strata.no_such_module")
    with pytest.raises(RuntimeError, match="No module named"), http_overhead.processes(interval=0.01):
        raise AssertionError("it is not there")
