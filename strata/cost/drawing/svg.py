"""What a drawing is made of: SVG with text that can be selected, and colours for light and dark pages."""

from __future__ import annotations

from html import escape

# By what bounds a kernel: fill and frame on a light page, then on a dark one.
BOUNDS = {
    "memory": ("#dbeafe", "#3b82f6", "#172f52", "#60a5fa"),
    "compute": ("#ffedd5", "#ea8a2f", "#4a2a0c", "#fb9d4b"),
    "communication": ("#fee2e2", "#dc4a4a", "#4d1717", "#f87171"),
    "": ("#f3f4f6", "#9ca3af", "#262b33", "#6b7280"),
}
# By the bits of what an edge carries: on a light page, then on a dark one.
_BITS = {32: ("#6b7280", "#9ca3af"), 16: ("#0f766e", "#2dd4bf"), 8: ("#c026a3", "#f472d0"), 4: ("#6d28d9", "#b794ff")}
_PRECISIONS = {
    "float32": 32, "int32": 32, "float64": 32, "int64": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8,
    "float8_e5m2": 8, "e4m3": 8, "int8": 8, "uint8": 8, "int4": 4, "e2m1": 4,
}  # fmt: skip
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Svg:
    """Gathers elements from top to bottom. Lengths are in units of which a page is `width` wide."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """y: of the base line. kind: names of classes."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, title: str = "", radius: int = 0
    ) -> None:
        """title: shown where the pointer rests."""
        within = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="{radius}" '
            f'class="{kind}">{within}</rect>'
        )

    def path(self, steps: str, kind: str, arrow: str = "") -> None:
        """arrow: the edge whose head stands at the end."""
        head = f' marker-end="url(#{arrow})"' if arrow else ""
        self._parts.append(f'<path d="{steps}" class="{kind}"{head}/>')

    def document(self, height: float, title: str) -> str:
        """All of it, with its styles."""
        size = f'width="{self._width}" height="{height:.0f}" viewBox="0 0 {self._width} {height:.0f}"'
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" class="{name} head"/></marker>'
            for name in (f"bits{bits}" for bits in _BITS)
        )
        parts = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}</title>\n'
            f"<style>{_style()}</style>\n<defs>{heads}</defs>\n"
            f'<rect width="100%" height="100%" class="page"/>\n{parts}\n</svg>\n'
        )


def edge(precision: str) -> str:
    """The class of an edge that carries values of a precision."""
    return f"bits{_PRECISIONS.get(precision, 32)}"


def bound_class(bound: str) -> str:
    """The class of a box that is bound so."""
    return bound or "free"


def _style() -> str:
    light, dark = [], []
    for bound, (fill, frame, dark_fill, dark_frame) in BOUNDS.items():
        name = bound_class(bound)
        light.append(f".{name}{{fill:{fill};stroke:{frame}}}.{name}.solid{{fill:{frame};stroke:none}}")
        dark.append(f".{name}{{fill:{dark_fill};stroke:{dark_frame}}}.{name}.solid{{fill:{dark_frame};stroke:none}}")
    for bits, (colour, dark_colour) in _BITS.items():
        light.append(f".bits{bits}{{stroke:{colour};fill:none}}.head.bits{bits}{{fill:{colour};stroke:none}}")
        dark.append(f".bits{bits}{{stroke:{dark_colour};fill:none}}.head.bits{bits}{{fill:{dark_colour};stroke:none}}")
    return (
        f"text{{font:12px {_FONT};fill:#1f2328}}.name{{font-weight:600}}.title{{font-size:18px;font-weight:600}}"
        ".head2{font-size:14px;font-weight:600}.small{font-size:11px;fill:#57606a}.page{fill:#ffffff}"
        ".band{fill:#f6f8fa}path{stroke-width:1.6}rect{stroke-width:1}.axis{stroke:#8c959f}"
        + "".join(light)
        + "@media (prefers-color-scheme: dark){text{fill:#e6edf3}.small{fill:#9da7b3}.page{fill:#0d1117}"
        ".band{fill:#161b22}" + "".join(dark) + "}"
    )
