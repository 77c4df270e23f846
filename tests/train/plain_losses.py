"""Objectives of tests, and each loss of a step written out, from the logits of whole packs, without any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from strata.comm.launch import World
from strata.models.config import read_config
from strata.models.layers import CausalLM
from strata.models.quantized.choice import hold_quantized
from strata.parallel.layout import Layout
from strata.parallel.loss import Head, MicroBatch
from strata.train.adapters.frozen import load_frozen
from strata.train.data.pack import PackedBatch, Samples
from strata.train.dpo import DpoConfig, DpoObjective, Reference
from strata.train.steps.micro_batch import micro_batch
from strata.train.steps.objective import Columns, NextToken, Objective
from strata.train.steps.passes import head_weight

ALONE = World(0, 0, 1, torch.device("cpu"), None)
BETA, SMOOTHING, CLIP = 0.3, 0.1, 0.02


class Known(Reference):
    """Some numbers for each pair, near what a random model says."""

    def of(self, samples: Samples) -> Tensor:
        return torch.from_numpy(-10.0 - np.stack([samples.numbers % 7, samples.numbers % 5], 1))


class SequenceRatios:
    """A policy gradient with a column for tokens and one for documents: the ratios of GSPO (Zheng et al. 2025)."""

    metrics = ("ratio",)
    sums_cross_entropy = False

    def count(self, packed: PackedBatch) -> int:
        return int((counts_of(packed) > 0).sum())

    def columns(self, packed: PackedBatch) -> Columns:
        counts = counts_of(packed)
        return Columns({"old": old_logprobs(packed)}, {"advantage": advantages(packed), "counts": counts})

    def __call__(self, hidden: Tensor, head: Head, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        columns = batch.columns
        apart = -head.cross_entropy(hidden, batch.targets) - columns["old"]
        ratio = (batch.per_document(apart) / columns["counts"].clamp(min=1)).exp()
        gain = torch.minimum(ratio * columns["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * columns["advantage"])
        gain, ratio = (torch.where(columns["counts"] > 0, one, 0) for one in (gain, ratio))
        return -batch.mean_of_documents(gain), {"ratio": batch.mean_of_documents(ratio)}


OBJECTIVES: dict[str, Objective] = {
    "next token": NextToken(),
    "dpo": DpoObjective(Known(), DpoConfig(BETA, SMOOTHING)),
    "policy": SequenceRatios(),
}


def counts_of(packed: PackedBatch) -> np.ndarray:
    """[documents] float64 how many targets each has."""
    return np.histogram(packed.rows, packed.offsets)[0].astype(np.float64)


def old_logprobs(packed: PackedBatch) -> np.ndarray:
    """[targets] of tokens, as a policy of long ago might have had them."""
    return -3.0 - packed.targets % 5 / 4


def advantages(packed: PackedBatch) -> np.ndarray:
    """[documents] of their first tokens."""
    return np.where(packed.tokens[packed.offsets[:-1]] % 2, 1.0, -0.5)


def plain_logprobs(model: CausalLM, weights: Mapping[str, Tensor], packed: PackedBatch) -> Tensor:
    """[targets] of a model with some other weights."""
    batch, rows, targets = packed.to(torch.device("cpu"))
    name = "model.embed_tokens.weight" if model.lm_head is None else "lm_head.weight"
    hidden = functional_call(model, dict(weights), (batch,))[rows]
    logits = hidden @ weights.get(name, model.get_parameter(name)).t()
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def plain_loss(name: str, logprobs: Sequence[Tensor], packs: Sequence[PackedBatch]) -> Tensor:
    """Of a step, [] with its gradient."""
    if name == "next token":
        return -torch.cat(list(logprobs)).sum() / sum(len(one.targets) for one in packs)
    found = []
    for each, packed in zip(logprobs, packs, strict=True):
        ends = np.cumsum(counts_of(packed)).astype(int)
        documents = torch.tensor_split(each, torch.from_numpy(ends[:-1]))
        if name == "dpo" and packed.samples is not None:
            for pair, (chosen, rejected) in enumerate(Known().of(packed.samples).tolist()):
                margin = BETA * (documents[2 * pair].sum() - chosen - documents[2 * pair + 1].sum() + rejected)
                wrong = SMOOTHING
                found.append(-(1 - wrong) * torch.sigmoid(margin).log() - wrong * torch.sigmoid(-margin).log())
        if name == "policy":
            olds = np.split(old_logprobs(packed), ends[:-1])
            for own, old, advantage in zip(documents, olds, advantages(packed).tolist(), strict=True):
                if len(own):
                    ratio = (own - torch.from_numpy(old)).mean().exp()
                    found.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
    return torch.stack(found).sum() / max(1, len(found))


def loss_of_pack(model: CausalLM, packed: PackedBatch, objective: Objective | None = None) -> Tensor:
    """The sum that an objective makes of one pack, [] with its gradient, by the modules of a model."""
    objective = objective or NextToken()
    head, axis = head_weight(model), Layout().mesh(ALONE).axis("cp")
    scale = torch.ones((), dtype=torch.promote_types(head.dtype, torch.float32), device=head.device)
    one = micro_batch(packed, objective.columns(packed), scale, head.device, axis, "ring")
    total, _ = objective(one.counted(model(one.batch)), Head(head, axis, len(head)), one)
    return total


def frozen(
    folder: Path, scheme: str | None, device: torch.device = ALONE.device, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """The model of a folder, which holds packed what a run would."""
    model, packed = load_frozen(folder, read_config(folder), scheme, device, dtype)
    hold_quantized(model, packed)
    return model
