"""The documents of one sample, read as a loader does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from strata.train.data.encoding import Document
from strata.train.data.mixture import DatasetReader
from strata.train.data.shards import TokenDataset


def sample(dataset: TokenDataset, number: int) -> list[Document]:
    """One document, or two of a preference."""
    made = DatasetReader([dataset]).documents(np.zeros(1, np.int64), np.array([number]))
    return [Document(made.tokens[start:end], made.loss_mask[start:end]) for start, end in pairwise(made.offsets)]
