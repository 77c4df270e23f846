"""All pages in Chromium: the security policy, no network, the API reference, colours, narrow windows, phones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.browser.conftest import Server
from tests.serve.browser.test_chat_page import ask, finished
from tests.serve.browser.webdriver import Browser

PAGES = ["/", "/live", "/docs"]


@pytest.mark.parametrize("page", PAGES)
def test_nothing_comes_from_elsewhere(browser: Browser, server: Server, page: str) -> None:
    browser.open(server.url + page)
    browser.run("return new Promise((done) => setTimeout(done, 300))")
    loaded = browser.run("return performance.getEntriesByType('resource').map(({name}) => name)")
    assert len(loaded) > 3
    assert [url for url in loaded if not url.startswith(server.url)] == []
    policy = httpx.get(server.url + page, timeout=60).headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("page", PAGES)
def test_the_policy_holds(browser: Browser, server: Server, page: str) -> None:
    """What a reply could at worst put into the page does nothing."""
    browser.open(server.url + page)
    done = browser.run("""
        const tried = [];
        try { document.body.innerHTML += '<b>x</b>'; tried.push('innerHTML'); } catch {}
        const script = document.createElement('script');
        try { script.textContent = 'window.ran = true'; document.body.append(script); } catch {}
        const image = document.createElement('img');
        try { image.setAttribute('onerror', 'window.ran = true'); } catch {}
        image.src = '/nothing';
        document.body.append(image);
        const style = document.createElement('style');
        style.textContent = 'body { outline: 9px solid red }';
        document.head.append(style);
        await new Promise((done) => setTimeout(done, 200));
        if (window.ran) tried.push('script');
        if (getComputedStyle(document.body).outlineWidth === '9px') tried.push('style');
        try { await fetch('http://127.0.0.1:9/'); } catch (error) { tried.push(error.name); }
        return tried;
    """)
    assert done == ["TypeError"], "only the fetch, which fails"
    assert sum("Content Security Policy" in line for line in browser.console()) >= 3, "each attempt was reported"


def test_the_reference_has_every_route(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/docs")
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    expected = {f"{method} {path}" for path, methods in document["paths"].items() for method in methods}
    titles = "return [...document.querySelectorAll('.operation h2')].map((one) => one.innerText)"
    browser.wait(lambda: browser.run(titles), "the reference")
    shown = [re.sub(r"\s+", " ", title).lower() for title in browser.run(titles)]
    assert sorted(shown) == sorted(route.lower().replace("delete ", "del ") for route in expected)


def test_fields_unfold(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/docs")
    section = "#post-v1-chat-completions"
    browser.wait(lambda: browser.sees(section), "the route")
    assert "temperature" in browser.text(section)
    assert "tool_call_id" not in browser.text(section)
    browser.run(
        "const all = [...document.querySelectorAll(arguments[0] + ' summary')];"
        "all.find((one) => one.innerText === 'ToolMessage').click()",
        section,
    )
    browser.wait(lambda: "tool_call_id" in browser.text(section), "the fields of a message")


def test_a_request_can_be_tried(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/docs")
    box = "#post-v1-chat-completions .try"
    browser.wait(lambda: browser.sees(box), "the box")
    browser.click(f"{box} button[type=submit]")
    browser.wait(lambda: "200" in browser.text(f"{box} [role=status]"), "the answer")
    browser.wait(lambda: "data: [DONE]" in browser.text(f"{box} pre"), "its end")
    browser.wait(lambda: browser.text(f"{box} button[type=submit]") == "Try it", "the end of the connection")
    browser.clear(f"{box} textarea")
    browser.write(f"{box} textarea", '{"messages": 1}')
    browser.click(f"{box} button[type=submit]")
    browser.wait(lambda: "400" in browser.text(f"{box} [role=status]"), "the refusal")
    # Its parts are shown as they come, and written out once all are there.
    browser.wait(lambda: '"param": "messages"' in browser.text(f"{box} pre"), "the whole of it")


def luminance(colour: str) -> float:
    """Of `rgb(r, g, b)`, as WCAG 2 has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def colours(browser: Browser) -> dict[str, str]:
    names = [
        "paper",
        "sunken",
        "raised",
        "hover",
        "ink",
        "soft",
        "faint",
        "accent",
        "on-accent",
        "accent-wash",
        "danger",
        "danger-wash",
    ]
    script = """
        const probe = document.body.appendChild(document.createElement('i'));
        const found = arguments[0].map((name) => {
          probe.style.color = `var(--${name})`;
          return [name, getComputedStyle(probe).color];
        });
        probe.remove();
        return Object.fromEntries(found);
    """
    found: dict[str, str] = browser.run(script, names)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_the_colours_of_the_system(browser: Browser, server: Server, scheme: str) -> None:
    browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    found = colours(browser)
    assert (luminance(found["paper"]) < 0.05) == (scheme == "dark")
    for ground in ("paper", "sunken", "raised"):
        assert contrast(found["ink"], found[ground]) >= 7
        assert contrast(found["soft"], found[ground]) >= 4.5
        assert contrast(found["faint"], found[ground]) >= 4.5, ground
        assert contrast(found["accent"], found[ground]) >= 4.5
    assert contrast(found["ink"], found["accent-wash"]) >= 7
    assert contrast(found["on-accent"], found["accent"]) >= 4.5
    assert contrast(found["danger"], found["danger-wash"]) >= 4.5


def test_the_reader_chooses_the_colours_for_all_pages(browser: Browser, server: Server) -> None:
    def is_dark() -> bool:
        return luminance(browser.run("return getComputedStyle(document.body).backgroundColor")) < 0.05

    browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    seen = []
    for _ in range(3):
        seen.append((browser.run("return document.documentElement.dataset.theme"), is_dark()))
        browser.click("#theme")
    assert seen == [("system", False), ("light", False), ("dark", True)]
    browser.click("#theme")
    browser.click("#theme")
    for page in PAGES:
        browser.open(server.url + page)
        assert is_dark(), page


@pytest.mark.parametrize("page", PAGES)
def test_a_narrow_window_needs_no_sideways_scrolling(browser: Browser, server: Server, page: str) -> None:
    browser.cdp("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=2, mobile=True)
    try:
        browser.open(server.url + page)
        browser.run("return new Promise((done) => setTimeout(done, 400))")
        assert browser.run("return document.documentElement.scrollWidth") <= 360
        if page == "/":
            assert not browser.sees("#new")
            browser.click("#menu")
            browser.wait(
                lambda: browser.run("return document.querySelector('#new').getBoundingClientRect().left") >= 0,
                "the list",
            )
    finally:
        browser.cdp("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize("page", PAGES)
def test_every_control_has_a_name(browser: Browser, server: Server, page: str) -> None:
    browser.open(server.url + page)
    browser.run("return new Promise((done) => setTimeout(done, 300))")
    tree = browser.cdp("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in tree if node["role"]["value"] in ("button", "textbox", "link", "spinbutton", "slider")]
    assert len(controls) > 5
    assert [node["role"]["value"] for node in controls if not node["name"]["value"]] == []


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
