"""The frame of a page: no script, no font and no picture from elsewhere, light or dark as the reader's."""

from __future__ import annotations

from importlib import resources

from strata.plan.report.markup import Markup, element

# What a page may load: nothing but its own styles.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(kind: str, title: str, subtitle: str, *sections: Markup) -> str:
    """A whole HTML page with these sections. kind: of page, in a few words above its title."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"Strata: {title}"),
        element("style", Markup(style)),
    )
    header = element(
        "header",
        element("p", kind, class_="eyebrow"),
        element("h1", title),
        element("p", subtitle, class_="soft"),
    )
    body = element("body", element("main", header, *sections))
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def section(title: str, text: str, *content: str) -> Markup:
    """A part of a page under a heading, with a sentence before its content."""
    return element("section", element("h2", title), element("p", text, class_="soft"), *content)
