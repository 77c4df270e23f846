"""Which kernel of the graph that runs does the work of an operation that was traced."""

from __future__ import annotations

from collections.abc import Sequence

from strata.cost.nodes import NodeCost


def correspondence(traced: Sequence[NodeCost], run: Sequence[NodeCost]) -> list[int]:
    """For each traced node the index of the node that does its work now; both are in the order of execution.

    By the parameters they read; of those without by the operations that a fused node's name joins with +; what neither
    tells goes with the node before it.
    """
    by_parameter = {name: index for index, node in enumerate(run) for name in node.parameters}
    found: list[int | None] = [
        next((by_parameter[name] for name in node.parameters if name in by_parameter), None) for node in traced
    ]
    places: dict[str, list[int]] = {}
    for index, node in enumerate(traced):
        if not node.parameters:
            places.setdefault(node.operation, []).append(index)
    for index, node in enumerate(run):
        joined = node.module.rpartition(".")[2].split("+")
        for operation in joined if len(joined) > 1 else [node.operation]:
            waiting = places.get(operation, [])
            while waiting:
                found[first := waiting.pop(0)] = index
                if len(joined) == 1 or not waiting or waiting[0] != first + 1:
                    break  # as the rotations of queries and keys, those side by side are fused together
    done, last = [], 0
    for own in found:
        last = last if own is None else own
        done.append(last)
    return done
