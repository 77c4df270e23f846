"""What a request tells the engine, the limits and the metrics on its way, and what a server says of itself."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from strata.engine.sampling_params import SamplingParams
from strata.serve.http.keys import KeyHash
from tests.serve.scripted import EOS, NAME, Scripted, Serve, delta

DONE = [[delta(0, [5, 6]), delta(1, [7])], [delta(0, [EOS], "stop"), delta(1, [8], "length")]]


def series(server: Scripted) -> dict[str, float]:
    """The metrics by name and labels, the model's name left out."""
    text = server.client.get("/metrics").text
    for label in (f'{{model_name="{NAME}"}}', f',model_name="{NAME}"', f'model_name="{NAME}",'):
        text = text.replace(label, "")
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_fields_over_the_defaults_of_the_model(serve_script: Serve) -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.8, top_k=40, repetition_penalty=1.1, max_tokens=5)
    with serve_script([[delta(0, [EOS], "stop")]], defaults=defaults) as server:
        server.chat(top_p=0.9, stop="x", seed=4, logit_bias={"7": -1}, logprobs=True, top_logprobs=3)
        server.complete()
        chat, completion = (add.params for add in server.engine.added)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.repetition_penalty) == (0.6, 0.9, 40, 1.1)
    assert (chat.stop, chat.seed, chat.logit_bias, chat.logprobs) == ("x", 4, {7: -1.0}, 3)
    assert (chat.max_tokens, completion.max_tokens) == (None, 16)
    assert (completion.top_p, completion.logprobs, completion.prompt_logprobs) == (0.8, None, None)


def test_bad_words_as_they_begin_a_text_and_follow_a_space(serve_script: Serve, tokenizer: Any) -> None:
    with serve_script([[delta(0, [EOS], "stop")]]) as server:
        server.complete(bad_words=["red"])
        expected = [tokenizer.encode(text, add_special_tokens=False) for text in ("red", " red")]
        assert [list(ids) for ids in server.engine.added[0].bad_words] == expected


def test_many_bad_words_are_tokenized_once_and_off_the_loop(
    serve_script: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    with serve_script([[delta(0, [EOS], "stop")]]) as server:
        encode = server.state.tokenizer.encode

        def noted(text: str, add_special_tokens: bool = True) -> list[int]:
            if "bad" in text:
                threads.append(threading.get_ident())
            return encode(text, add_special_tokens)

        monkeypatch.setattr(server.state.tokenizer, "encode", noted)
        server.complete(prompt=["a"] * 20, bad_words=[f"bad {number} " + "x" * 100 for number in range(50)])
        assert 0 < len(threads) <= 6 * 50
        threads.clear()
        server.complete(bad_words=["bad"])
        (loops,) = set(threads)
        assert len(server.engine.added[0].bad_words) >= 50
        server.complete(bad_words=["bad" * 80] * 100)
        assert threads[-1] != loops


def test_each_key_has_its_salt_and_its_own_limits(serve_script: Serve) -> None:
    keys = [KeyHash.of("alice", "sk-a"), KeyHash.of("bob", "sk-b")]
    with serve_script([[delta(0, [EOS], "stop")]], keys=keys, settings={"requests_per_minute": 1}) as server:
        answers = [
            server.client.post(
                "/v1/completions", json={"prompt": "Hi"}, headers={"authorization": f"Bearer sk-{name}"}
            ).status_code
            for name in "aab"
        ]
        assert answers == [200, 429, 200]
        salts = [add.salt for add in server.engine.added]
    assert all(salts)
    assert len(set(salts)) == 2


def test_a_finished_request_is_settled_and_counted(serve_script: Serve) -> None:
    script = [[delta(0, [5, 6], scheduled=time.monotonic(), cached_tokens=1), delta(1, [7])], DONE[1]]
    with serve_script(script, settings={"tokens_per_minute": 1000}) as server:
        server.complete(n=2, max_tokens=400)
        assert server.state.limits.in_flight == 0
        server.complete(n=2, max_tokens=400)  # what was reserved and not used has been given back
        told = series(server)
        prompt = len(server.engine.added[0].prompt)
    assert told['strata_requests_total{endpoint="completions"}'] == 2
    assert told['strata_request_success_total{finished_reason="length"}'] == 2
    assert told["strata_generation_tokens_total"] == 10
    assert told["strata_prompt_tokens_total"] == 2 * prompt
    assert told["strata_time_to_first_token_seconds_count"] == 2
    assert told["strata_inter_token_latency_seconds_count"] == 4
    assert told["strata_aborts_total"] == 0


def test_more_than_may_wait_is_told_to_come_again(serve_script: Serve) -> None:
    """The engine runs 64 sequences at once, and one more may wait."""
    with serve_script([], hangs=True, settings={"max_queue": 1, "request_timeout": 3.0}) as server:
        bodies = [{"prompt": "a", "n": 16}] * 4 + [{"prompt": "a"}]
        threads = [
            threading.Thread(target=server.client.post, args=("/v1/completions",), kwargs={"json": body})
            for body in bodies
        ]
        for thread in threads:
            thread.start()
        while server.state.limits.in_flight < 65:
            time.sleep(0.01)
        start = time.monotonic()
        refused = server.client.post("/v1/completions", json={"prompt": "a"})
        assert time.monotonic() - start < 2.5
        for thread in threads:
            thread.join()
        assert series(server)['strata_rejects_total{reason="queue_full"}'] == 1
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1


def test_a_lead_of_the_engine_past_a_stop_string_is_not_charged(serve_script: Serve, tokenizer: Any) -> None:
    ids = tokenizer.encode(" red blue the", add_special_tokens=False)
    with serve_script([[delta(0, ids)]]) as server:
        reply = server.complete(stop="blue", return_token_ids=True)
    assert reply["usage"]["completion_tokens"] == 2
    assert reply["choices"][0]["token_ids"] == ids[:2]


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models", f"/v1/models/{NAME}", "/metrics", "/"])
def test_what_a_server_says_of_itself(serve_script: Serve, path: str) -> None:
    with serve_script([]) as server:
        assert server.client.get(path).status_code == 200
        head = server.client.head(path)
        assert head.status_code == 200
        assert int(head.headers["content-length"]) > 0
        server.state.draining = True
        assert server.client.head("/ready").status_code == 503


def test_a_server_that_drains(serve_script: Serve) -> None:
    with serve_script([]) as server:
        server.state.draining = True
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/ready").status_code == 503
        refused = server.client.post("/v1/completions", json={"prompt": "Hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        assert series(server)['strata_rejects_total{reason="draining"}'] == 1  # asking for /ready is none


def test_a_dead_engine(serve_script: Serve) -> None:
    with serve_script([]) as server:
        server.engine.alive = False
        for path in ("/health", "/ready"):
            answer = server.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert server.client.post("/v1/completions", json={"prompt": "Hi"}).status_code == 503
