"""The pages on a telephone: what is touched is large enough, the model's name is there, the API has its contents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.browser.conftest import Server
from tests.serve.browser.test_chat_page import ask, finished
from tests.serve.browser.webdriver import Browser

WIDTH, HEIGHT, TOUCH = 360, 740, 44

# Names of visible controls that are less than TOUCH pixels wide or high. Links inside a sentence may be (WCAG 2.5.8),
# and what is only there for the keyboard. Hundredths of a pixel: while a panel slides in, a width of 44 reads 43.99999.
SMALL = """
    const controls = document.querySelectorAll("button, a[href], input, textarea, select, summary");
    const inSentence = (one) => one.tagName === "A" && getComputedStyle(one).display === "inline";
    return [...controls]
      .filter((one) => one.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && !inSentence(one))
      .filter((one) => !one.matches(".skip"))
      .map((one) => [one, one.getBoundingClientRect()])
      .filter(([, { width, height }]) => Math.min(width, height) < arguments[0] - 0.01)
      .map(([one, { width, height }]) => [one.tagName, one.id, one.ariaLabel, one.innerText, width, height].join(" "));
"""


@pytest.fixture
def phone(browser: Browser) -> Iterator[Browser]:
    browser.cdp("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=2, mobile=True)
    browser.cdp("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        yield browser
    finally:
        browser.cdp("Emulation.setTouchEmulationEnabled", enabled=False)
        browser.cdp("Emulation.clearDeviceMetricsOverride")


def small(browser: Browser) -> list[str]:
    found: list[str] = browser.run(SMALL, TOUCH)
    return found


def test_everything_on_the_chat_page_can_be_touched(phone: Browser, server: Server) -> None:
    phone.open(server.url)
    assert small(phone) == []
    ask(phone, "show me all", server.reply_tokens)
    phone.wait(lambda: finished(phone), "the reply")
    assert phone.sees(".message.user [aria-label='Copy message']"), "there is no pointer under which it could appear"
    assert small(phone) == []
    phone.click("[aria-label='Edit message']")
    assert small(phone) == []
    phone.click(".editor .primary")
    phone.wait(lambda: phone.sees(".switch") and finished(phone), "another reply")
    assert small(phone) == []
    phone.click("#menu")
    phone.wait(lambda: phone.sees(".conversation [aria-label=Rename]"), "the list")
    assert small(phone) == []
    phone.press("Escape")
    phone.click("#settings-toggle")
    assert small(phone) == []


def test_wide_things_move_in_their_own_frames(phone: Browser, server: Server) -> None:
    phone.open(server.url)
    ask(phone, "show me", 3)
    phone.wait(lambda: finished(phone), "the reply")
    wide = "a_{1}" * 80
    cells = "|".join(["incomprehensibility"] * 6)
    text = f"${{{wide}}}$\n\n$${wide}$$\n\n{cells}\n{'-|' * 6}\n{cells}\n\n```\n{'x' * 400}\n```\n\n{'y' * 400}"
    script = """
        const { renderMarkdown } = await import("/page/markdown/render.js");
        renderMarkdown(document.querySelector('.message.assistant .content'), arguments[0]);
        const frame = document.querySelector('#scroll');
        return [frame.scrollWidth - frame.clientWidth, document.querySelectorAll('.assistant .content > *').length];
    """
    assert phone.run(script, text) == [0, 5]


def test_a_word_of_the_page_has_the_width_of_the_window(phone: Browser, server: Server) -> None:
    phone.open(server.url)
    left, width = phone.run(
        "const word = document.querySelector('#toast'); word.textContent = 'word '.repeat(30); word.hidden = false;"
        "const { left, width } = word.getBoundingClientRect(); return [left, width]"
    )
    assert left >= 0
    assert width > 0.8 * WIDTH


@pytest.mark.parametrize("page", ["/live", "/docs"])
def test_everything_on_the_other_pages_can_be_touched(phone: Browser, server: Server, page: str) -> None:
    phone.open(server.url + page)
    phone.wait(lambda: phone.sees(".u-legend" if page == "/live" else ".operation"), "the page")
    assert small(phone) == []


@pytest.mark.parametrize("page", ["/", "/live", "/docs"])
@pytest.mark.parametrize("width", [320, 360, 430])
def test_the_name_of_the_model_is_there(phone: Browser, server: Server, page: str, width: int) -> None:
    phone.cdp("Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=2, mobile=True)
    phone.open(server.url + page)
    phone.wait(lambda: phone.text("#model") == "talkative", "the name")
    assert phone.sees("#model")
    assert phone.run("const one = document.querySelector('#model'); return one.scrollWidth <= one.clientWidth + 1")
    assert phone.run("return document.documentElement.scrollWidth") <= width


def test_a_long_name_gives_way(phone: Browser, server: Server) -> None:
    phone.open(server.url)
    phone.wait(lambda: phone.text("#model"), "the name")
    phone.run("document.querySelector('#model').textContent = 'some-organization/A-Model-With-A-Long-Name-8B-Instruct'")
    assert phone.run("return document.documentElement.scrollWidth") <= WIDTH
    right = "return document.querySelector(arguments[0]).getBoundingClientRect().right"
    assert phone.run(right, "#settings-toggle") <= WIDTH


def test_the_api_page_has_its_contents(phone: Browser, server: Server) -> None:
    phone.open(f"{server.url}/docs")
    phone.wait(lambda: phone.sees("#contents summary"), "the list's head")
    assert not phone.sees("#contents a")
    phone.click("#contents summary")
    assert phone.sees("#contents a")
    assert small(phone) == []
    phone.click("#contents a[href='#post-tokenize']")
    assert not phone.sees("#contents a"), "it does not lie over what was chosen"
    top = "return document.querySelector('#post-tokenize').getBoundingClientRect().top"
    phone.wait(lambda: 90 <= phone.run(top) <= HEIGHT / 2, "the route, below what stays at the top")
    assert phone.sees("#contents summary"), "at hand wherever one has read to"
    assert phone.run("return document.querySelector('#contents').getBoundingClientRect().top") >= 0


def test_beside_the_reference_the_contents_are_always_open(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/docs")
    browser.wait(lambda: browser.sees("#contents a"), "the list")
    assert not browser.sees("#contents summary")
    browser.click("#contents a[href='#post-tokenize']")
    assert browser.sees("#contents a")
