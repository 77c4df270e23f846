"""What a model predicts for the tokens of passages, computed by the steps of an engine that serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from strata.bench.accuracy.passages import Passage
from strata.bench.graph_calls import replaced
from strata.bench.step_observers import observed
from strata.engine.llm import LLM
from strata.engine.plan import StepPlan
from strata.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Predictions:
    """Of some passages, for each: the last hidden state before every id that is scored, [ids, hidden], on the host.

    head: hidden [rows, hidden] on `device` to logits [rows, vocabulary]. It is all that is left of a model whose engine
    has ended, so that another fits beside it; logits of all passages would take a thousand times the room.
    """

    states: tuple[Tensor, ...]
    head: fx.GraphModule
    device: torch.device

    @torch.inference_mode()
    def log_probabilities(self, passage: int, rows: slice) -> Tensor:
        """Natural, [rows, vocabulary] float32 on the device."""
        logits: Tensor = self.head.forward(self.states[passage][rows].to(self.device))
        return logits.float().log_softmax(dim=-1)


def predict(llm: LLM, passages: Sequence[Passage]) -> Predictions:
    """Run the passages as prompts whose tokens are scored: the same graphs, kernels, chunks and pages that serve."""
    engine = llm.engine
    head = engine.program.head
    assert head is not None  # of one rank
    watched = _PromptStates({passage.ids: passage.first for passage in passages})
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    graphs = [engine.program.hidden, *(variant.hidden for variant in engine.program.variants)]
    named = {str(number): graph for number, graph in enumerate(graphs) if graph is not None}
    with observed(engine.loop, watched), replaced(named, watched.kept):
        llm.generate([{"prompt_token_ids": list(passage.ids)} for passage in passages], params)
    return Predictions(tuple(watched.states(passage.ids) for passage in passages), head, engine.device)


class _PromptStates:
    """An observer of steps that keeps the hidden states which predict ids from `first` on of each prompt."""

    def __init__(self, first: dict[tuple[int, ...], int]) -> None:
        self._first = first
        self._prompts: dict[int, tuple[int, ...]] = {}  # by the numbers of sequences
        self._states: dict[tuple[int, ...], Tensor] = {}
        self._plan: StepPlan | None = None

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._prompts |= {one.id: one.tokens[: one.prompt_length] for one in plan.new}

    def end(self) -> None:
        pass

    def states(self, prompt: tuple[int, ...]) -> Tensor:
        return self._states[prompt]

    def kept(self, _: str, hidden: fx.GraphModule) -> Callable[[Any], Any]:
        """A call of the graph, of which what it returns is kept."""
        forward = hidden.forward

        def call(batch: Any) -> Any:
            found = forward(batch)
            self._keep(found)
            return found

        return call

    def _keep(self, hidden: Tensor) -> None:
        """hidden: [tokens, hidden] of a step, its chunks one after another."""
        assert self._plan is not None
        at = 0
        for chunk in self._plan.chunks:
            rows, at = hidden[at : at + chunk.count], at + chunk.count
            prompt = self._prompts[chunk.sequence]
            # The row of a token predicts the one behind it; the last row of a prompt none of its own.
            skipped, places = self._first[prompt] - 1, len(prompt) - self._first[prompt]
            if prompt not in self._states:
                self._states[prompt] = torch.empty(places, hidden.shape[1], dtype=hidden.dtype)
            begin, end = max(chunk.start - skipped, 0), min(chunk.start + chunk.count - skipped, places)
            if begin < end:
                offset = skipped - chunk.start
                self._states[prompt][begin:end] = rows[begin + offset : end + offset].cpu()
