"""The passes that can be left out of the graphs of steps, by name, in the order in which they run.

None of them approximates: what does (weights or keys in fewer bits, sparsity) is asked for by options of its own. What
a graph cannot do without is not among them: the shares and messages of ranks, packed weights, the rows that are wanted.
"""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """steps: which it serves; of those that are not for all, on CUDA and outside deterministic mode. exact: its
    operations have the bits of what they stand for; others round sums in another order or at other places."""

    name: str
    exact: bool
    steps: str
    does: str


PASSES = (
    Pass("merge", True, "all", "products of the same rows become one"),
    Pass("fuse_residual_norms", True, "all", "a sum and its norm become one"),
    Pass("fuse_query_key_writes", True, "all", "q and k are rotated, k and v written"),
    Pass("fuse_decode_attention", False, "decodes", "those and attention become one"),
    Pass("fuse_messages", False, "of ranks", "sums over ranks take up norms"),
    Pass("fuse_products", False, "few decodes", "products take up norms, sums, gates"),
    Pass("fuse_sent_products", True, "few decodes", "products send what ranks add up"),
    Pass("fuse_rounding", True, "many rows", "norms and gates round to 8 bits"),
    Pass("fuse_gated_products", False, "prompts", "a product takes up its gate"),
)
ALL_PASSES = frozenset(one.name for one in PASSES)
_EXACT = frozenset(one.name for one in PASSES if one.exact)
_NAMED = {"all": ALL_PASSES, "exact": _EXACT, "none": frozenset[str]()}


def passes_of(text: str) -> frozenset[str]:
    """The names of the passes that run: "all", "exact", "none", "merge,fuse_rounding" (these alone) or
    "-fuse_products,-merge" (all but these).

    Raises ValueError for a name that no pass has, and for names with and without a minus beside each other.
    """
    if text in _NAMED:
        return _NAMED[text]
    names = [name.strip() for name in text.split(",")]
    bare = [name.removeprefix("-") for name in names]
    left_out = [name for name, one in zip(bare, names, strict=True) if name != one]
    unknown = sorted(set(bare) - ALL_PASSES)
    if unknown:
        raise ValueError(
            f"passes = {text!r}: there is no pass {unknown[0]!r}; accepted are all, exact, none, names that alone run, "
            f"or names with a minus that are left out, of {', '.join(one.name for one in PASSES)}; strata graph MODEL "
            "--passes list tells what they do"
        )
    if not left_out:
        return frozenset(bare)
    if len(left_out) < len(names):
        raise ValueError(f"passes = {text!r}: give names that alone run, or names with a minus, not both")
    return ALL_PASSES - set(left_out)


def listing() -> str:
    """All passes, a line each."""
    name, steps = (max(len(getattr(one, field)) for one in PASSES) for field in ("name", "steps"))
    rows = [Pass("pass", False, "steps", "what it does"), *PASSES]
    bits = ["bits", *("same" if one.exact else "other" for one in PASSES)]
    table = (f"{one.name:{name}}  {of:5}  {one.steps:{steps}}  {one.does}" for one, of in zip(rows, bits, strict=True))
    return "\n".join((*table, "", "Those that are not for all steps run on CUDA, outside deterministic mode."))
