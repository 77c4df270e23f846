"""The passes that can be left out of the graphs of steps, by name, in the order in which they run.

None of them approximates: what does (weights or keys in fewer bits, sparsity) is asked for by options of its own. What
a graph cannot do without is not among them: the shares and messages of ranks, packed weights, the rows that are wanted.
"""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """steps: which it serves; of those that are not for all, on CUDA and outside deterministic mode. exact: its
    operations have the bits of what they stand for; others round sums in another order or at other places. by_default:
    it runs unless it is left out; others, which no device has shown to pay, where they are asked for."""

    name: str
    exact: bool
    steps: str
    does: str
    by_default: bool = True


PASSES = (
    Pass("merge", True, "all", "products of the same rows become one"),
    Pass("fuse_residual_norms", True, "all", "a sum and its norm become one"),
    Pass("fuse_query_key_writes", True, "all", "q and k are rotated, k and v written"),
    Pass("fuse_decode_attention", False, "decodes", "those and attention become one"),
    Pass("fuse_messages", False, "of ranks", "sums over ranks take up norms"),
    Pass("fuse_products", False, "few decodes", "products take up norms, sums, gates"),
    Pass("fuse_sent_products", True, "few decodes", "products send what ranks add up", by_default=False),
    Pass("fuse_rounding", True, "many rows", "norms and gates round to 8 bits"),
    Pass("fuse_gated_products", False, "prompts", "a product takes up its gate"),
)
_KNOWN = frozenset(one.name for one in PASSES)
ALL_PASSES = frozenset(one.name for one in PASSES if one.by_default)
_EXACT = frozenset(one.name for one in PASSES if one.exact) & ALL_PASSES
_NAMED = {"all": ALL_PASSES, "exact": _EXACT, "none": frozenset[str]()}


def passes_of(text: str) -> frozenset[str]:
    """The names of the passes that run: "all" (that do so by default), "exact", "none", "merge,fuse_rounding" (these
    alone) or "-fuse_products,+fuse_sent_products" (all but the former, and the latter).

    Raises ValueError for a name that no pass has, for names with and without a sign beside each other, and for one name
    with both signs.
    """
    if text in _NAMED:
        return _NAMED[text]
    names = [name.strip() for name in text.split(",")]
    signs = [name[:1] if name[:1] in ("-", "+") else "" for name in names]
    bare = [name.removeprefix(sign) for name, sign in zip(names, signs, strict=True)]
    unknown = sorted(set(bare) - _KNOWN)
    if unknown:
        raise ValueError(
            f"passes = {text!r}: there is no pass {unknown[0]!r}; accepted are all, exact, none, or names, or names "
            f"with a minus that are left out or a plus that are added, of {', '.join(one.name for one in PASSES)}"
        )
    if not any(signs):
        return frozenset(bare)
    if not all(signs):
        raise ValueError(f"passes = {text!r}: give names that alone run, or names with a minus or a plus, not both")
    added, left_out = ({name for name, of in zip(bare, signs, strict=True) if of == sign} for sign in ("+", "-"))
    if both := sorted(added & left_out):
        raise ValueError(f"passes = {text!r}: {both[0]} is added and left out; give it one sign")
    return (ALL_PASSES | added) - left_out


def listing() -> str:
    """All passes, a line each."""
    name, steps = (max(len(getattr(one, field)) for one in PASSES) for field in ("name", "steps"))
    rows = [Pass("pass", False, "steps", "what it does"), *PASSES]
    bits = ["bits", *("same" if one.exact else "other" for one in PASSES)]
    table = (f"{one.name:{name}}  {of:5}  {one.steps:{steps}}  {one.does}" for one, of in zip(rows, bits, strict=True))
    asked = ", ".join(f"+{one.name}" for one in PASSES if not one.by_default)
    last = ("Those that are not for all steps run on CUDA, outside deterministic mode.", f"Only if asked for: {asked}")
    return "\n".join((*table, "", *last))
