"""What replies are shown as: Markdown in, elements out, in Chromium."""

from __future__ import annotations

import random

import pytest

from tests.serve.browser.conftest import Server
from tests.serve.browser.webdriver import Browser

SHOW = """
    const { renderMarkdown } = await import("/page/markdown.js");
    const html = (node) => {
      node.querySelectorAll('.code-head').forEach((one) => one.remove());
      return node.innerHTML;
    };
    const whole = document.createElement('div');
    renderMarkdown(whole, arguments[0]);
"""
PIECES = [
    "# Title\n", "plain text ", "**bold** ", "*it* ", "`code` ", "\n", "\n\n", "- item\n", "  - inside\n", "1. one\n",
    "> said\n", "```py\nx = 1\n```\n", "| a | b |\n|---|---|\n| 1 | 2 |\n", "---\n", "[t](https://e.org) ",
    "http://e.org/a_b_c. ", "~~no~~ ", "* ", "_", "`", "[",
]  # fmt: skip
HOSTILE = [
    "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "[x](javascript:alert(1))", "[x](data:text/html,hi)",
    '[x](https://e.org" onclick="alert(1))', "```<b>\n</code><script>\n```", "# <iframe src=//e.org>",
    "| <b> |\n|---|\n| <i> |",
]  # fmt: skip
COSTLY = [
    "*" * 20_000, "**a" * 7_000, "`" * 20_000, "[" * 20_000, "> " * 5_000, "- " * 5_000, "1. " * 5_000, "_a " * 7_000,
    "|-" * 9_000, "http://" * 3_000,
]  # fmt: skip


@pytest.fixture(scope="module")
def page(window: Browser, server: Server) -> Browser:
    """The chat page, opened once: these tests leave it as it is."""
    window.open(server.url)
    return window


def shown(page: Browser, text: str) -> str:
    html: str = page.run(SHOW + "return html(whole)", text)
    return html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("## A *b*", "<h3>A <em>b</em></h3>"),
        ("- a\n- b\n  1. c\n     d\n- e", "<ul><li>a</li><li>b<ol><li>c<br>d</li></ol></li><li>e</li></ul>"),
        ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
        ("- a\n\n- b\n\ntext", "<ul><li>a</li><li>b</li></ul><p>text</p>"),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("a snake_case_name and 2 * 3 * 4", "<p>a snake_case_name and 2 * 3 * 4</p>"),
        ("``a ` b``", "<p><code>a ` b</code></p>"),
        ("**a `**` b**", "<p><strong>a `</strong>` b**</p>"),
    ],
)
def test_forms(page: Browser, text: str, html: str) -> None:
    assert shown(page, text) == html


def test_tables_and_addresses(page: Browser) -> None:
    table = shown(page, "a | b\n- | -\n1 | 2")
    assert "<tr><th>a</th><th>b</th></tr>" in table
    assert "<tr><td>1</td><td>2</td></tr>" in table
    assert ">https://e.org/x</a>, then" in shown(page, "see https://e.org/x, then")


def test_code_is_kept_to_the_character(page: Browser) -> None:
    code = "def f(a):\n\n    return a < 1 and '**' # *x*\n"
    script = SHOW + "return whole.querySelector('pre').textContent"
    assert page.run(script, f"```python\n{code}```") == code.removesuffix("\n")
    assert page.run(script, f"```python\n{code}") == code, "also while its end has not come"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup(page: Browser, text: str) -> None:
    script = (
        SHOW
        + """
        const names = [...whole.querySelectorAll('*')].map((one) => one.localName);
        const attributes = [...whole.querySelectorAll('*')].flatMap((one) => one.getAttributeNames());
        const links = [...whole.querySelectorAll('a')].map((one) => one.href);
        return [names, attributes, links];
    """
    )
    names, attributes, links = page.run(script, text)
    assert not {"img", "script", "iframe", "b", "i"} & set(names)
    assert not [name for name in attributes if name.startswith("on")]
    assert all(link.startswith("https://e.org") for link in links)


@pytest.mark.parametrize("seed", range(8))
def test_a_reply_that_comes_bit_by_bit_ends_as_if_it_had_come_at_once(page: Browser, seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choice(PIECES) for _ in range(60))
    script = (
        SHOW
        + """
        const grown = document.createElement('div');
        for (let end = 0; end < arguments[0].length; end += 3) renderMarkdown(grown, arguments[0].slice(0, end));
        renderMarkdown(grown, arguments[0]);
        return [html(grown), html(whole)];
    """
    )
    grown, whole = page.run(script, text)
    assert grown == whole


@pytest.mark.parametrize("text", COSTLY, ids=range(len(COSTLY)))
def test_no_reply_holds_the_page_up(page: Browser, text: str) -> None:
    script = SHOW.replace("renderMarkdown(whole", "const start = performance.now(); renderMarkdown(whole")
    milliseconds = []
    for _ in range(5):  # what else this machine does, and only that, differs from one time to the next
        milliseconds.append(page.run(script + "return performance.now() - start", text + "\n" + text[:50]))
        if milliseconds[-1] < 1500:
            break
    assert min(milliseconds) < 1500
