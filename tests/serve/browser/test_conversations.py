"""Conversations on the chat page: edited, answered again, found by address, kept as drafts, exported, imported."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.browser.conftest import REPLY, Server
from tests.serve.browser.server import talkative_server
from tests.serve.browser.test_chat_page import LAST, ask, content, finished, kept, listed
from tests.serve.browser.webdriver import Browser

PREFIX = "strata.conversation."
ID = "0123456789abcdef01234567"
CONVERSATION = {
    "id": ID,
    "title": "kept",
    "system": "Be brief.",
    "created": 1.5,
    "updated": 2.5,
    "messages": [
        {"role": "user", "content": "<img src=x onerror='window.ran = true'>"},
        {
            "role": "assistant",
            "content": "[a](javascript:alert(1)) **b**",
            "stats": {"ttft": 3.5, "tokens": 2, "finish": "stop"},
            "fork": {"at": 1, "tails": [[{"role": "assistant", "content": "another"}], None]},
        },
    ],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One of its own, since what it says next depends on how much it has said."""
    with talkative_server(tmp_path_factory.mktemp("s"), REPLY, interval=0.002) as (url, tokens):
        yield Server(url, tokens)


def exchange(browser: Browser, text: str) -> str:
    """The reply to `text`, a few tokens long, as `seen` has it."""
    ask(browser, text, 5)
    browser.wait(lambda: finished(browser), "the reply")
    return seen(browser)[-1]


def seen(browser: Browser) -> list[str]:
    """What the messages say, from the first to the last."""
    texts: list[str] = browser.run(
        "return [...document.querySelectorAll('.message .content')].map((one) => one.textContent.trim())"
    )
    return texts


def press(browser: Browser, message: int, label: str) -> None:
    """A button at the foot of a message; those of the reader's are seen only under a pointer."""
    browser.run(
        "const message = document.querySelectorAll('.message')[arguments[0]];"
        "message.querySelector(`.message-foot [aria-label='${arguments[1]}']`).click()",
        message,
        label,
    )


def edit(browser: Browser, message: int, text: str) -> None:
    """Write a message anew and wait for its reply."""
    press(browser, message, "Edit message")
    browser.clear(".editor textarea")
    browser.write(".editor textarea", text + "\n")
    browser.wait(lambda: finished(browser), "the reply")


def draft(browser: Browser) -> str:
    text: str = browser.run("return document.querySelector('#prompt').value")
    return text


def other_tab(browser: Browser, conversation: Any) -> None:
    """Another tab keeps a conversation."""
    browser.run(
        "localStorage.setItem(arguments[0], arguments[1]);"
        "window.dispatchEvent(new StorageEvent('storage', { key: arguments[0] }))",
        PREFIX + conversation["id"],
        json.dumps(conversation),
    )


def changed(path: str, value: Any) -> Any:
    conversation: Any = copy.deepcopy(CONVERSATION)
    place = conversation
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place[part]
    place[last] = value
    return conversation


def test_an_edited_message_is_answered_and_the_old_one_stays(browser: Browser) -> None:
    first, second = exchange(browser, "a"), exchange(browser, "b")
    edit(browser, 0, "A")
    third = seen(browser)[-1]
    assert seen(browser) == ["A", third]
    assert browser.text(".switch") == "2 / 2"
    exchange(browser, "C")
    edit(browser, 2, "CC")
    deep = seen(browser)
    assert deep[:3] == ["A", third, "CC"]
    press(browser, 0, "The version before")
    assert seen(browser) == ["a", first, "b", second]
    assert browser.text(".switch") == "1 / 2"
    browser.reload()
    assert seen(browser) == ["a", first, "b", second]
    press(browser, 0, "The version after")
    assert seen(browser) == deep
    press(browser, 2, "The version before")
    assert seen(browser)[2] == "C"
    edit(browser, 0, "AA")
    assert browser.text(".switch") == "3 / 3"


def test_an_answer_beside_the_first(browser: Browser) -> None:
    first = exchange(browser, "a")
    browser.click(f"{LAST} [aria-label='Answer again']")
    browser.wait(lambda: finished(browser) and seen(browser)[-1] != first, "another reply")
    assert browser.text(f"{LAST} .switch") == "2 / 2"
    press(browser, 1, "The version before")
    assert seen(browser)[-1] == first
    assert [message["role"] for message in kept(browser)[0]["messages"]] == ["user", "assistant"]


def test_what_is_sent_is_the_way_that_is_shown(browser: Browser) -> None:
    exchange(browser, "a")
    edit(browser, 0, "A")
    browser.run(
        "window.sent = []; const real = window.fetch;"
        "window.fetch = (url, options) => {"
        "  if (options?.body) sent.push(JSON.parse(options.body)); return real(url, options); }"
    )
    exchange(browser, "next")
    [body] = browser.run("return sent")
    assert [message["content"] for message in body["messages"]][::2] == ["A", "next"]


def test_nothing_turns_while_a_reply_is_written(browser: Browser) -> None:
    exchange(browser, "a")
    edit(browser, 0, "A")
    ask(browser, "long", 5000)
    browser.wait(lambda: len(content(browser)) > 5, "some of it")
    press(browser, 0, "The version before")
    assert "on its way" in browser.text("#toast")
    assert seen(browser)[0] == "A"
    browser.click("#stop")
    browser.wait(lambda: finished(browser), "its end")


def test_escape_leaves_a_message_as_it_was(browser: Browser) -> None:
    said = exchange(browser, "a")
    press(browser, 0, "Edit message")
    assert browser.run("return document.activeElement.value") == "a"
    browser.write(".editor textarea", "changed")
    browser.press("Escape")
    assert seen(browser) == ["a", said]
    assert not browser.sees(".editor")


def test_each_conversation_has_an_address(browser: Browser, server: Server) -> None:
    exchange(browser, "one")
    first = browser.run("return location.href")
    browser.click("#new")
    assert browser.run("return location.href") == f"{server.url}/"
    exchange(browser, "two")
    second = browser.run("return location.href")
    assert first != second
    browser.click(".conversation:nth-child(2) .open")
    assert browser.run("return location.href") == first
    browser.run("history.back()")
    browser.wait(lambda: seen(browser)[:1] == ["two"], "the second again")
    browser.run("history.back()")
    browser.wait(lambda: seen(browser)[:1] == ["one"], "the first again")
    browser.run("history.forward()")
    browser.wait(lambda: browser.run("return location.href") == second, "forward")
    browser.open(f"{server.url}/docs")
    browser.open(first)
    assert seen(browser)[0] == "one"
    browser.click("#new")
    browser.reload()
    assert browser.sees("#empty"), "a new one stays a new one"
    browser.open(f"{server.url}/#{ID}")
    browser.wait(lambda: "not kept in this browser" in browser.text("#toast"), "a word")
    assert browser.sees("#empty")


def test_drafts_stay_with_their_conversations(browser: Browser, server: Server) -> None:
    exchange(browser, "one")
    browser.write("#prompt", "for the first")
    browser.click("#new")
    assert draft(browser) == ""
    browser.write("#prompt", "for a new one")
    browser.reload()
    assert draft(browser) == "for a new one"
    assert browser.run("return document.querySelector('#send').disabled") is False
    browser.click(".conversation .open")
    assert draft(browser) == "for the first"
    browser.click("#new")
    assert draft(browser) == "for a new one"
    browser.press("Enter")
    browser.wait(lambda: finished(browser), "the reply")
    assert draft(browser) == ""
    browser.reload()
    assert draft(browser) == ""
    browser.click("#new")
    assert draft(browser) == ""


def test_a_value_out_of_bounds_is_brought_back_with_a_word(browser: Browser) -> None:
    browser.click("#settings-toggle")
    values = {
        "temperature": ("7", 2),
        "top_p": ("0", 0.01),
        "top_k": ("-5", 0),
        "max_tokens": ("2.6", 3),
        "seed": ("-1", 0),
    }
    for name, (written, becomes) in values.items():
        browser.write(f"#{name}", written + "\t")
        value = browser.run(f"return document.querySelector('#{name}').valueAsNumber")
        told = browser.text(f".field:has(#{name})")
        assert value == becomes, name
        assert f"was set to {becomes:g}" in told
    assert json.loads(browser.run("return localStorage['strata.sampling']")) == {
        name: set_ for name, (_, set_) in values.items()
    }
    browser.clear("#temperature")
    browser.write("#temperature", "0.5\t")
    assert "was set" not in browser.text(".field:has(#temperature)")
    browser.clear("#max_tokens")
    browser.run("document.querySelector('#max_tokens').value = 10 ** 8")
    browser.write("#prompt", "text\n")
    browser.wait(lambda: "“Most tokens” was set to 131072" in browser.text("#toast"), "the word where no field is seen")


def choose(browser: Browser, file: Path) -> str:
    """Import a file; what the page says of it."""
    browser.run("document.querySelector('#toast').replaceChildren()")
    browser.write("#import-file", str(file))
    said: str = browser.wait(lambda: browser.run("return document.querySelector('#toast').textContent"), "a word")
    return said


def exported(browser: Browser) -> Any:
    """What the file holds that the export gives."""
    script = """
        const real = URL.createObjectURL;
        const file = await new Promise((done) => {
          URL.createObjectURL = (one) => { done(one); return "#"; };
          document.querySelector('#export').click();
        });
        URL.createObjectURL = real;
        return [file.name, await file.text()];
    """
    name, text = browser.run(script)
    assert name.endswith(".json")
    return json.loads(text)


def test_what_is_exported_can_be_imported(browser: Browser, server: Server, tmp_path: Path) -> None:
    assert browser.run("return document.querySelector('#export').disabled")
    exchange(browser, "one")
    edit(browser, 0, "ONE")
    browser.click("#new")
    exchange(browser, "two")
    before = sorted(kept(browser), key=lambda one: one["id"])
    file = tmp_path / "file.json"
    file.write_text(json.dumps(exported(browser)))
    assert choose(browser, file) == "0 conversations imported, 2 here already."
    browser.run("localStorage.clear()")
    browser.open(f"{server.url}/docs")
    browser.open(server.url)
    assert choose(browser, file) == "2 conversations imported."
    assert sorted(kept(browser), key=lambda one: one["id"]) == before
    assert listed(browser) == ["two", "ONE"]
    browser.click(".conversation:nth-child(2) .open")
    press(browser, 0, "The version before")
    assert seen(browser)[0] == "one"
    assert choose(browser, file) == "1 conversation imported, 1 here already.", "what has changed here stays beside it"
    assert len(kept(browser)) == 3


def written(file: Path, conversation: Any, **changes: Any) -> Path:
    file.write_text(
        json.dumps({"format": "strata-conversations", "version": 1, "conversations": [conversation]} | changes)
    )
    return file


def test_nothing_of_a_file_is_executed(browser: Browser, tmp_path: Path) -> None:
    assert choose(browser, written(tmp_path / "f", CONVERSATION)) == "1 conversation imported."
    browser.click(".conversation .open")
    assert seen(browser) == [CONVERSATION["messages"][0]["content"], "[a](javascript:alert(1)) b"]  # type: ignore[index]
    press(browser, 1, "The version before")
    assert content(browser) == "another"
    assert browser.run("return [window.ran, document.querySelectorAll('.message :is(img, a)').length]") == [None, 0]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "../x"),
        ("id", None),
        ("title", 1),
        ("more", 1),
        ("start", 9),
        ("messages", {}),
        ("messages.0.role", "system"),
        ("messages.0.content", ["a"]),
        ("messages.1.stats", {"tokens": "9"}),
        ("messages.1.error", {"status": 400}),
        ("messages.1.fork.at", 0),
        ("messages.1.fork.tails", [None]),
        ("messages.1.fork.tails.0", []),
        ("messages.1.__proto__", {"x": 1}),
    ],
)
def test_a_file_that_is_not_right_is_refused_whole(browser: Browser, tmp_path: Path, path: str, value: Any) -> None:
    assert choose(browser, written(tmp_path / "f", changed(path, value))).startswith(
        "Nothing was imported: conversations[0]"
    )
    assert kept(browser) == []


@pytest.mark.parametrize(
    ("text", "told"), [("{", "no JSON"), ("[]", "holds no conversations"), ("null", "holds no conversations")]
)
def test_another_file_is_refused(browser: Browser, tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "f"
    file.write_text(text)
    assert told in choose(browser, file)
    assert "version 2" in choose(browser, written(file, CONVERSATION, version=2))
    for version in ({"toString": 1}, "x" * 10_000):
        assert len(choose(browser, written(file, CONVERSATION, version=version))) < 200
    assert len(choose(browser, written(file, CONVERSATION | {"x" * 10_000: 1}))) < 300


def test_another_tab_writes_another_conversation(browser: Browser) -> None:
    said = exchange(browser, "a")
    other_tab(browser, CONVERSATION | {"updated": 1e15})
    assert listed(browser) == ["kept", "a"]
    assert seen(browser) == ["a", said]
    exchange(browser, "b")
    assert len(seen(browser)) == 4


def test_a_reply_that_another_tab_writes_is_none_that_was_cut(browser: Browser, server: Server) -> None:
    exchange(browser, "a")
    [conversation] = kept(browser)

    def other_tab_writes(**state: bool) -> str:
        """Put the reply into the storage as another tab does; what this one then says of it."""
        reply = {"role": "assistant", "content": "from afar", "stats": {}, **state}
        other_tab(browser, conversation | {"messages": [conversation["messages"][0], reply]})
        assert content(browser) == "from afar"
        return browser.text(f"{LAST} .stats")

    assert "another tab" in other_tab_writes(unfinished=True)
    assert "cut off" in other_tab_writes(cut=True)
    assert other_tab_writes() == ""
    other_tab_writes(unfinished=True)
    browser.reload()
    assert "cut off" in browser.text(f"{LAST} .stats"), "what has started anew knows of no other tab"
