"""Graphs of the tests of `strata graph`, each made once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.engine.program.meta_model import MetaModel
from strata.plan.meta_model import meta_model
from tests.cli.graph.shown import LLAMA_405B


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What somebody has probed on this machine changes no test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="package", autouse=True)
def _graphs_are_made_once() -> Iterator[None]:
    """Of a model, a device and ranks, for all tests: of 126 layers it takes seconds."""
    made: dict[str, MetaModel] = {}

    def once(*of: Any, **ranks: Any) -> MetaModel:
        key = repr((of, ranks))
        if key not in made:
            made[key] = meta_model(*of, **ranks)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata.plan.meta_model.meta_model", once)
        yield


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("405b") / "config.json"
    path.write_text(json.dumps(LLAMA_405B))
    return path
