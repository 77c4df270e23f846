"""One layer of a drawing: its kernels from top to bottom, and edges in the colour of what they carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.cost.draw import quantity
from strata.cost.drawing.boxes import Box
from strata.cost.drawing.svg import Svg, bound_class, edge

_BOX, _GAP, _BETWEEN = 36, 12, 22
_KERNEL = 52  # the least height of what runs: its name, what runs it, and figures
_LANE = 9
_CHARACTER = 6.7  # the width of one in bold of 12 px, rounded up


@dataclass(frozen=True)
class Column:
    """Where boxes stand: weights come from the left, edges that pass boxes by run on the right."""

    x: float
    width: float


@dataclass(frozen=True)
class Row:
    """What one kernel stands for. parts: top and height of each of the boxes that it takes the place of."""

    top: float
    height: float
    parts: tuple[tuple[float, float], ...]


def rows_of(counts: Sequence[int], top: float) -> list[Row]:
    """Rows from `top` on, each of so many boxes one above the other."""
    found = []
    for count in counts:
        taken = count * (_BOX + _GAP) - _GAP
        height = max(taken, _KERNEL)
        first = top + (height - taken) / 2
        found.append(Row(top, height, tuple((first + at * (_BOX + _GAP), _BOX) for at in range(count))))
        top += height + _BETWEEN
    return found


def draw_layer(page: Svg, column: Column, boxes: Sequence[Box], places: Sequence[tuple[float, float]]) -> None:
    """places: top and height of each box. Edges come first, so that boxes stand on them."""
    entry = places[0][0] - 20
    ends: list[float] = []  # how far down each lane is taken
    for (source, _), targets in sorted(_results(boxes).items(), key=lambda one: one[0][0]):
        below = entry if source < 0 else sum(places[source])
        beside = [(at, precision) for at, precision in targets if at > source + 1]
        for number, precision in enumerate(dict.fromkeys(one for at, one in targets if at == source + 1)):
            x = column.x + column.width / 2 + 8 * number
            page.path(f"M{x:.1f} {below:.1f}V{places[source + 1][0]:.1f}", edge(precision), edge(precision))
        if beside:
            begin, last = below - (6 if source >= 0 else -4), places[beside[-1][0]][0] + 7
            lane = next((number for number, end in enumerate(ends) if end < begin), len(ends))
            ends[lane : lane + 1] = [last]
            _pass_by(page, column, begin, [(places[at][0] + 7, precision) for at, precision in beside], lane)
    for box, (top, height) in zip(boxes, places, strict=True):
        given = [read for read in box.node.reads if read.kind != "result"]
        for number, read in enumerate(given):
            # Of experts less is read than there is; where there are weights of two precisions, all of them are.
            mixed = sum(one.kind == "weight" for one in given) > 1
            name = "KV" if read.kind == "cache" else f"{quantity(read.nbytes if mixed else box.node.cost.weights)}B"
            _from_the_left(page, column, name, read.precision, top + height / 2 + 26 * (number - (len(given) - 1) / 2))
        _draw_box(page, column, box, top, height)


def _results(boxes: Sequence[Box]) -> dict[tuple[int, str], list[tuple[int, str]]]:
    """By the place and name of what made it, -1 for all above the layer: who reads a result, in which precision. From
    above come only the hidden states; all else, such as angles, is for every layer."""
    places = {box.node.name: at for at, box in enumerate(boxes)}
    entering = {read.source for read in boxes[0].node.reads}
    found: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for at, box in enumerate(boxes):
        for read in box.node.reads:
            is_hidden = read.source in entering or "add" in box.node.operation  # the residual, which some boxes add
            source = places.get(read.source, -1 if is_hidden else None)
            if read.kind == "result" and source is not None:
                found.setdefault((source, read.source), []).append((at, read.precision))
    return found


def _pass_by(page: Svg, column: Column, begin: float, ends: Sequence[tuple[float, str]], lane: int) -> None:
    """From below a box to others further down, on a lane beside the boxes."""
    right = column.x + column.width
    out, kind = right + 12 + _LANE * lane, edge(ends[-1][1])
    page.path(f"M{right:.1f} {begin:.1f}H{out:.1f}V{ends[-1][0]:.1f}", kind)
    for end, precision in ends:
        page.path(f"M{out:.1f} {end:.1f}H{right:.1f}", edge(precision), edge(precision))


def _from_the_left(page: Svg, column: Column, name: str, precision: str, y: float) -> None:
    page.path(f"M{column.x - 26:.1f} {y:.1f}H{column.x:.1f}", edge(precision), edge(precision))
    page.text(column.x - 30, y - 1, name, "small", "end")
    page.text(column.x - 30, y + 10, _short(precision), "small", "end")


def _short(precision: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3"}.get(precision, precision)


def _draw_box(page: Svg, column: Column, box: Box, top: float, height: float) -> None:
    page.rect(column.x, top, column.width, height, bound_class(box.bound), tooltip(box), radius=4)
    lines = [("name", line) for line in _wrapped(box.label, column.width - 16)]
    lines += [("small", _by(box, column.width - 16))] * bool(box.by)
    lines += [("small", box.figures)]
    y = top + height / 2 - 7.5 * len(lines) + 11.5
    for kind, line in lines:
        page.text(column.x + 8, y, line, kind)
        y += 15


def _by(box: Box, width: float) -> str:
    """What runs it; if all its kernels do not fit, how many there are."""
    text = " ".join(box.by)
    return text if len(text) * _CHARACTER <= width else f"{box.by[0]}: {len(box.by) - 1} kernels"


def _wrapped(label: str, width: float) -> list[str]:
    """A label in lines that fit, broken before a sign."""
    lines, most = [""], width / _CHARACTER
    for word in label.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def tooltip(box: Box) -> str:
    """All that is known of a box, for where the pointer rests."""
    where = "" if box.node.layer is None else f"layer {box.node.layer}: "
    return "\n".join((where + box.label, *([" ".join(box.by)] * bool(box.by)), box.figures))
