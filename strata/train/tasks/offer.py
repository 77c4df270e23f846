"""A tool together with the questions that it answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from strata.train.tasks.example import Example
from strata.train.tasks.tool import ExerciseTool


@dataclass(frozen=True)
class Offer:
    """task: what its questions are scored as. question: one that it answers, with its call.

    subjects: what it is for; tools that are offered together share none. own_tasks: those of the model's own tasks
    whose questions it answers as well. topics: words of other questions that it answers.
    """

    tool: ExerciseTool
    task: str
    question: Callable[[random.Random], Example]
    subjects: frozenset[str]
    own_tasks: frozenset[str]
    topics: frozenset[str] = frozenset()

    def answers(self, example: Example) -> bool:
        """Whether the tool is for this question, which was not asked with it in mind."""
        return example.task in self.own_tasks or any(topic in example.question.lower() for topic in self.topics)
