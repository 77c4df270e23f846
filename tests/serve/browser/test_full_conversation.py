"""A conversation that has become longer than the model can read goes on, and says what the model no longer sees."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.browser.conftest import REPLY
from tests.serve.browser.server import talkative_server
from tests.serve.browser.test_chat_page import LAST, ask, content, finished, notice
from tests.serve.browser.webdriver import Browser

# A model that takes so many tokens, one for each character that is sent or written.
MODEL = """
    window.asked = [];
    window.fetch = async (url, options) => {
      if (url !== "/v1/chat/completions") {
        return new Response(JSON.stringify({ data: [{ id: "m", max_model_len: LIMIT }] }));
      }
      const { messages, max_tokens: most } = JSON.parse(options.body);
      const prompt = messages.reduce((sum, { content }) => sum + content.length, 0);
      asked.push(messages.map(({ content }) => content[0]).join(""));
      if (prompt + (most ?? 1) > LIMIT) {
        const error = { message: "at most LIMIT tokens", param: null, code: "context_length_exceeded" };
        return new Response(JSON.stringify({ error }), { status: 400 });
      }
      const usage = { prompt_tokens: prompt, completion_tokens: 20 };
      const choice = { index: 0, delta: { content: "r".repeat(20) }, finish_reason: "stop" };
      const chunk = { choices: [choice], usage: USAGE ? usage : null };
      return new Response(`data: ${JSON.stringify(chunk)}\\n\\ndata: [DONE]\\n\\n`);
    };
    document.querySelector("#key").dispatchEvent(new Event("change"));
"""
NOTE = ".forgotten"


def play(browser: Browser, limit: int, usage: bool = True) -> None:
    browser.wait(lambda: browser.text("#model"), "the real server's answer, which would come in between")
    browser.run(MODEL.replace("LIMIT", str(limit)).replace("USAGE", str(usage).lower()))
    browser.wait(lambda: browser.text("#model") == "m", "the model's limit")


def converse(browser: Browser, letters: str, length: int = 20) -> None:
    for letter in letters:
        ask(browser, letter * length)
        browser.wait(lambda: finished(browser), "the reply")


def asked(browser: Browser) -> list[str]:
    """The first letters of the messages of each request."""
    found: list[str] = browser.run("return asked")
    return found


def above_the_note(browser: Browser) -> str:
    """The first letters of the messages that stand above the note; nothing without a note."""
    script = """
        const note = document.querySelector(arguments[0]);
        const before = [...document.querySelectorAll(".message")].filter(
          (one) => note && note.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_PRECEDING);
        return before.map((one) => one.querySelector(".content").innerText[0]).join("");
    """
    found: str = browser.run(script, NOTE)
    return found


def test_old_turns_are_left_out_before_there_is_no_room(browser: Browser) -> None:
    play(browser, 200)
    converse(browser, "abcdef")
    # 160 tokens before the fifth question leave less than a quarter of 200: the older ones go until half is left
    assert asked(browser) == ["a", "arb", "arbrc", "arbrcrd", "crdre", "crdrerf"]
    assert above_the_note(browser) == "arbr"
    assert "no longer sees" in browser.text(NOTE)
    assert len(browser.run("return [...document.querySelectorAll('.message')]")) == 12, "all of it can still be read"
    browser.reload()
    assert above_the_note(browser) == "arbr", "kept with the conversation"


def test_a_refusal_is_answered_with_fewer_turns(browser: Browser) -> None:
    play(browser, 200, usage=False)  # nothing is known of tokens before the model refuses
    converse(browser, "abcdef")
    assert asked(browser)[-2:] == ["arbrcrdrerf", "drerf"]
    assert not browser.sees(".notice")
    assert above_the_note(browser) == "arbrcr"


def test_one_message_that_is_too_long_is_told_in_plain_words(browser: Browser) -> None:
    play(browser, 200, usage=False)
    converse(browser, "ab")
    ask(browser, "x" * 300)
    assert notice(browser) == "This is too long for the model."
    assert asked(browser)[-1] == "x", "it was tried alone"


def test_what_is_too_long_says_by_how_much_and_can_be_edited(window: Browser, browser: Browser, small: str) -> None:
    """The server's own words are the source of the figures, so a real one is asked."""
    window.open(small)
    window.run("document.querySelector('#prompt').value = 'word '.repeat(500)")
    window.write("#prompt", "end\n")
    told = notice(window)
    over, most, has = (int(figure.replace(",", "")) for figure in re.findall(r"[\d,]*\d", told))
    assert most == 400
    assert over == has + 1 - most
    window.click(".notice .button")
    window.run("document.querySelector('.editor textarea').value = 'short'")
    window.click(".editor .primary")
    window.wait(lambda: finished(window), "the reply")
    assert window.run("return [...document.querySelectorAll('.message')].length") == 2
    assert not window.sees(".switch"), "nothing is kept of what got no answer"
    assert window.text(".message.user .content") == "short"
    window.click("#new")
    window.run("document.querySelector('#prompt').value = 'word '.repeat(20000)")
    window.write("#prompt", "end\n")
    over, most, has = (int(figure.replace(",", "")) for figure in re.findall(r"[\d,]*\d", notice(window)))
    assert "characters too long" in notice(window)
    assert has == 100_003
    assert over == has - most


def test_a_setting_that_can_never_be_met_leaves_the_conversation_whole(browser: Browser) -> None:
    play(browser, 200)
    converse(browser, "ab")
    ask(browser, "c" * 20, 500)
    notice(browser)
    assert asked(browser)[-1] == "arbrc"
    assert not browser.sees(NOTE)


def test_the_note_offers_to_begin_anew(browser: Browser) -> None:
    play(browser, 200)
    converse(browser, "abcde")
    browser.click(f"{NOTE} button")
    assert browser.sees("#empty")
    assert not browser.sees(NOTE)
    converse(browser, "z")
    assert asked(browser)[-1] == "z"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with talkative_server(tmp_path_factory.mktemp("s"), REPLY, model_limit=400) as (url, _):
        yield url


def test_a_conversation_with_a_real_server_has_no_end(window: Browser, browser: Browser, small: str) -> None:
    assert httpx.get(f"{small}/v1/models", timeout=60).json()["data"][0]["max_model_len"] == 400
    window.open(small)
    window.click("#new")
    for number in range(8):
        ask(window, f"question {number}", 60)
        window.wait(lambda: finished(window), "the reply")
        assert content(window) != "", number
        assert "60 tokens" in window.text(f"{LAST} .stats"), number
    assert window.sees(NOTE)
    assert not window.sees(".notice")
