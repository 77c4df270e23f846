"""Evaluates a model, alone or against a reference, one engine after the other."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strata.bench.accuracy.divergence import divergence, losses
from strata.bench.accuracy.intervals import (
    RESAMPLES,
    Bootstrap,
    IntervalEstimate,
    Values,
    mean_difference,
    mean_of_tasks,
    wilson,
)
from strata.bench.accuracy.passages import Passage, exercise_passages, read_passages
from strata.bench.accuracy.states import Predictions, predict
from strata.bench.accuracy.tasks import replies
from strata.engine.engine_config import EngineConfig
from strata.engine.llm import LLM
from strata.models.config import read_config
from strata.text.tokenizer import Tokenizer
from strata.train.data.encode import Encoder
from strata.train.score import Score, is_right, questions, score
from strata.train.tasks.example import Example

EXAMPLES = 10  # of each task, where nobody says how many and no text is given
_LENGTH = 2048  # of passages, where models and options allow it
_ANSWER = 300  # tokens: the longest replies of the exercises are below


@dataclass(frozen=True)
class EvaluationRequest:
    """model, against: folders. text: a file, None: held-out exercises. passages: at most so many. length: the most
    tokens of one, None: 2048 or what the models take. examples: of each task, 0: no tasks are asked; None: without a
    text EXAMPLES, where the models have the chat format of the tasks. engine, against_engine: options of `LLM`."""

    model: Path
    against: Path | None
    text: Path | None
    passages: int
    length: int | None
    examples: int | None
    engine: Mapping[str, Any] = field(default_factory=dict)
    against_engine: Mapping[str, Any] = field(default_factory=dict)
    verbose: bool = True


@dataclass(frozen=True)
class Evaluation:
    """passages: that were read, out of `passages_of_text`; tokens: of them, that are scored. documents: that are drawn
    again for intervals; passages of one document stand for documents.

    kl_mean, kl_p99: KL(reference || model) of a token over the whole vocabulary, in nats. top1_agreement: the share of
    tokens before which both find the same one likeliest. perplexity_ratio: the model's over the reference's, of the
    same tokens, so surer than either. task_mean: each counts alike. task_difference: model less
    reference, of the same questions. What needs a reference, or tasks, is None or empty without.
    """

    passages: int
    passages_of_text: int
    tokens: int
    documents: int
    perplexity: IntervalEstimate
    reference_perplexity: IntervalEstimate | None = None
    perplexity_ratio: IntervalEstimate | None = None
    kl_mean: IntervalEstimate | None = None
    kl_p99: IntervalEstimate | None = None
    top1_agreement: IntervalEstimate | None = None
    scores: tuple[Score, ...] = ()
    reference_scores: tuple[Score, ...] = ()
    task_mean: IntervalEstimate | None = None
    reference_task_mean: IntervalEstimate | None = None
    task_difference: IntervalEstimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values; accuracies of tasks with their intervals."""
        intervals = {"level": 0.95, "text": f"bootstrap over documents, {RESAMPLES} resamples", "tasks": "Wilson"}
        intervals["task_difference"] = "Bonett and Price, of paired questions"
        scores = {"scores": _rows(self.scores), "reference_scores": _rows(self.reference_scores)}
        return asdict(self) | scores | {"intervals": intervals}


def _rows(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [asdict(one) | {"accuracy": asdict(wilson(one.accuracy, one.total))} for one in scores]


@dataclass(frozen=True)
class _Answers:
    """Of one model. right: for each example 1 or 0."""

    predictions: Predictions
    right: Values
    scores: tuple[Score, ...]


def evaluate(asked: EvaluationRequest) -> Evaluation:
    """Raises ValueError before a model is loaded for vocabularies that differ, and for text that is none."""
    for folder, options in ((asked.model, asked.engine), (asked.against, asked.against_engine)):
        if folder is not None:
            EngineConfig.from_options(folder, options)  # what it refuses is told before anything is read
    tokenizer, length = _common(asked)
    if asked.text is None:
        given = exercise_passages(tokenizer, asked.passages, length)
    else:
        given = read_passages(asked.text, tokenizer, length)
    examples = _examples(asked)
    passages = given[: asked.passages]
    answers = _of_model(_llm(asked.model, asked.engine, asked), asked.model, passages, examples)
    if asked.against is None:
        return _alone(passages, given, answers, examples)
    reference = _of_model(_llm(asked.against, asked.against_engine, asked), asked.against, passages, examples)
    return _against(passages, given, answers, reference, examples)


def _examples(asked: EvaluationRequest) -> list[Example]:
    """What both models are asked. Raises ValueError for models that cannot be asked tasks, where these were wanted."""
    wanted = (0 if asked.text is not None else EXAMPLES) if asked.examples is None else asked.examples
    if not wanted:
        return []
    try:
        for folder in (asked.model, asked.against):
            if folder is not None:
                _encoder(folder)
    except ValueError:
        if asked.examples is not None:
            raise
        return []
    return questions(wanted)


def _common(asked: EvaluationRequest) -> tuple[Tokenizer, int]:
    """The tokenizer, and the length of passages that both models take."""
    tokenizer, config = Tokenizer.load(asked.model), read_config(asked.model)
    longest = config.longest
    if asked.against is not None:
        other, other_config = Tokenizer.load(asked.against), read_config(asked.against)
        if config.vocab_size != other_config.vocab_size:
            raise ValueError(
                f"{asked.model} has a vocabulary of {config.vocab_size} ids, {asked.against} of "
                f"{other_config.vocab_size}: only models that predict the same ids can be compared"
            )
        for id in range(max(tokenizer.vocab_size, other.vocab_size)):
            names = [one.token(id) if id in one else None for one in (tokenizer, other)]
            if names[0] != names[1]:
                raise ValueError(
                    f"token {id} is {names[0]!r} in {asked.model} and {names[1]!r} in {asked.against}: only models "
                    "with the same vocabulary can be compared"
                )
        longest = min(longest, other_config.longest)
    if (limit := asked.engine.get("max_model_len")) is not None:
        longest = min(longest, limit)
    most = longest - 1  # a step of the engine draws one id behind a prompt
    if most < 2:
        raise ValueError(f"sequences of {longest} tokens leave nothing to predict; they need 3 or more")
    if asked.length is not None and asked.length > most:
        raise ValueError(f"passages of {asked.length} tokens are too long: the models take {most}")
    return tokenizer, asked.length or min(_LENGTH, most)


def _encoder(folder: Path) -> Encoder:
    try:
        return Encoder.load(folder)
    except ValueError as error:
        raise ValueError(
            f"{folder}: {error}; the tasks are asked in the chat format of the built-in model, leave them out"
        ) from None


def _llm(folder: Path, options: Mapping[str, Any], asked: EvaluationRequest) -> LLM:
    gc.collect()  # graphs of a model are cycles; those of the model before leave the memory that this one may take
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return LLM(folder, verbose=asked.verbose, **options)


def _of_model(llm: LLM, folder: Path, passages: Sequence[Passage], examples: Sequence[Example]) -> _Answers:
    right: Values = np.zeros(0)
    scores: tuple[Score, ...] = ()
    if examples:
        said = replies(llm, _encoder(folder), examples, _ANSWER)
        right = np.array([is_right(example, reply) for example, reply in zip(examples, said, strict=True)], float)
        scores = tuple(score(examples, said))
    return _Answers(predict(llm, passages), right, scores)


def _alone(passages: list[Passage], given: list[Passage], answers: _Answers, examples: Sequence[Example]) -> Evaluation:
    bootstrap = _bootstrap(passages)
    return Evaluation(
        len(passages),
        len(given),
        sum(one.scored for one in passages),
        bootstrap.count,
        bootstrap.mean(losses(answers.predictions, passages), np.exp),
        scores=answers.scores,
        task_mean=mean_of_tasks(_by_task(answers.right, examples)) if examples else None,
    )


def _against(
    passages: list[Passage],
    given: list[Passage],
    answers: _Answers,
    reference: _Answers,
    examples: Sequence[Example],
) -> Evaluation:
    bootstrap = _bootstrap(passages)
    found = divergence(answers.predictions, reference.predictions, passages)
    means: tuple[IntervalEstimate | None, ...] = (None, None, None)
    if examples:
        ours, theirs = (_by_task(one.right, examples) for one in (answers, reference))
        means = mean_of_tasks(ours), mean_of_tasks(theirs), mean_difference(ours, theirs)
    return Evaluation(
        len(passages),
        len(given),
        sum(one.scored for one in passages),
        bootstrap.count,
        bootstrap.mean(found.losses, np.exp),
        bootstrap.mean(found.reference_losses, np.exp),
        bootstrap.mean(found.losses - found.reference_losses, np.exp),
        bootstrap.mean(found.kl),
        bootstrap.quantile(found.kl, 0.99),
        bootstrap.mean(found.agrees),
        answers.scores,
        reference.scores,
        *means,
    )


def _bootstrap(passages: Sequence[Passage]) -> Bootstrap:
    several = len({one.document for one in passages}) > 1
    return Bootstrap(
        [one.document if several else number for number, one in enumerate(passages) for _ in range(one.scored)]
    )


def _by_task(values: Values, examples: Sequence[Example]) -> list[Values]:
    names = np.array([one.task for one in examples])
    return [values[names == name] for name in dict.fromkeys(one.task for one in examples)]
