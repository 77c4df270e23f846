"""The chat page in Chromium: send, stream, stop, keep, settings, errors, key."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.serve.http.keys import KeyHash
from tests.serve.browser.conftest import REPLY, Server
from tests.serve.browser.server import talkative_server
from tests.serve.browser.webdriver import Browser
from tests.serve.live import LiveServer

LAST = ".message.assistant:last-child"


def ask(browser: Browser, text: str, token_limit: int | None = None) -> None:
    if token_limit is not None:
        browser.run("document.querySelector('#max_tokens').value = arguments[0]", token_limit)
        browser.run("document.querySelector('#sampling').dispatchEvent(new Event('input', {bubbles: true}))")
    browser.write("#prompt", text)
    browser.press("Enter")


def content(browser: Browser) -> str:
    """What the newest reply says so far; empty before there is one."""
    script = "return document.querySelector(arguments[0] + ' .content')?.innerText ?? ''"
    text: str = browser.run(script, LAST)
    return text


def notice(browser: Browser) -> str:
    """The error below a message, once there is one."""
    script = "return document.querySelector('.message .notice span')?.textContent"
    text: str = browser.wait(lambda: browser.run(script), "an error")
    return text


def finished(browser: Browser) -> bool:
    done: bool = browser.run(
        "return document.querySelector(arguments[0] + ' .message-foot button') !== null && "
        "document.querySelector('#stop').hidden",
        LAST,
    )
    return done


def metric(server: Server | LiveServer, name: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def listed(browser: Browser) -> list[str]:
    titles: list[str] = browser.run(
        "return [...document.querySelectorAll('.conversation .open')].map((one) => one.textContent)"
    )
    return titles


def kept(browser: Browser) -> list[Any]:
    """The conversations in the browser's storage."""
    values = browser.run("return Object.entries(localStorage).filter(([k]) => k.startsWith('strata.conversation.'))")
    return [json.loads(value) for _, value in values]


def test_a_reply_streams_and_is_told_of(browser: Browser, server: Server) -> None:
    assert browser.sees("#empty")
    began = time.monotonic()
    tokens = 5 * server.reply_tokens  # some seconds, so that looks at it, however late, fall into them
    ask(browser, "What is 47 + 38?", tokens)
    seen = [browser.wait(lambda: content(browser), "the first token")]
    seen.append(browser.wait(lambda: content(browser) if len(content(browser)) > len(seen[0]) else "", "more of it"))
    assert not finished(browser), "it was seen while it came"
    browser.wait(lambda: finished(browser), "the end of the reply")
    took = time.monotonic() - began
    assert not browser.sees("#empty")
    stats = browser.text(f"{LAST} .stats")
    assert "first token" in stats
    assert f"{tokens} tokens" in stats
    assert "cut at its length" in stats
    rate = float(stats.split("tokens/s")[0].split()[-1])
    assert rate < 120, "the engine gives a token every ten milliseconds, and a page draws the first one late"
    # The first piece may bring several tokens, and what comes behind it may be slow.
    assert rate > 0.3 * tokens / took, "all of them came in the time that was waited here"


def test_drawing_leaves_most_of_the_time(browser: Browser) -> None:
    """Replies that take long to draw are drawn the more seldom; what comes meanwhile is drawn together."""
    script = """
        const { Pace } = await import("/page/pace.js");
        const [clock, later, frame] = [performance.now, window.setTimeout, window.requestAnimationFrame];
        const waits = [];
        let now = 0;
        let took = 100;
        performance.now = () => now;
        window.setTimeout = (then, wait) => { waits.push(wait); Promise.resolve().then(then); return 1; };
        window.requestAnimationFrame = (then) => { Promise.resolve().then(then); return 1; };
        const pace = new Pace(() => { now += took; took = 1; });
        for (let burst = 0; burst < 3; burst += 1) {
          for (let change = 0; change < 5; change += 1) pace.changed();
          await new Promise((done) => later(done, 20));
        }
        [performance.now, window.setTimeout, window.requestAnimationFrame] = [clock, later, frame];
        return waits;
    """
    assert browser.run(script) == [0, 300, 3]


def test_markdown_is_shown_and_markup_is_text(browser: Browser, server: Server) -> None:
    ask(browser, "Show me all you can", server.reply_tokens)
    browser.wait(lambda: finished(browser), "the end of the reply")
    found = browser.run(
        "const at = (one) => document.querySelector(arguments[0] + ' .content ' + one)?.textContent;"
        "return ['strong', 'em', 'ol li:nth-child(2) code', '.code-block pre', 'table td', 'a', 'b'].map(at)",
        LAST,
    )
    assert found == ["tens", "easy", "7 + 8 = 15", "assert 47 + 38 == 85", "tens", "a link", None]
    assert "<b>not bold</b>" in content(browser)
    assert kept(browser)[0]["messages"][1]["content"].strip() == REPLY.strip()


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_reply_here_and_at_the_engine(browser: Browser, server: Server, how: str) -> None:
    aborts = metric(server, "strata_aborts_total")
    ask(browser, "Count to a million", 5000)
    browser.wait(lambda: len(content(browser)) > 20, "some text")
    if how == "button":
        browser.click("#stop")
    else:
        browser.press("Escape")
    browser.wait(lambda: finished(browser), "the reply to be over")
    text = content(browser)
    assert "stopped" in browser.text(f"{LAST} .stats")
    browser.wait(lambda: metric(server, "strata_aborts_total") == aborts + 1, "the engine's abort")
    browser.wait(lambda: metric(server, "strata_num_requests_running") == 0, "an idle engine")
    assert content(browser) == text
    assert text.strip() != ""


def test_a_reload_keeps_conversations(browser: Browser, server: Server) -> None:
    browser.click("#settings-toggle")
    browser.write("#system", "Be brief.")
    ask(browser, "first question", 12)
    browser.wait(lambda: finished(browser), "the first reply")
    said = content(browser)
    browser.click("#new")
    ask(browser, "second question", 12)
    browser.wait(lambda: finished(browser), "the second reply")
    assert listed(browser) == ["second question", "first question"]
    browser.reload()
    assert listed(browser) == ["second question", "first question"]
    assert browser.text(".message.user .content") == "second question"
    browser.click(".conversation:nth-child(2) .open")
    assert browser.text(".message.user .content") == "first question"
    assert content(browser) == said
    assert browser.run("return document.querySelector('#system').value") == "Be brief."
    assert browser.run("return document.querySelector('#max_tokens').value") == "12"


def test_a_reload_in_the_middle_keeps_what_had_come(browser: Browser) -> None:
    ask(browser, "a long one", 5000)
    browser.wait(lambda: any(len(one["messages"][1]["content"]) > 20 for one in kept(browser)), "some of it kept")
    browser.reload()
    assert len(content(browser)) > 20
    assert not browser.sees(".notice")
    assert "cut off" in browser.text(f"{LAST} .stats")
    browser.reload()
    assert "cut off" in browser.text(f"{LAST} .stats"), "also later"


def test_rename_and_delete(browser: Browser) -> None:
    ask(browser, "the question", 4)
    browser.wait(lambda: finished(browser), "the reply")
    browser.click(".conversation [aria-label=Rename]")
    browser.write(".conversation input", "a better name")
    browser.press("Enter")
    assert listed(browser) == ["a better name"]
    browser.reload()
    assert listed(browser) == ["a better name"]
    browser.click(".conversation [aria-label=Delete]")
    assert listed(browser) == []
    assert kept(browser) == []
    browser.click("#toast button")
    assert listed(browser) == ["a better name"]
    assert browser.text(".message.user .content") == "the question"
    browser.click(".conversation [aria-label=Delete]")
    browser.reload()
    assert listed(browser) == []


def test_what_is_set_is_sent_and_nothing_else(browser: Browser) -> None:
    browser.run(
        "window.sent = []; const real = window.fetch;"
        "window.fetch = (url, options) => {"
        "  if (options?.body) sent.push(JSON.parse(options.body)); return real(url, options); }"
    )
    ask(browser, "without settings")
    browser.wait(lambda: finished(browser), "the first reply")
    browser.click("#settings-toggle")
    values = {"temperature": 0.4, "top_p": 0.9, "top_k": 40, "max_tokens": 7, "seed": 123}
    for name, value in values.items():
        browser.write(f"#{name}", str(value))
    browser.write("#system", "Be brief.")
    ask(browser, "with settings")
    browser.wait(lambda: len(browser.run("return sent")) == 2 and finished(browser), "the second reply")
    bare, full = browser.run("return sent")
    assert not set(bare) & set(values)
    assert {name: full[name] for name in values} == values
    assert [message["role"] for message in full["messages"]] == ["system", "user", "assistant", "user"]
    assert "7 tokens" in browser.text(f"{LAST} .stats")
    browser.click("#sampling [type=reset]")
    assert browser.wait(lambda: browser.run("return localStorage['strata.sampling']") == "{}", "the reset to be kept")


def test_an_error_is_shown_in_place_and_can_be_tried_again(browser: Browser) -> None:
    ask(browser, "too much", 10_000_000)
    assert "besides the 131,072 that “Most tokens” in the settings" in notice(browser)
    browser.run("document.querySelector('#max_tokens').value = 5")
    browser.click(".message .notice button:last-child")
    browser.wait(lambda: finished(browser), "the reply")
    assert browser.run("return document.querySelectorAll('.message').length") == 2
    assert content(browser) != ""


@pytest.mark.parametrize(
    ("status", "error", "headers", "told"),
    [
        (429, {"code": "requests_per_minute"}, {"retry-after": "12"}, "Your key has asked .* in 12 seconds."),
        (503, {"code": "queue_full"}, {"retry-after": "1"}, "Too many are asking .* in a second."),
        (400, {"param": "top_p"}, {}, "The server does not take what the settings have for “Top p”."),
        (404, {"code": "model_not_found"}, {}, "The server has another model now: reload the page."),
        (500, {"code": "internal_error"}, {}, "Something went wrong in the server."),
        (502, None, {}, "The server is in trouble and did not answer."),
        (400, {"message": "the template wants turns"}, {}, "The server did not take this: the template wants turns"),
    ],
)
def test_errors_are_told_in_plain_words(
    browser: Browser, status: int, error: dict[str, str] | None, headers: dict[str, str], told: str
) -> None:
    words = {"message": "max_tokens: Input should be less than 2147483648", "param": None, "code": None}
    body = "<html>" if error is None else json.dumps({"error": words | error})
    answer = json.dumps({"status": status, "headers": headers})
    browser.run(f"window.fetch = async () => new Response({json.dumps(body)}, {answer})")
    ask(browser, "anything")
    said = notice(browser)
    assert re.match(told, said)
    assert "Input should" not in said


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        (['data: {"error": {"message": "gone", "code": "engine_dead"}}\n\n'], "The model has stopped working."),
        ([], "The connection was lost"),
        (["data: not JSON\n\n"], "The connection was lost"),
    ],
)
def test_a_stream_that_ends_early_is_an_error_below_what_had_come(
    browser: Browser, chunks: list[str], told: str
) -> None:
    first = 'data: {"choices": [{"index": 0, "delta": {"content": "so far"}, "finish_reason": null}]}\n\n'
    body = json.dumps("".join([first, *chunks]))
    browser.run(f"window.fetch = async () => new Response({body})")
    ask(browser, "anything")
    assert told in notice(browser)
    assert content(browser) == "so far"


def test_events_are_read_however_they_are_cut(browser: Browser) -> None:
    """The format has three line ends, comments, other fields, several data lines; cuts may split a character."""
    stream = (
        ": hello\r\ndata: one\r\n\r\nevent: x\ndata: two\ndata:  and a half\n\ndata\r\rdata:größer 🙂\n\ndata: cut\n"
    )
    script = """
        const { eventData } = await import("/page/sse.js");
        const bytes = new TextEncoder().encode(text);
        const streamOf = (parts) => new ReadableStream({
          start(controller) {
            for (const part of parts) controller.enqueue(part);
            controller.close();
          },
        });
        const read = async (size) => {
          const parts = [];
          for (let at = 0; at < bytes.length; at += size) parts.push(bytes.slice(at, at + size));
          const found = [];
          for await (const data of eventData(streamOf(parts))) found.push(data);
          return found;
        };
        return Promise.all([1, 2, 3, 7, 1000].map(read));
    """
    for found in browser.run(f"return (async (text) => {{ {script} }})(arguments[0])", stream):
        assert found == ["one", "two\n and a half", "", "größer 🙂"]


def test_a_server_with_keys(window: Browser, browser: Browser, tmp_path: Any) -> None:
    keys = [KeyHash.of("alice", "sk-right")]
    with talkative_server(tmp_path, REPLY, keys=keys) as (url, _):
        window.open(url.replace("http://", "http://any:sk-right@") + "/page/icon.svg")  # as if typed into the prompt
        window.open(url)
        ask(window, "with what the browser sends by itself", 5)
        window.wait(lambda: finished(window), "a reply")
        window.click("#settings-toggle")
        window.write("#key", "sk-wrong\t")
        ask(window, "with a wrong key", 5)
        assert "key is wrong" in notice(window)
        window.click("#settings-close")
        window.click(".message .notice button")  # "Enter a key"
        assert window.run("return document.activeElement.id") == "key"
        window.clear("#key")
        window.write("#key", "sk-ключ\t")
        window.run("document.querySelector('.message .notice button:last-child').click()")
        window.wait(lambda: "no letters of other alphabets" in notice(window), "what no header can hold")
        window.clear("#key")
        window.write("#key", "sk-right\t")
        window.run("document.querySelector('.message .notice button:last-child').click()")
        window.wait(lambda: finished(window) and content(window), "a reply")
        assert "sk-right" not in window.run("return JSON.stringify(localStorage)")
        assert window.run("return sessionStorage['strata.key']") == "sk-right"


def test_keyboard_only(browser: Browser) -> None:
    ask(browser, "typed", 3)
    browser.wait(lambda: finished(browser), "the reply")
    name = "const at = document.activeElement; return at.getAttribute('aria-label') ?? (at.id || at.className)"
    reached = []
    for _ in range(40):
        browser.press("Tab")
        reached.append(browser.run(name))
    assert {"Settings", "new", "Rename", "Delete", "Copy message", "Answer again", "prompt", "skip"} <= set(reached)
    browser.run("document.querySelector('.skip').focus()")
    browser.press("Enter")
    assert browser.run(name) == "prompt"


def test_the_built_in_model_answers(window: Browser, browser: Browser, live: LiveServer) -> None:
    window.open(live.url)
    window.click("#settings-toggle")
    window.write("#temperature", "0")
    ask(window, "What is 47 + 38?")
    window.wait(lambda: finished(window), "the end of the reply")
    assert "85" in content(window)
    assert " tokens" in window.text(f"{LAST} .stats")
