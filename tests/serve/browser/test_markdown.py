"""What replies are shown as: Markdown in, elements out, in Chromium."""

from __future__ import annotations

import random

import pytest

from tests.serve.browser.conftest import Server
from tests.serve.browser.webdriver import Browser

SHOW = """
    const { renderMarkdown } = await import("/page/markdown/render.js");
    const html = (node) => {
      node.querySelectorAll('.code-head').forEach((one) => one.remove());
      return node.innerHTML.replaceAll(/\\n(?=<)|(?<=>)\\n/g, "");
    };
    const whole = document.createElement('div');
    renderMarkdown(whole, arguments[0]);
"""
PIECES = [
    "# Title\n", "plain text ", "**bold** ", "*it* ", "`code` ", "\n", "\n\n", "- item\n", "  - inside\n", "1. one\n",
    "> said\n", "```py\nx = 1\n```\n", "| a | b |\n|---|---|\n| 1 | 2 |\n", "---\n", "[t](https://e.org) ",
    "http://e.org/a_b_c. ", "~~no~~ ", "* ", "_", "`", "[", "$x^2$ ", "$$\nx\n- y\n$$\n", "\\[ a", " b \\]\n", "$",
    "$$", "- [x] done\n", "[^1] ", "[^1]: a note\n", "[^2]: another\n\n    goes on\n", "[t] ", "[t]: https://e.org/t\n",
    "\r\n",
]  # fmt: skip
HOSTILE = [
    "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "[x](javascript:alert(1))", "[x](data:text/html,hi)",
    '[x](https://e.org" onclick="alert(1))', "```<b>\n</code><script>\n```", "# <iframe src=//e.org>",
    "| <b> |\n|---|\n| <i> |", "![x](https://e.org/x.png)", "![x](javascript:alert(1))",
    "[x]: javascript:alert(1)\n\n[x]", r"$\href{javascript:alert(1)}{x}$", r"$\includegraphics{https://e.org/x.png}$",
    r"$\htmlData{style=top:0}{x}$", r"$\text{<img src=x onerror=alert(1)>}$", '```x" onclick="alert(1)\n1\n```',
    "[^<b>]: <script>\n\n[^<b>]",
    "//e.org/x ftp://e.org/x file:///x", "<javascript:alert(1)>",
]  # fmt: skip
COSTLY = [
    "*" * 20_000, "**a" * 7_000, "`" * 20_000, "[" * 20_000, "> " * 5_000, "- " * 5_000, "1. " * 5_000, "_a " * 7_000,
    "|-" * 9_000, "http://" * 3_000, "$" * 20_000, "$a$ " * 5_000, "\\(" * 10_000, "\\[\n" * 6_000, "$a " * 7_000,
    f"${'{' * 1_200}x{'}' * 1_200}$", r"$\def\a{\a\a}\a$", r"$$\begin{matrix}" + "a&" * 1_150 + r"\end{matrix}$$",
    "```java\n" + "a" * 20_000, "```ini\n" + "a-" * 10_000, "```python\n" + "x = f(1)  # a\n" * 1_500, "[^1]: " * 3_000,
    "[^a]: b\n\n" * 2_000, "[a]: b\n\n" * 2_000, "# a\n" * 5_000, "[a](" * 5_000, "![" * 10_000, "a\n\n" * 7_000,
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
        ("- a\n\n- b\n\ntext", "<ul><li><p>a</p></li><li><p>b</p></li></ul><p>text</p>"),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("a snake_case_name and 2 * 3 * 4", "<p>a snake_case_name and 2 * 3 * 4</p>"),
        ("``a ` b``", "<p><code>a ` b</code></p>"),
        ("**a `**` b**", "<p><strong>a <code>**</code> b</strong></p>"),
        ("[a]: https://e.org\n\nb", "<p>b</p>"),
    ],
)
def test_forms(page: Browser, text: str, html: str) -> None:
    assert shown(page, text) == html


def test_tables_and_addresses(page: Browser) -> None:
    table = shown(page, "a | b\n--- | ---:\n1 | 2")
    assert '<tr><th>a</th><th class="right">b</th></tr>' in table
    assert '<tr><td>1</td><td class="right">2</td></tr>' in table
    assert ">https://e.org/x</a>, then" in shown(page, "see https://e.org/x, then")


def test_code_is_kept_to_the_character(page: Browser) -> None:
    code = "def f(a):\n\n    return a < 1 and '**' # *x*\n"
    script = SHOW + "return whole.querySelector('pre').textContent"
    assert page.run(script, f"```python\n{code}```") == code.removesuffix("\n")
    assert page.run(script, f"```python\n{code}") == code.removesuffix("\n"), "also while its end has not come"


def test_numbers_of_notes_follow_the_text(page: Browser) -> None:
    script = SHOW + "return [...whole.querySelectorAll('[data-note]')].map((one) => one.textContent.trim())"
    text = "a[^x] b[^y] a[^x] no[^z]\n\n[^y]: *second*\n[^x]: first\n\n    and more"
    assert page.run(script, text) == ["1", "2", "1", "2second", "1first\nand more"]
    assert "no[^z]" in shown(page, text)


def test_tasks_are_boxes_that_nobody_can_tick(page: Browser) -> None:
    script = SHOW + (
        "const state = ({ checked, disabled }) => [checked, disabled];"
        "return [...whole.querySelectorAll('li')].map((li) => [li.textContent, state(li.querySelector('input'))])"
    )
    script = script.replace(
        "li.querySelector('input')]", "(({checked, disabled}) => [checked, disabled])(li.querySelector('input'))]"
    )
    assert page.run(script, "- [x] a\n- [ ] b") == [[" a", [True, True]], [" b", [False, True]]]


@pytest.mark.parametrize(
    ("text", "formulas", "display"),
    [
        ("so $a_1$, \\(b\\) and $$c$$", ["a_1", "b", "c"], 1),
        ("$$\na\n- b\n+ c\n$$", ["\na\n- b\n+ c\n"], 1),
        ("text\n\\[ a\n= b \\]\ntext", [" a\n= b "], 1),
        ("- x\n\n  $$\n  a\n  $$\n- $b$\n\n> $$c$$", ["\na\n", "b", "c"], 2),
        ("| $a$ | b |\n|---|---|\n| c | $d$ |", ["a", "d"], 0),
        ("$5 and $10, $5-$10, a $ b $ c, `$x$`, \\$a$", [], 0),
        ("$$ is the process\n\n$$", [], 0),
        ("```\n$$a$$\n```", [], 0),
    ],
)
def test_formulas_are_found(page: Browser, text: str, formulas: list[str], display: int) -> None:
    """Which parts reach KaTeX, and how many of them stand on their own."""
    script = (
        "const real = katex.renderToString; const seen = [];"
        "katex.renderToString = (tex, how) => { seen.push([tex, how.displayMode]); return real(tex, how); };"
        f"try {{ {SHOW} }} finally {{ katex.renderToString = real; }} return seen"
    )
    seen = page.run(script, text)
    assert [tex for tex, _ in seen] == formulas
    assert sum(own for _, own in seen) == display


def test_formulas_are_set_and_what_is_none_stays(page: Browser) -> None:
    script = (
        SHOW
        + """
        document.body.append(whole);
        const [vector] = whole.querySelectorAll('svg');
        const found = [whole.querySelectorAll('.katex').length, whole.querySelector('math').textContent,
          vector.getBoundingClientRect().width < 20, whole.querySelector('.formula-source').textContent];
        await document.fonts.ready;
        const fonts = [...document.fonts].filter(({ status }) => status === 'loaded').map(({ family }) => family);
        whole.remove();
        return [...found, fonts];
    """
    )
    text = "$\\vec{x} + \\frac12$, $\\color{red}{y}$, $\\nothing{z}$"
    page.console()
    formulas, math, narrow, source, fonts = page.run(script, text)
    assert (formulas, math, narrow, source) == (2, "x⃗+12", True, "$\\nothing{z}$")
    assert "KaTeX_Math" in fonts
    assert [line for line in page.console() if "SEVERE" in line] == [], "no style that the policy forbids"


def test_code_has_colours(page: Browser) -> None:
    code = "```python\nreturn 1  # one\n```"
    spans = "return [...whole.querySelectorAll('pre span')].map((one) => [one.className, one.textContent])"
    assert page.run(SHOW + spans, code) == [
        ["hljs-keyword", "return"],
        ["hljs-number", "1"],
        ["hljs-comment", "# one"],
    ]
    assert page.run(SHOW + spans, code.replace("python", "nothing")) == []


def test_words_in_tables_are_whole(page: Browser) -> None:
    script = (
        SHOW
        + """
        whole.className = 'content';
        const message = document.createElement('article');
        message.className = 'message assistant';
        message.style.width = '200px';
        message.append(whole);
        document.body.append(message);
        const lines = [...whole.querySelectorAll('td')].map((cell) => {
          const range = document.createRange();
          range.selectNodeContents(cell);
          return range.getClientRects().length;
        });
        const outside = message.getBoundingClientRect().width > 200;
        message.remove();
        return [lines, outside];
    """
    )
    words = "internationalization | counterrevolutionary | incomprehensibility"
    lines, outside = page.run(script, f"a | b | c\n---|---|---\n{words}")
    assert lines == [1, 1, 1]
    assert not outside


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup(page: Browser, text: str) -> None:
    script = (
        SHOW
        + """
        const names = [...whole.querySelectorAll('*')].map((one) => one.localName);
        const attributes = [...whole.querySelectorAll('*')].flatMap((one) => one.getAttributeNames());
        const links = [...whole.querySelectorAll('[href]')].map((one) => one.href);
        if ([...whole.querySelectorAll('a')].some((one) => one.rel !== 'noopener noreferrer')) links.push('no rel');
        return [names, attributes, links];
    """
    )
    names, attributes, links = page.run(script, text)
    assert not {"img", "script", "iframe", "b", "i"} & set(names)
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "id", "name")]
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


def test_what_is_finished_is_read_once(page: Browser) -> None:
    """Characters that are read and made into elements while a reply grows: as its length, not as its square."""
    script = """
        const { renderMarkdown } = await import("/page/markdown/render.js");
        let characters = 0;
        const counted = (owner, name) => {
          const real = owner[name];
          owner[name] = function (text, ...more) { characters += text.length; return real.call(this, text, ...more); };
          return () => (owner[name] = real);
        };
        const undo = [counted(markdownit.prototype, 'parse'), counted(DOMPurify, 'sanitize')];
        const cost = (text) => {
          const grown = document.createElement('div');
          characters = 0;
          for (let end = 0; end <= text.length; end += 20) renderMarkdown(grown, text.slice(0, end));
          return characters;
        };
        const costs = [cost(arguments[0].repeat(10)), cost(arguments[0].repeat(40))];
        undo.forEach((one) => one());
        return costs;
    """
    part = "# Title\n\nSome *text* with $x$.\n\n```py\nx = 1\n\ny = 2\n```\n\n- a\n- b\n\na | b\n--|--\n1|2\n\n"
    short, long = page.run(script, part)
    assert short > 0
    assert long < 4.5 * short


def test_finished_elements_stay(page: Browser) -> None:
    script = """
        const { renderMarkdown } = await import("/page/markdown/render.js");
        const grown = document.createElement('div');
        renderMarkdown(grown, "one[^1]\\n\\ntwo\\n\\nthr");
        const [one, two] = grown.children;
        renderMarkdown(grown, "one[^1]\\n\\ntwo\\n\\nthree\\n\\n[^1]: a note");
        return [one === grown.children[0], two === grown.children[1], grown.children[0].textContent];
    """
    assert page.run(script) == [False, True, "one1"], "only what names the note has changed"


@pytest.mark.parametrize("text", COSTLY, ids=range(len(COSTLY)))
def test_no_reply_holds_the_page_up(page: Browser, text: str) -> None:
    script = SHOW.replace("renderMarkdown(whole", "const start = performance.now(); renderMarkdown(whole")
    milliseconds = []
    for _ in range(5):  # what else this machine does, and only that, differs from one time to the next
        milliseconds.append(page.run(script + "return performance.now() - start", text + "\n" + text[:50]))
        if milliseconds[-1] < 1500:
            break
    assert min(milliseconds) < 1500
