"""Under which route a request is counted: its template, of which there are few, never a path that a client made up."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.routing import BaseRoute, Route

OTHER = ("other", "other")


class Handlers:
    """names: (method, template of the path) of every route, and OTHER for whatever no route takes."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._fixed: dict[tuple[str, str], int] = {}
        self._patterns: list[tuple[str, re.Pattern[str], int]] = []
        self.names: list[tuple[str, str]] = [OTHER]
        for route in routes:
            if not isinstance(route, Route):
                continue
            for method in sorted((route.methods or set()) - {"HEAD"}):
                place = len(self.names)
                self.names.append((method, route.path))
                if route.param_convertors:
                    self._patterns.append((method, route.path_regex, place))
                else:
                    self._fixed[method, route.path] = place

    def place(self, method: str, path: str) -> int:
        """Where in `names` a request belongs; HEAD is answered as GET is."""
        method = "GET" if method == "HEAD" else method
        found = self._fixed.get((method, path))
        if found is not None:
            return found
        return next((at for known, regex, at in self._patterns if known == method and regex.match(path)), 0)
