"""What the browser keeps of the chat page: nothing at all, no more room, what is not the page's, other tabs, drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.browser.conftest import REPLY, Server
from tests.serve.browser.server import talkative_server
from tests.serve.browser.test_chat_page import LAST, ask, content, finished, kept, listed, notice
from tests.serve.browser.test_conversations import (
    CONVERSATION,
    ID,
    PREFIX,
    changed,
    choose,
    draft,
    edit,
    exchange,
    exported,
    other_tab,
    press,
    seen,
    written,
)
from tests.serve.browser.webdriver import Browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One of its own, since what it says next depends on how much it has said."""
    with talkative_server(tmp_path_factory.mktemp("s"), REPLY, interval=0.002) as (url, tokens):
        yield Server(url, tokens)


def visit(browser: Browser, server: Server) -> None:
    """Open the page anew, not at the place where it was."""
    browser.open(f"{server.url}/docs")
    browser.open(server.url)


def said(conversation: Any) -> list[str]:
    """The questions, and that they were answered."""
    texts = [(message["role"], message["content"]) for message in conversation["messages"]]
    return [text if role == "user" else "a reply" for role, text in texts if text.strip()]


@pytest.mark.parametrize(
    "entry",
    [None, [], 1, "x", {}, {"id": ID, "messages": None}, changed("messages.0", {"role": "user"}), changed("system", 1),
     changed("messages.1.fork", {"at": 5}), changed("updated", None)],
)  # fmt: skip
def test_what_is_not_the_pages_own_is_left_where_it_is(browser: Browser, server: Server, entry: Any) -> None:
    good = CONVERSATION | {"id": "f" * 24, "title": "good"}
    for name, value in (("x", entry), ("f" * 24, good)):
        browser.run("localStorage[arguments[0]] = arguments[1]", PREFIX + name, json.dumps(value))
    browser.run("localStorage['strata.sampling'] = 'null'")
    visit(browser, server)
    assert listed(browser) == ["good"]
    exchange(browser, "a")
    assert json.loads(browser.run("return localStorage[arguments[0]]", PREFIX + "x")) == entry


def test_a_browser_that_keeps_nothing_shows_the_pages(browser: Browser, server: Server) -> None:
    refuse = (
        "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name,"
        "  { get() { throw new DOMException('not allowed', 'SecurityError'); } })"
    )
    script = browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=refuse)["identifier"]
    try:
        for page in ("/live", "/docs", "/"):
            browser.open(server.url + page)
            browser.wait(lambda: browser.text("#model") == "talkative", "the name")
        exchange(browser, "a")
        assert "keeps nothing" in browser.text("#toast")
        edit(browser, 0, "A")
        browser.click("#settings-toggle")
        browser.write("#key", "sk-here\t")
        [conversation] = exported(browser)["conversations"]
        assert said(conversation) == ["A", "a reply"]
        browser.click("#new")
        assert listed(browser) == ["A"]
        browser.run("document.querySelector('.conversation [aria-label=Delete]').click()")
        assert listed(browser) == []
    finally:
        browser.cdp("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        browser.open(f"{server.url}/docs")


def test_what_there_is_no_room_for_can_be_exported(browser: Browser) -> None:
    browser.run(
        "for (let size = 1 << 22, at = 0; size; ) {"
        "  try { localStorage[`fill${at++}`] = 'x'.repeat(size); } catch { size >>= 1; } }"
    )
    exchange(browser, "a")
    assert "no room" in browser.text("#toast")
    browser.run("window.dispatchEvent(new StorageEvent('storage', { key: arguments[0] }))", PREFIX + ID)
    assert listed(browser) == ["a"], "another tab's change takes nothing away"
    [conversation] = exported(browser)["conversations"]
    assert said(conversation) == ["a", "a reply"]


def test_what_another_tab_writes_meanwhile_is_taken_over(browser: Browser) -> None:
    first = exchange(browser, "a")
    [conversation] = kept(browser)
    browser.click("#new")
    ask(browser, "long", 5000)
    browser.wait(lambda: len(content(browser)) > 5, "some of it")
    more = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "from the other tab", "stats": {}}]
    other_tab(browser, conversation | {"messages": [*conversation["messages"], *more], "updated": 1e15})
    assert listed(browser) == ["a", "long"]
    browser.click("#stop")
    browser.wait(lambda: finished(browser), "its end")
    browser.click(".conversation .open")
    assert seen(browser) == ["a", first, "b", "from the other tab"]


def test_nothing_is_asked_while_another_tab_answers(browser: Browser) -> None:
    exchange(browser, "a")
    [conversation] = kept(browser)
    reply = {"role": "assistant", "content": "so far", "stats": {}, "unfinished": True}
    other_tab(browser, conversation | {"messages": [conversation["messages"][0], reply]})
    for attempt in (lambda: ask(browser, "b"), lambda: press(browser, 0, "Edit message")):
        browser.run("document.querySelector('#toast').replaceChildren()")
        attempt()
        assert "in another tab" in browser.text("#toast")
        assert not browser.sees(".editor")
    assert draft(browser) == "b"
    assert kept(browser)[0]["messages"][-1] == reply
    browser.reload()
    browser.press("Enter")
    browser.wait(lambda: finished(browser) and len(seen(browser)) == 4, "a reply: whoever wrote the other one is gone")


def test_a_name_that_is_being_written_stays(browser: Browser) -> None:
    exchange(browser, "a")
    [conversation] = kept(browser)
    browser.click(".conversation [aria-label=Rename]")
    browser.write(".conversation input", "a na")
    other_tab(browser, CONVERSATION | {"updated": 1e15})
    other_tab(browser, conversation | {"system": "Be brief."})
    browser.write(".conversation input", "me")
    browser.press("Enter")
    assert listed(browser) == ["kept", "a name"]
    assert {(one["title"], one["system"]) for one in kept(browser)} == {("a name", "Be brief."), ("kept", "Be brief.")}


def test_a_deletion_takes_the_draft_along_and_brings_it_back(browser: Browser) -> None:
    drafts = "return Object.keys(localStorage).filter((name) => name.startsWith('strata.draft.'))"
    exchange(browser, "a")
    for is_open in (True, False):
        browser.clear("#prompt")
        browser.write("#prompt", "a draft")
        if not is_open:
            browser.click("#new")
        browser.run("document.querySelector('.conversation [aria-label=Delete]').click()")
        assert browser.run(drafts) == []
        browser.click("#toast button")
        assert draft(browser) == "a draft"


def test_a_tab_in_which_nothing_was_written_drops_no_draft(browser: Browser) -> None:
    browser.run("localStorage['strata.draft.'] = 'of another tab'")
    exchange(browser, "a")
    browser.run("localStorage['strata.draft.'] = 'of another tab'")
    browser.click("#new")
    assert draft(browser) == "of another tab"
    browser.clear("#prompt")
    browser.click(".conversation .open")
    browser.click("#new")
    assert draft(browser) == "", "what was taken away here is gone"
    browser.run("localStorage['strata.draft.'] = 'of another tab'")
    browser.run("window.dispatchEvent(new Event('pagehide'))")
    assert browser.run("return localStorage['strata.draft.']") == "of another tab"


def test_an_answer_stays_though_the_one_beside_it_failed(browser: Browser) -> None:
    first = exchange(browser, "a")
    browser.run("window.real = fetch; window.fetch = async () => new Response('{}', { status: 500 })")
    browser.click(f"{LAST} [aria-label='Answer again']")
    notice(browser)
    browser.run("window.fetch = real")
    edit(browser, 0, "A")
    press(browser, 0, "The version before")
    press(browser, 1, "The version before")
    assert seen(browser) == ["a", first]


def test_whatever_way_a_conversation_takes_no_answer_is_lost_and_a_file_can_hold_it(browser: Browser) -> None:
    """Questions, edits, further answers and turns at random; some answers fail."""
    script = """
        const { branch, takeBranch } = await import("/page/branches.js");
        const { forgetHalf } = await import("/page/room.js");
        const { asConversation } = await import("/page/transfer.js");
        let state = arguments[0];
        const below = (most) => (state = (state * 48271) % 2147483647) % most;
        const conversation = { id: "0".repeat(24), title: "", system: "", created: 1, updated: 1, messages: [] };
        const { messages } = conversation;
        const answers = [];
        const say = (role, content, fork) => messages.push(fork ? { role, content, fork } : { role, content });
        const answer = (fork) => {
          const text = below(3) ? `answer ${answers.length};` : "";
          if (text) answers.push(text);
          say("assistant", text, fork);
        };
        const places = (test) => messages.map((_, at) => at).filter((at) => test(messages[at]));
        const one = (list) => list[below(list.length)];
        for (let step = 0; step < 150; step += 1) {
          const forked = places(({ fork }) => fork);
          const what = messages.length ? below(6) : 0;
          if (what < 2) { say("user", `question ${step}`); answer(); }
          else if (what === 2) {
            const at = one(places(({ role }) => role === "user"));
            say("user", `edited ${step}`, branch(conversation, at));
            answer();
          } else if (what === 3) answer(branch(conversation, messages.length - 1));
          else if (what === 4 && forked.length) {
            const at = one(forked);
            const { fork } = messages[at];
            const to = below(fork.tails.length);
            if (to !== fork.at) takeBranch(conversation, at, to);
          } else forgetHalf(conversation);
          asConversation(JSON.parse(JSON.stringify(conversation)), `step ${step}`);
        }
        const kept = JSON.stringify(conversation);
        return [answers.length, answers.filter((text) => !kept.includes(text))];
    """
    for seed in range(1, 9):
        answers, lost = browser.run(script, seed)
        assert answers > 40
        assert lost == []


def test_an_id_that_a_file_has_twice(browser: Browser, tmp_path: Path) -> None:
    other = changed("title", "other")
    file = written(tmp_path / "f", CONVERSATION, conversations=[CONVERSATION, other, CONVERSATION])
    assert choose(browser, file) == "2 conversations imported, 1 here already."
    assert sorted(one["title"] for one in kept(browser)) == ["kept", "other"]


def test_what_is_here_is_known_again_whatever_became_of_it(browser: Browser, tmp_path: Path) -> None:
    """Also before the page has read it back, in whatever order its fields came about."""
    exchange(browser, "a")
    browser.run("document.querySelector('#max_tokens').value = 5000")
    browser.click(f"{LAST} [aria-label='Answer again']")
    browser.wait(lambda: len(content(browser)) > 20, "some of it")
    browser.click("#stop")
    browser.wait(lambda: finished(browser), "its end")
    file = tmp_path / "f"
    file.write_text(json.dumps(exported(browser)))
    assert choose(browser, file) == "0 conversations imported, 1 here already."


def test_a_reply_that_a_file_says_is_being_written_is_cut(browser: Browser, tmp_path: Path) -> None:
    choose(browser, written(tmp_path / "f", changed("messages.1.fork.tails.0.0.unfinished", True)))
    browser.click(".conversation .open")
    press(browser, 1, "The version before")
    ask(browser, "more", 5)
    browser.wait(lambda: finished(browser) and len(seen(browser)) == 4, "a reply")


def test_what_a_proxy_says_can_be_kept(browser: Browser, tmp_path: Path) -> None:
    browser.run(
        "const body = JSON.stringify(arguments[0]); window.fetch = async () => new Response(body, { status: 502 })",
        {"error": {"code": 502, "param": ["x"], "message": {"a": 1}}},
    )
    ask(browser, "a")
    assert "in trouble" in notice(browser)
    file = tmp_path / "f"
    file.write_text(json.dumps(exported(browser)))
    browser.reload()
    assert listed(browser) == ["a"]
    assert choose(browser, file).startswith("0 conversations imported, 1 here already.")


def test_too_many_bytes_are_counted(browser: Browser) -> None:
    """Characters of two bytes: the server counts bytes."""
    script = "document.querySelector('#prompt').value = 'ä '.repeat(1 << 20);"
    browser.run(script + "document.querySelector('#composer').requestSubmit()")
    said = notice(browser)
    assert "the server takes 2,097,152" in said
    over, most, given = (int(word.strip(".").replace(",", "")) for word in said.split() if word[0].isdigit())
    assert given - most == over
    assert 3 << 20 < given < (3 << 20) + 1000
