"""The passes that can be left out of the graphs of steps, by name, in the order in which they run.

None of them approximates: what does (weights or keys in fewer bits, sparsity) is asked for by options of its own. What
a graph cannot do without is not among them: the shares and messages of ranks, packed weights, the rows that are wanted.
"""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """steps: which it serves; of those that are not for all, on CUDA and outside deterministic mode. exact: its
    operations have the bits of what they stand for; others round sums in another order or at other places. unasked:
    it runs where no passes are asked for."""

    name: str
    exact: bool
    steps: str
    does: str
    unasked: bool = True


PASSES = (
    Pass("fold_batch_norms", False, "all", "convolutions take up batch norms"),
    Pass("fold_linears", False, "all", "a linear of a linear becomes one"),
    Pass("fold_norm_weights", False, "all", "products take up norms' weights", unasked=False),
    Pass("merge", True, "all", "products of the same rows become one"),
    Pass("fuse_residual_norms", True, "all", "a sum and its norm become one"),
    Pass("fuse_query_key_writes", True, "all", "q and k are rotated, k and v written"),
    Pass("fuse_decode_attention", False, "decodes", "those and attention become one"),
    Pass("fuse_messages", False, "of ranks", "sums over ranks take up norms"),
    Pass("fuse_products", False, "few decodes", "products take up norms, sums, gates"),
    Pass("fuse_gemm_all_reduce", True, "few decodes", "products send what ranks add up"),
    Pass("fuse_rounding", True, "many rows", "norms and gates round to 8 bits"),
    Pass("fuse_gated_products", False, "prompts", "a product takes up its gate"),
)
_NAMES = frozenset(one.name for one in PASSES)
ALL_PASSES = frozenset(one.name for one in PASSES if one.unasked)
_EXACT = frozenset(one.name for one in PASSES if one.exact)
_NAMED = {"all": ALL_PASSES, "exact": _EXACT, "none": frozenset[str]()}


def passes_of(text: str) -> frozenset[str]:
    """The names of the passes that run: "all", "exact", "none", "merge,fuse_rounding" (these alone) or
    "-merge,+fold_norm_weights" (all but the one, and the other).

    Raises ValueError for a name that no pass has, and for names with and without a sign beside each other.
    """
    if text in _NAMED:
        return _NAMED[text]
    names = [name.strip() for name in text.split(",")]
    signed = {sign: {name[1:] for name in names if name.startswith(sign)} for sign in "+-"}
    bare = {name for name in names if name[:1] not in signed}
    unknown = sorted(bare.union(*signed.values()) - _NAMES)
    if unknown:
        raise ValueError(
            f"passes = {text!r}: there is no pass {unknown[0]!r}; accepted are all, exact, none, names that alone run, "
            f"or names with a minus that are left out and with a plus that are added, of "
            f"{', '.join(one.name for one in PASSES)}; strata graph MODEL --passes list tells what they do"
        )
    if not any(signed.values()):
        return frozenset(bare)
    if bare:
        raise ValueError(f"passes = {text!r}: give names that alone run, or names with a minus or a plus, not both")
    return ALL_PASSES - signed["-"] | signed["+"]


def listing() -> str:
    """All passes, a line each."""
    name, steps = (max(len(getattr(one, field)) for one in PASSES) for field in ("name", "steps"))
    rows = [Pass("pass", False, "steps", "what it does"), *PASSES]
    bits = ["bits", *("same" if one.exact else "other" for one in PASSES)]
    table = (f"{one.name:{name}}  {of:5}  {one.steps:{steps}}  {one.does}" for one, of in zip(rows, bits, strict=True))
    asked = ", ".join(one.name for one in PASSES if not one.unasked)
    steps_of_cuda = "Those that are not for all steps run on CUDA, outside deterministic mode."
    return "\n".join((*table, "", steps_of_cuda, f"Run only if asked for by a plus or alone: {asked}."))
