"""The whole drawing: the least time of each kernel of a model, and one layer with its edges, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.cost.draw import duration, quantity
from strata.cost.drawing.boxes import Box
from strata.cost.drawing.layer import Column, draw_layer, rows_of, tooltip
from strata.cost.drawing.svg import BOUNDS, Svg, bound_class, edge

_WIDTH, _MARGIN = 1000, 20
_STRIP = 34
_PRECISIONS = (("float32", "32 bits"), ("bfloat16", "16 bits"), ("e4m3", "8 bits"), ("int4", "4 bits"))


@dataclass(frozen=True)
class Drawing:
    """traced: the nodes of a model before the passes. run: after them. stands_for: for each traced node the index
    of the one that does its work (see `correspondence`). notes: lines at the end."""

    title: str
    traced: Sequence[Box]
    run: Sequence[Box]
    stands_for: Sequence[int]
    notes: Sequence[str] = ()

    def svg(self) -> str:
        """The document."""
        page = Svg(_WIDTH)
        page.text(_MARGIN, 32, self.title, "title")
        bottom = self._legend(page, 54)
        bottom = self._model(page, bottom + 30)
        bottom = self._layer(page, bottom + 34)
        for note in self.notes:
            bottom += 17
            page.text(_MARGIN, bottom, note, "small")
        return page.document(bottom + 16, self.title)

    def _legend(self, page: Svg, y: float) -> float:
        x: float = _MARGIN
        names = {"memory": "bound by memory", "compute": "by compute", "communication": "by messages", "": "no work"}
        used = {box.bound for box in (*self.traced, *self.run)}
        for bound in (one for one in BOUNDS if one in used):
            page.rect(x, y - 10, 14, 12, bound_class(bound), radius=2)
            page.text(x + 20, y, names[bound], "small")
            x += 36 + 6.6 * len(names[bound])
        x += 12
        carried = {edge(read.precision) for box in (*self.traced, *self.run) for read in box.node.reads}
        for precision, label in _PRECISIONS:
            if edge(precision) in carried:
                page.path(f"M{x} {y - 4}h26", edge(precision), edge(precision))
                page.text(x + 33, y, label, "small")
                x += 86
        page.text(x + 8, y, "& merged,  + fused", "small")
        return y

    def _model(self, page: Svg, y: float) -> float:
        """A strip of all kernels for each graph, as wide as their floors, both at one scale."""
        page.text(_MARGIN, y, "The whole model: a box an operation, as wide as its floor", "head2")
        strips = []
        for name, boxes in (("traced", self.traced), ("runs", self.run)):
            text = f"{name}: {len(boxes):,} operations, {{}} one after another at their floors"
            strips.append((text, [box.seconds for box in boxes], boxes))
        took = [box.took or 0.0 for box in self.run]
        if any(took):
            strips.append(("measured: the same, {} one after another, as wide as they took", took, self.run))
        room = (_WIDTH - 2 * _MARGIN) / max(sum(widths) for _, widths, _ in strips)
        for text, widths, boxes in strips:
            page.text(_MARGIN, y + 21, text.format(duration(sum(widths))), "small")
            x: float = _MARGIN
            last: int | None = None
            for box, seconds in zip(boxes, widths, strict=True):
                width = seconds * room
                page.rect(x, y + 27, max(width - 0.3, 0.15), _STRIP, f"{bound_class(box.bound)} solid", tooltip(box))
                if box.node.layer is not None and box.node.layer != last:
                    page.path(f"M{x:.2f} {y + 27 + _STRIP}v5", "axis")
                    if box.node.layer % 4 == 0:
                        page.text(x, y + _STRIP + 43, str(box.node.layer), "small", "middle")
                    last = box.node.layer
                x += width
            y += _STRIP + 48
        return y - 4

    def _layer(self, page: Svg, y: float) -> float:
        layers = sorted({box.node.layer for box in self.run if box.node.layer is not None})
        layer = layers[len(layers) // 2]
        run = [index for index, box in enumerate(self.run) if box.node.layer == layer]
        before = {index: [self.traced[at] for at, own in enumerate(self.stands_for) if own == index] for index in run}
        page.text(_MARGIN, y, f"Layer {layer} of 0 to {layers[-1]}: as traced, and what runs in its place", "head2")
        after = [self.run[index] for index in run]
        traced = [box for index in run for box in before[index]]
        for name, boxes, x in (("traced", traced, 104), ("runs", after, 580)):
            moved = sum(box.node.cost.weights for box in boxes)
            seconds = duration(sum(box.seconds for box in boxes))
            text = f"{name}: {len(boxes)} operations, {seconds} at least, weights {quantity(moved)}B"
            took = [box.took for box in boxes if box.took is not None]
            page.text(x, y + 22, text + (f", took {duration(sum(took))}" if took else ""), "small")
        rows = rows_of([len(before[index]) for index in run], y + 48)
        for row in rows:
            page.rect(_MARGIN, row.top - 5, _WIDTH - 2 * _MARGIN, row.height + 10, "band", radius=6)
        heights = [place for row in rows for place in row.parts]
        draw_layer(page, Column(104, 320), traced, heights)
        draw_layer(page, Column(580, 340), after, [(row.top, row.height) for row in rows])
        return rows[-1].top + rows[-1].height + 24
