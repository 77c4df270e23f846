"""The least that any step of a model costs, from one look at its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from strata.graph.walk import walk
from strata.hardware.roofline import Cost, Workload
from strata.kernels.moe.experts import biased_experts, expected_experts, expert_bytes, local_experts
from strata.kernels.op import Operation


@dataclass(frozen=True)
class StepCosts:
    """The least that any step of a model costs, from one look at its graph.

    Outside attention the cost follows from the numbers of tokens and of rows whose logits are wanted; attention and
    recurrences are asked for their own. Activations can stay on the chip in principle, so the bytes of a step are the
    weights, and the keys, values and states that it reads, once each. Of the experts of a mixture it reads those that
    its tokens are expected to go to.

    token_flops, row_flops: of a token, and of a row behind the last attention. token_weights: bytes of the embedding's
    row. token_traffic: bytes of a token's activations that operations outside attention read and write, which `step`
    leaves out. weights: bytes of the parameters that every step reads. attentions: each distinct attention as a
    function of the workload, and in how many layers it stands; recurrences: and each operation of fixed states,
    convolutions too. mixtures: the bytes of experts that so many tokens read,
    whether only rows go to them, and in how many layers. messages: the collectives of a step. token_sent, row_sent:
    bytes that a rank sends in them for a token, and for a row behind the last attention.
    """

    token_flops: int
    row_flops: int
    token_weights: int
    token_traffic: int
    weights: int
    attentions: tuple[tuple[Callable[[Workload], Cost], int], ...]
    mixtures: tuple[tuple[Callable[[int], int], bool, int], ...]
    messages: int = 0
    token_sent: int = 0
    row_sent: int = 0
    recurrences: tuple[tuple[Callable[[Workload], Cost], int], ...] = ()

    @property
    def states(self) -> tuple[tuple[Callable[[Workload], Cost], int], ...]:
        """Of all operations that read what sequences keep."""
        return self.attentions + self.recurrences

    def step(self, workload: Workload, rows: int) -> Cost:
        """A step that runs `workload` and projects `rows` hidden states onto the vocabulary."""
        found = self.beside_states(workload.tokens, rows)
        flops = cached = 0
        for state_cost, layers in self.states:
            cost = state_cost(workload)
            flops += layers * cost.flops
            cached += layers * cost.cached
        return (found + Cost(flops, cached=cached)).in_step

    def beside_states(self, tokens: int, rows: int) -> Cost:
        """The same of so many tokens, without what reads what sequences keep."""
        weights = self.weights + self.token_weights * tokens
        weights += sum(layers * read(rows if of_rows else tokens) for read, of_rows, layers in self.mixtures)
        sent = self.token_sent * tokens + self.row_sent * rows
        flops = self.token_flops * tokens + self.row_flops * rows
        return Cost(flops, weights=weights, messages=self.messages, sent=sent)


# The second tells one window of attention from another.
_SHORT, _LONG = Workload((1,), (1,)), Workload((1,), (1 << 40,))


def step_costs(graph: fx.GraphModule, argument: Callable[[int, int], Any]) -> StepCosts:
    """What steps of a model cost, from the graph that returns the logits of some rows (`gather_after_attention`).

    argument: what the graph is called with for so many sequences of one token each, of which so many rows are wanted.
    """
    flops: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    traffic = messages = 0
    attentions: Counter[Cost] = Counter()
    recurrences: Counter[Cost] = Counter()
    examples: dict[Cost, Callable[[Workload], Cost]] = {}
    mixtures: Counter[tuple[int, int, int, int, int, bool]] = Counter()
    for one, two in zip(walk(graph, argument(1, 1)), walk(graph, argument(2, 1)), strict=True):
        if one.operation is None:
            continue
        of_one, of_two = (partial(_cost, one.operation, called.args) for called in (one, two))
        if one.operation.reads_state:
            kind, is_recurrent = of_one(_LONG), one.operation.recurrent
            (recurrences if is_recurrent else attentions)[kind] += 1
            weights["step"] += kind.weights  # of a convolution, a state space, sinks, and of what makes keys of latents
            more = of_two(_SHORT) - of_one(_SHORT)
            examples.setdefault(kind, partial(_recurrent_cost, of_one, more) if is_recurrent else of_one)
            continue
        # With twice the tokens and as many rows: what has grown goes by tokens.
        cost, grown = of_one(_SHORT), of_two(_SHORT)
        flops.update(token=grown.flops - cost.flops, row=2 * cost.flops - grown.flops)
        moved, moved_of_two = (each.bytes - each.weights for each in (cost, grown))
        traffic += moved_of_two - moved
        messages += cost.messages
        sent.update(token=grown.sent - cost.sent, row=2 * cost.sent - grown.sent)
        if one.operation.mixture:
            (_, _, chosen, gate_up, down, *others), rows = one.args, len(two.args[2])
            count = others[1] if one.operation is local_experts else len(down)
            sources = len(chosen)  # ranks that bring tokens, of which each has one here
            biases = others[:2] if one.operation is biased_experts else ()
            size = expert_bytes(gate_up, down, *biases)
            mixtures[chosen.shape[1], count, len(down), size, sources, rows == sources] += 1
        else:
            weights.update(token=grown.weights - cost.weights, step=2 * cost.weights - grown.weights)
    return StepCosts(
        flops["token"],
        flops["row"],
        weights["token"],
        traffic,
        weights["step"],
        tuple((examples[kind], layers) for kind, layers in attentions.items()),
        tuple((partial(_expert_bytes, *kind), of_rows, layers) for (*kind, of_rows), layers in mixtures.items()),
        messages,
        sent["token"],
        sent["row"],
        tuple((examples[kind], layers) for kind, layers in recurrences.items()),
    )


def _cost(operation: Operation, args: tuple[Any, ...], workload: Workload) -> Cost:
    return operation.cost(*args, workload=workload)


def _recurrent_cost(of_one: Callable[[Workload], Cost], token: Cost, workload: Workload) -> Cost:
    """of_one: with the activations of one token. token: of each more, whose state is that of its sequence."""
    found, more = of_one(workload), workload.tokens - 1
    return replace(
        found,
        flops=found.flops + more * token.flops,
        read=found.read + more * token.read,
        written=found.written + more * token.written,
    )


def _expert_bytes(per_token: int, count: int, held: int, size: int, sources: int, tokens: int) -> int:
    """Bytes of those of `held` experts out of `count`, `size` each, that some of the tokens of `sources` ranks, each of
    which has so many, are expected to go to."""
    tokens *= sources
    return round(expected_experts(tokens, per_token * tokens, count) * held / count * size)
