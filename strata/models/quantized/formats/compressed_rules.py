"""What compressed-tensors' quantization_config says of each module: which scheme, and which layout on disk.

Keys, and how names are matched, are those of compressed-tensors 0.20.0, quantization/quant_config.py, quant_args.py
and utils/match.py (read 2026-11-23).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata.files.fields import Fields
from strata.models.quantized.formats.settings import take_names, take_object

_BLOCK = re.compile(r"(\d+)x(\d+)")
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
# Of how scales were found, which the scales themselves say.
_BOOKKEEPING_OF_NUMBERS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder"})
_BOOKKEEPING = (
    *("dequantize", "run_compressed", "use_optimized_inference"),
    *("global_compression_ratio", "moe_sparsity_config", "version"),
)


@dataclass(frozen=True)
class Numbers:
    """Of weights or activations: kind ("int" or "float") and bits, and what shares a scale.

    rows, columns: of a weight that share a scale, 0: all of them. dynamic: scales are found as activations are rounded.
    """

    kind: str
    bits: int
    symmetric: bool
    strategy: str
    rows: int
    columns: int
    dynamic: bool = False


@dataclass(frozen=True)
class Group:
    """A group of modules: their weights (None: plain), what those multiply (None: not rounded), and the layout."""

    targets: tuple[str, ...]
    weights: Numbers | None
    activations: Numbers | None
    layout: str


@dataclass(frozen=True)
class Rules:
    groups: tuple[Group, ...]
    ignored: tuple[str, ...]

    def group_of(self, module: str, module_class: str) -> Group | None:
        """The group of a module: of the targets that match it the first, names before patterns before classes. None:
        it is ignored, or no target matches it."""
        if any(_names(rule, module) or rule == module_class for rule in self.ignored):
            return None
        by_target = {target: group for group in self.groups for target in group.targets}
        targets = sorted(by_target, key=lambda target: ("re:" in target, target))
        matched = [target for target in targets if _names(target, module)]
        matched += [target for target in targets if target == module_class]
        return by_target[matched[0]] if matched else None

    def names(self, module: str) -> bool:
        """Whether a target names a module itself or by a pattern, and nothing ignores it."""
        targets = (target for group in self.groups if group.weights is not None for target in group.targets)
        return any(_names(target, module) for target in targets) and not any(
            _names(rule, module) for rule in self.ignored
        )


def _names(rule: str, module: str) -> bool:
    return re.match(rule.removeprefix("re:"), module) is not None if rule.startswith("re:") else rule == module


def read_rules(fields: Fields) -> Rules:
    """The rules of a quantization_config. Raises ValueError for a key or value that is not known."""
    fields.choice("quantization_status", ("compressed", "frozen", None), None)
    sparsity = take_object(fields, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise fields.wrong("sparsity_config", sparsity, "null, because the format for zeros was given up in 2026")
    if transform := take_object(fields, "transform_config"):
        raise fields.wrong("transform_config", transform, "null; rotated activations are not implemented")
    layout = fields.take("format", None)
    ignored = take_names(fields, "ignore")
    groups = take_object(fields, "config_groups")
    fields.finish(_BOOKKEEPING)
    if not groups:
        raise ValueError(f"{fields.where}: config_groups is empty, so that no weights are packed")
    read = tuple(_read_group(name, group, layout, fields.where) for name, group in groups.items())
    for rule in (*ignored, *(target for group in read for target in group.targets)):
        _check_pattern(rule, fields.where)
    return Rules(read, ignored)


def _check_pattern(rule: str, where: str) -> None:
    try:
        re.compile(rule.removeprefix("re:"))
    except re.error as error:
        if rule.startswith("re:"):
            raise ValueError(f"{where}: {rule!r} is no regular expression: {error}") from None


def _read_group(name: str, values: Any, layout: str | None, where: str) -> Group:
    where = f"{where}, config_groups, {name}"
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {values!r}; supported is an object with targets and weights")
    fields = Fields(values, where)
    targets = take_names(fields, "targets")
    weights = take_object(fields, "weights")
    inputs = take_object(fields, "input_activations")
    fields.only("output_activations", None, "results of products are not rounded")
    layout = fields.take("format", None) or layout
    fields.finish()
    numbers = _read_numbers(weights, f"{where}, weights") if weights else None
    if numbers is not None and not isinstance(layout, str):
        raise ValueError(f"{where}: neither the group nor quantization_config has a format")
    activations = _read_activations(inputs, f"{where}, input_activations") if inputs else None
    return Group(targets, numbers, activations, layout or "")


def _read_numbers(values: dict[str, Any], where: str) -> Numbers:
    """Of weights."""
    fields = Fields(values, where)
    fields.only("dynamic", False, "weights are stored with their scales")
    _check_order(fields)
    return _take_numbers(fields, _STRATEGIES)


def _read_activations(values: dict[str, Any], where: str) -> Numbers:
    fields = Fields(values, where)
    dynamic = fields.choice("dynamic", (True, False, "local"), False)
    return replace(_take_numbers(fields, (*_STRATEGIES[:-1], "token")), dynamic=dynamic is not False)


def _check_order(fields: Fields) -> None:
    # A stored weight_g_idx tells of "group"; the others leave columns where they are.
    fields.choice("actorder", ("weight", "static", "group", "dynamic", True, False, None), None)


def _take_numbers(fields: Fields, strategies: Sequence[str]) -> Numbers:
    kind, bits = fields.choice("type", ("int", "float"), "int"), fields.count("num_bits", 8)
    symmetric, size = fields.flag("symmetric", True), fields.take("group_size", None)
    strategy = fields.choice("strategy", (*strategies, None), None)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    block = _take_block(fields)
    fields.finish(_BOOKKEEPING_OF_NUMBERS)
    rows, columns = 1, 0
    if strategy == "tensor":
        rows = 0
    elif strategy in ("group", "tensor_group"):
        if type(size) is not int or size <= 0:
            raise fields.wrong("group_size", size, "a positive integer where scales are of groups")
        columns = size
    elif strategy == "block":
        if block is None:
            raise ValueError(f"{fields.where}: strategy = 'block' needs block_structure")
        rows, columns = block
    return Numbers(kind, bits, symmetric, strategy, rows, columns)


def _take_block(fields: Fields) -> tuple[int, int] | None:
    value = fields.take("block_structure", None)
    if value is None:
        return None
    sizes = value
    if isinstance(value, str):
        matched = _BLOCK.fullmatch(value)
        sizes = [int(one) for one in matched.groups()] if matched else None
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(one) is int and one > 0 for one in sizes)):
        raise fields.wrong("block_structure", value, "two positive integers")
    return sizes[0], sizes[1]
