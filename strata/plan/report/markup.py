"""HTML and SVG elements in which no text is left unescaped."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is markup already; all other text is escaped where an element takes it."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element with its children.

    attributes: `class_` is class, an underscore within a name a hyphen; None leaves one out. Floats are written with
    two decimals, which is what a picture needs.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_written(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """Children one after another, without an element around them."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def table(label: str, head: list[str], rows: list[list[str]], *, numbers: int) -> Markup:
    """A table that scrolls where it is too wide. label: of what. The first cell of a row names it. numbers: the column
    from which on cells stand to the right.
    """

    def kind(column: int) -> str | None:
        return "number" if column >= numbers else None

    cells = [element("th", name, scope="col", class_=kind(column)) for column, name in enumerate(head)]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, class_=kind(column)) for column, cell in enumerate(row[1:], 1)),
        )
        for row in rows
    ]
    made = element("table", element("thead", element("tr", *cells)), element("tbody", *body))
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label=label)


def _written(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
